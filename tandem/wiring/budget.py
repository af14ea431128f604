"""How many bytes a run may use, what lies in them at its start, and the line on too few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from engine.contract.adapters import AdapterSpec
from engine.contract.layout import Layout
from engine.contract.policy import Policy, traits_of
from engine.contract.regions import SHARED_OWNER, Kind, PageSize, Place, Pool, Region, Tier
from engine.contract.rules import Advised, Remedy
from models.spec import ModelSpec
from policies.scheduling.recorded import RecordedPlans
from policies.training.out_of_memory import OutOfMemory
from sim.devices.device import Device
from sim.devices.kv_room import MemoryPlan, graph_bytes, plan_memory
from traces.serving.request import Request

MIB = 2**20


class Short(NamedTuple):
    """What a job needs of KV at most, and what is missing."""

    cause: str  # the request or reservation that decides
    remedy: str  # what makes it need less
    pages: int
    nbytes: int
    missing_bytes: int
    smaller_step: str  # what makes the largest step take less


def deficit(budget: Budget, device: Device, memory: MemoryPlan, short: Short) -> str:
    """One line on KV that the longest request does not find, with the remedies that can help."""
    if budget.kv_bytes is not None or budget.kv_pages is not None:
        wanted = f"kv_pages to {short.pages}"
        if budget.kv_bytes is not None:
            wanted = f"kv_bytes to {short.nbytes}"
        return (
            f"budget: {short.cause} needs {short.pages} pages of KV, "
            f"{_mib(short.missing_bytes)} more than the budget has; raise budget.{wanted}, "
            f"or {short.remedy}, or allow refusals with budget.may_refuse=true"
        )
    parts = f"{_parts(memory)}, {short.cause} {_mib(short.nbytes)}"
    helps = "take a larger device (device=...; `tandem list devices`), or a smaller model"
    if memory.weights + memory.reserve + memory.page <= device.memory_bytes:
        helps += (
            f", raise budget.fraction, {short.smaller_step} (activations), lower page_tokens, "
            f"or {short.remedy}"
        )
    stand_in = ", a stand-in for a GPU" if device.is_cpu else ""
    return (
        f"budget: {_mib(short.missing_bytes)} short: {parts} do not fit into "
        f"{budget.fraction:g} of the {_mib(device.memory_bytes)} of device={device.name}"
        f"{stand_in}; {helps}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.1f} MiB"


def check_whole(
    budget: Budget, device: Device, memory: MemoryPlan, kv: int, smaller_step: str
) -> None:
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
        f"into the {_mib(device.memory_bytes)} of {device.name}; lower budget.{key}, "
        f"{smaller_step} (activations), or take a smaller model or another device"
    )


def _parts(memory: MemoryPlan) -> str:
    """What lies on a device beside the KV."""
    parts = f"weights {_mib(memory.weights)}, activations {_mib(memory.activation)}"
    return f"{parts}, reserve {_mib(memory.reserve)}" if memory.reserve else parts


def asks(longest: int, reserved: int | None) -> tuple[str, str]:
    """The need that decides, in words, and what lowers it."""
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


WARMUP_SHARE = "memory.warmup_share (planner.warmup_share if the policy's memory has none)"
# PatrickStar's memory has both shares, and its planner takes them from there.
REMEDIES = {  # in words, with the keys of a configuration
    Remedy.TRAIN_ADAPTERS: "train adapters (training/recipe=lora)",
    Remedy.SMALLER_MODEL: "take a smaller model",
    Remedy.SMALLER_MICROBATCHES: "take smaller microbatches (training.sequences)",
    Remedy.SHORTER_SEQUENCES: "take shorter sequences (training.sequence_tokens)",
    Remedy.LARGER_SHARE: (
        "give training a larger share of it (memory.device_share, memory.host_share)"
    ),
    Remedy.RECOMPUTE: "recompute (planner.modes=recompute)",
    Remedy.OFFLOAD_INPUTS: "send layers' inputs to the host (planner.offloads_inputs=true)",
    Remedy.KEEP_INPUTS: "keep layers' inputs on the device (planner.offloads_inputs=false)",
    Remedy.START_ON_HOST: "take planner.start=host",
    Remedy.START_ON_HOST_FIRST: "take planner.start=host_first",
    Remedy.START_ON_DEVICE: "take planner.start=device",
    Remedy.SMALLER_CHUNKS: "take smaller chunks (planner.chunk_elements)",
    Remedy.LARGER_CHUNKS: "take larger chunks (planner.chunk_elements)",
    Remedy.LARGER_SIZES: "take larger sizes (planner.sizes)",
    Remedy.NAMED_SIZE: "name a size (planner.chunk_elements)",
    Remedy.OVERSIZE_ALONE: "take planner.oversize=alone",
    Remedy.LARGER_WARMUP_SHARE: f"take a larger {WARMUP_SHARE}",
    Remedy.LARGER_SHARES: (
        f"take larger {WARMUP_SHARE} and memory.device_share (or planner.device_share)"
    ),
    Remedy.OWN_GRADIENTS: "set reuses_gradients=false",
    Remedy.PAGED_MEMORY: "take memory=paged_restart",
    Remedy.NO_PREFIX_CACHING: "leave memory.prefix_caching out",
}


def advised_line(error: BaseException) -> str:
    """The line of an error for a user of `tandem`: what is wrong, and what would help.

    Args:
        error: of any kind. The remedies of an Advised one are told with keys of a configuration.
    """
    if not isinstance(error, Advised):
        return str(error)
    problem, helps = str(error), [REMEDIES[remedy] for remedy in error.remedies]
    if isinstance(error, OutOfMemory):
        helps = ["give it more memory", *helps]
        problem = error.lacking + (f" (planner.start={error.start})" if error.start else "")
    return f"{problem}; {', or '.join(helps)}" if helps else problem


NONE_PUBLISHED: Mapping[str, int] = MappingProxyType({})
GPU: Pool = (Tier.GPU, 0)
HOST: Pool = (Tier.HOST, 0)


@dataclass(frozen=True)
class Budget:
    """The config node `budget`: memory of a replica. At most one of kv_bytes and kv_pages;
    device_bytes only where nothing is served."""

    fraction: float = 0.9
    device_bytes: int | None = None
    kv_bytes: int | None = None
    kv_pages: int | None = None
    host_bytes: int | None = None
    graph_rows: int = 0
    step_tokens: int | None = None
    may_refuse: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"budget.fraction={self.fraction}: it must be above 0 and at most 1")
        if self.kv_bytes is not None and self.kv_pages is not None:
            raise ValueError("budget: give kv_bytes or kv_pages, not both")
        for name in ("device_bytes", "kv_bytes", "kv_pages", "step_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"budget.{name}={value}: it must be at least 1")
        for name in ("host_bytes", "graph_rows"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"budget.{name}={value}: it must be at least 0")


@dataclass(frozen=True)
class Room:
    """What the engine is given: capacities per pool, the page, and what is resident."""

    capacity_bytes: dict[Pool, int]
    page: PageSize
    layout: Layout
    memory: MemoryPlan  # of a device: what is set aside beside the KV; graphs are in the reserve
    graph_rows: int = 0  # decodes of the largest CUDA graph


def room_for(
    budget: Budget,
    device: Device,
    spec: ModelSpec,
    page: PageSize,
    requests: Sequence[Request],
    policy: Policy,
    replicas: int = 1,
    longest_sample: int = 0,
) -> Room:
    """Weights, KV and workspace inside the budget. ValueError where they cannot fit.

    `longest_sample` is in tokens, of a job that finetunes beside the requests. Each replica has a
    device and host memory of its own, both as large as the budget says.
    """
    memory = memory_plan(budget, spec, device, page, requests, policy, longest_sample)
    given = _kv_bytes(budget, page)
    if given is not None and not _is_replay(policy):
        check_whole(budget, device, memory, given, _smaller_step(policy))
    kv = memory.left if given is None else given
    longest, reserved, needed = _most_needed(page, requests, policy)
    if reserved is not None and not budget.may_refuse:
        check_reservation(reserved, longest)
    if kv < (page.nbytes if budget.may_refuse else needed):
        pages, missing = needed // page.nbytes, needed - kv
        short = Short(*asks(longest, reserved), pages, needed, missing, _smaller_step(policy))
        raise ValueError(deficit(budget, device, memory, short))
    host = device.host_bytes if budget.host_bytes is None else budget.host_bytes
    capacity, weights = dict[Pool, int](), dict[Place, int]()
    for i in range(replicas):
        capacity[Tier.GPU, i] = spec.weight_bytes + kv // page.nbytes * page.nbytes
        capacity[Tier.HOST, i] = host
        weights[Place(Region(SHARED_OWNER, Kind.WEIGHT), Tier.GPU, i)] = spec.weight_bytes
    return Room(capacity, page, Layout(weights), memory, budget.graph_rows)


class MostNeeded(NamedTuple):
    """What one request needs of KV at most."""

    longest_tokens: int
    reserved_tokens: int | None  # by each job, whole
    nbytes: int


def _most_needed(page: PageSize, requests: Sequence[Request], policy: Policy) -> MostNeeded:
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    promised = traits_of(policy)
    reserved = promised.reserved_tokens or None
    nbytes = page.bytes_for(reserved or longest) + promised.spare_pages * page.nbytes
    return MostNeeded(longest, reserved, nbytes)


def with_adapters(
    room: Room,
    adapters: Sequence[AdapterSpec],
    requests: Sequence[Request],
    policy: Policy,
    budget: Budget,
    published: Mapping[str, int] = NONE_PUBLISHED,
) -> Room:
    """The room with the homes of adapters on the hosts.

    ValueError where these do not fit, beside so many new versions of those that are `published`, or
    the longest request has no room beside an adapter.
    """
    homes = sum([a.nbytes * (1 + published.get(a.name, 0)) for a in adapters])
    for (tier, _), nbytes in room.capacity_bytes.items():
        if tier is Tier.HOST and homes > nbytes:
            raise ValueError(
                f"adapters: {_mib(homes - nbytes)} short: homes of all versions take {_mib(homes)} "
                f"of the {_mib(nbytes)} of the host; raise budget.host_bytes, or take fewer, or a "
                "lower adapters.rank"
            )
    kv = room.capacity_bytes[GPU] - sum([n for p, n in room.layout.places.items() if p.pool == GPU])
    largest = max([adapter.nbytes for adapter in adapters])
    longest, reserved, needed = _most_needed(room.page, requests, policy)
    if not budget.may_refuse and kv < needed + largest:
        told, _ = asks(longest, reserved)
        raise ValueError(
            f"budget: {_mib(needed + largest - kv)} short: an adapter takes {_mib(largest)} of the "
            f"{_mib(kv)} for KV, and {told} needs {_mib(needed)}; raise budget.fraction or "
            "budget.kv_pages, lower adapters.rank, or allow refusals with budget.may_refuse=true"
        )
    return replace(room, layout=room.layout.with_adapters(adapters, room.capacity_bytes))


def check_states(
    budget: Budget, room: Room, planned: Layout, requests: Sequence[Request], policy: Policy
) -> None:
    """ValueError where states of finetuning leave the longest request too few pages."""
    states, page = sum([n for p, n in planned.places.items() if p.pool == GPU]), room.page
    kv = room.capacity_bytes[GPU] - sum([n for p, n in room.layout.places.items() if p.pool == GPU])
    longest, reserved, needed = _most_needed(page, requests, policy)
    largest = max([adapter.nbytes for adapter in room.layout.adapters], default=0)
    least = page.nbytes if budget.may_refuse else needed + largest
    if kv - states < least:
        who, _ = asks(longest, reserved)
        beside = f" beside an adapter of {_mib(largest)}" if largest else ""
        raise ValueError(
            f"budget: {_mib(least - kv + states)} short: what the job trains takes {_mib(states)} "
            f"of the {_mib(kv)} for KV, and {who} needs {_mib(needed)}{beside}; train adapters "
            "(training/recipe=lora), take training.microbatches=1, raise budget.fraction, or take "
            "a larger device"
        )


def training_room(budget: Budget, device: Device, page: PageSize, frozen_bytes: int = 0) -> Room:
    """All of the device for training, where nothing is served.

    `frozen_bytes` are weights that jobs finetune over: they lie there once, and belong to no job.
    """
    usable = int(budget.fraction * device.memory_bytes)
    capacity = budget.device_bytes or usable - device.reserve_bytes
    if capacity > device.memory_bytes:
        raise ValueError(
            f"budget.device_bytes={capacity}: {device.name} has {device.memory_bytes}; lower it"
        )
    host = device.host_bytes if budget.host_bytes is None else budget.host_bytes
    if frozen_bytes > capacity:
        raise OutOfMemory(GPU, frozen_bytes - capacity, "the weights that jobs finetune over", ())
    memory = MemoryPlan(usable, frozen_bytes, 0, device.reserve_bytes, page.nbytes)
    weights = {Place(Region(SHARED_OWNER, Kind.WEIGHT), *GPU): frozen_bytes}
    return Room({GPU: capacity, HOST: host}, page, Layout(weights if frozen_bytes else {}), memory)


def memory_plan(
    budget: Budget,
    spec: ModelSpec,
    device: Device,
    page: PageSize,
    requests: Sequence[Request],
    policy: Policy,
    longest_sample: int = 0,
) -> MemoryPlan:
    """What a device's memory is for: on a GPU as an engine plans that profiles itself.

    The CPU stand-in sets aside what its own largest step is measured to allocate. A sample of so
    many tokens is a step of its own where the scheduling takes samples whole.
    """
    promised = traits_of(policy)
    whole = longest_sample if promised.whole_samples else 0
    both: Callable[[int, int], int] = add if promised.two_lanes else max
    reserve = device.reserve_bytes + graph_bytes(spec, budget.graph_rows, page)
    if not device.is_cpu:
        tokens, jobs = _max_step(budget, requests, policy)
        given = (device.memory_bytes, budget.fraction, both(tokens, whole), jobs, reserve, page)
        return plan_memory(spec, *given)
    return MemoryPlan(
        usable=int(budget.fraction * device.memory_bytes),
        weights=spec.weight_bytes,
        activation=both(
            _workspace_bytes(budget, spec, page.tokens, requests, policy),
            spec.workspace_bytes([whole], [0], 0, page.tokens) if whole else 0,
        ),
        reserve=reserve,
        page=page.nbytes,
    )


def _max_step(budget: Budget, requests: Sequence[Request], policy: Policy) -> tuple[int, int]:
    """Tokens and sequences of the largest step: those that the scheduling tells by its traits.

    Where it tells none, all requests may be in service, and all prompts may start together. A
    scheduling that does not cut prompts may have to compute the longest request whole.
    """
    promised = traits_of(policy)
    jobs = promised.max_jobs or len(requests)
    if limit := budget.step_tokens or promised.step_tokens:
        return limit, min(jobs, limit)
    bound = promised.prompt_tokens
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    prompts = sorted((r.prompt_tokens for r in requests), reverse=True)
    return max(bound or sum(prompts[:jobs]), longest), jobs


def _kv_bytes(budget: Budget, page: PageSize) -> int | None:
    return budget.kv_bytes if budget.kv_pages is None else budget.kv_pages * page.nbytes


def _smaller_step(policy: Policy) -> str:
    """What makes the largest step of a policy take less memory, in words."""
    promised = traits_of(policy)
    if promised.step_tokens or promised.prompt_tokens or promised.max_jobs:
        return "lower the scheduling's token_budget or max_jobs"
    return "declare step_tokens and max_jobs in the scheduling's traits"


def _is_replay(policy: Policy) -> bool:
    """Whether a plan log is played back: its steps are given, and fitted where they were made."""
    return isinstance(policy, RecordedPlans)


def _workspace_bytes(
    budget: Budget, spec: ModelSpec, page_tokens: int, requests: Sequence[Request], policy: Policy
) -> int:
    """Of the largest step: prompts that start together up to the tokens that the policy promises.

    One of them is the longest request computed whole after a restart or, under such a bound, the
    end of it: a slice behind a context, which takes a mask.
    """
    promised = traits_of(policy)
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    limit = budget.step_tokens or promised.step_tokens or promised.prompt_tokens
    jobs = min(len(requests), promised.max_jobs or len(requests))
    prompts = sorted((r.prompt_tokens for r in requests), reverse=True)
    wanted = limit or sum(prompts[:jobs])  # all that may start together where nothing limits a step
    sizes = []
    for first in {longest, min(limit, longest - 1)} - {0}:
        tokens = [first, *([wanted - first] if wanted > first else [])]
        contexts = [longest - first, 0][: len(tokens)]
        samples = min(jobs, sum(tokens))
        sizes.append(spec.workspace_bytes(tokens, contexts, samples, page_tokens))
    return max(sizes)
