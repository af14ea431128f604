"""What to say where a budget leaves too little memory: how much is missing, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sim.device import Device
from sim.memory import MemoryPlan

if TYPE_CHECKING:
    from tandem.budget import Budget

MIB = 2**20


class Short(NamedTuple):
    """What a job needs of KV at most, and what is missing."""

    who: str
    less: str  # what makes it need less
    pages: int
    nbytes: int
    missing_bytes: int


def deficit(budget: Budget, device: Device, memory: MemoryPlan, short: Short) -> str:
    """One line on KV that the longest request does not find. Only what can help is named."""
    if budget.kv_bytes is not None or budget.kv_pages is not None:
        wanted = f"kv_pages to {short.pages}"
        if budget.kv_bytes is not None:
            wanted = f"kv_bytes to {short.nbytes}"
        return (
            f"budget: {short.who} needs {short.pages} pages of KV, "
            f"{_mib(short.missing_bytes)} more than the budget has; raise budget.{wanted}, "
            f"or {short.less}, or allow refusals with budget.may_refuse=true"
        )
    parts = f"{_parts(memory)}, {short.who} {_mib(short.nbytes)}"
    helps = "take a larger device (device=...; `tandem list devices`), or a smaller model"
    if memory.weights + memory.reserve + memory.page <= device.memory_bytes:
        helps += (
            ", raise budget.fraction, lower the scheduling's token_budget or max_jobs "
            f"(activations) or page_tokens, or {short.less}"
        )
    stand_in = ", a stand-in for a GPU" if device.is_cpu else ""
    return (
        f"budget: {_mib(short.missing_bytes)} short: {parts} do not fit into "
        f"{budget.fraction:g} of the {_mib(device.memory_bytes)} of device={device.name}"
        f"{stand_in}; {helps}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB"


def check_whole(budget: Budget, device: Device, memory: MemoryPlan, kv: int) -> None:
    """ValueError where KV of a given size has no room beside all else on the whole device."""
    room = device.memory_bytes - memory.usable + memory.left  # for KV, whatever the fraction
    if kv <= room:
        return
    key, pages = "kv_pages", max(0, room) // memory.page
    most = f"budget.kv_pages={budget.kv_pages}; at most {pages} fit"
    if budget.kv_bytes is not None:
        key, most = "kv_bytes", f"budget.kv_bytes; at most {pages * memory.page} fit"
    raise ValueError(
        f"budget: {_mib(kv - room)} short: {_parts(memory)}, KV {_mib(kv)} ({most}) do not fit "
        f"into the {_mib(device.memory_bytes)} of {device.name}; lower budget.{key} or the "
        "scheduling's token_budget or max_jobs (activations), or take a smaller model or another "
        "device"
    )


def _parts(memory: MemoryPlan) -> str:
    """What lies on a device beside the KV."""
    parts = f"weights {_mib(memory.weights)}, activations {_mib(memory.activation)}"
    return f"{parts}, reserve {_mib(memory.reserve)}" if memory.reserve else parts


def asks(longest: int, reserved: int | None) -> tuple[str, str]:
    """Whose need decides, in words, and what lowers it."""
    if reserved is not None:
        return f"a reservation of memory.max_tokens={reserved}", "lower memory.max_tokens"
    words = "import the trace with a smaller max_total_tokens"
    return f"the longest request ({longest} tokens)", words


def check_reservation(reserved: int, longest: int) -> None:
    """ValueError if the longest request outgrows it: its last token is given, never kept."""
    if longest - 1 > reserved:
        raise ValueError(
            f"memory.max_tokens={reserved}: the longest request needs {longest - 1}; raise it, or "
            "take memory=paged_restart, or import the trace with a smaller max_total_tokens, or "
            "allow refusals with budget.may_refuse=true"
        )
