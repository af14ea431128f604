"""The four backends: a clock, an executor and, where there is memory to measure, a meter."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import simpy

from engine.executor import Executor, Meter
from engine.plan import Pool
from tandem.budget import GPU, HOST, MIB
from tandem.conform import conform
from tandem.setting import Setting
from traces.prompts import prompt_of

CLOCKS = {
    "sim": ("virtual",),
    "lockstep": ("virtual",),
    "cpu": ("service", "wall"),
    "cuda": ("wall",),
}
MEASURED = ("cpu", "cuda")
SAMPLED_EVERY = 20  # launches per sample of workspace, where a sample takes nobody's time
NOMINAL_NS = 800_000  # for backend.reference_ns: what the reference work took when we chose it
READ_EVERY = 16  # settles per reading of memory, where a reading takes the run's own time


Opened = AbstractContextManager[tuple[simpy.Environment, Executor]]


@dataclass(frozen=True, eq=False)
class World:
    """Where a run happens: in a simulation no machine, else one that executors share.

    `fresh` opens another executor over the same machine on a clock of its own, for probes and
    calibration.
    """

    env: simpy.Environment
    executor: Executor
    machine: Any = None
    meter: Meter | None = None
    fresh: Callable[[], Opened] | None = None

    @property
    def outputs(self) -> Callable[[int], Sequence[int]] | None:
        """Gives the generated token ids of a request, where tokens are generated."""
        return None if self.machine is None else self.machine.outputs

    def probe(self) -> dict[str, float]:
        """Seconds of fixed pieces of work; nothing in a simulation."""
        if self.fresh is None:
            return {}
        from runtime.probe import probe

        with self.fresh() as (env, executor):
            return probe(env, executor, self.machine)


@contextmanager
def world_of(setting: Setting, backend: Mapping[str, Any]) -> Iterator[World]:
    """The world that the config node `backend` names; its threads and memory end with the block."""
    name, clock = backend["name"], backend["clock"]
    every = conform(backend.get("workspace_every"), int | None, "backend.workspace_every")
    reference_ns = conform(backend.get("reference_ns"), int | None, "backend.reference_ns")
    if name not in CLOCKS:
        raise ValueError(f"backend.name={name}: there are {', '.join(CLOCKS)}")
    if clock not in CLOCKS[name]:
        raise ValueError(f"backend {name} has no clock {clock!r}; take {' or '.join(CLOCKS[name])}")
    opened: dict[str, Callable[[Setting], AbstractContextManager[World]]] = {
        "sim": _sim,
        "lockstep": _lockstep,
        "cpu": partial(
            _wall if clock == "wall" else _service, every=every, reference_ns=reference_ns
        ),
        "cuda": _cuda,
    }
    with opened[name](setting) as world:
        yield world


@contextmanager
def _sim(setting: Setting) -> Iterator[World]:
    from sim.executor import SimExecutor

    env = simpy.Environment()
    yield World(env, SimExecutor(env, setting.cost))


@contextmanager
def _lockstep(setting: Setting) -> Iterator[World]:
    from runtime.executor import LockstepExecutor

    env, machine = simpy.Environment(), _machine(setting)
    executor = LockstepExecutor(env, machine, setting.cost)
    yield World(env, executor, machine, _cpu_meter(machine))


@contextmanager
def _service(
    setting: Setting, every: int | None = None, reference_ns: int | None = None
) -> Iterator[World]:
    from runtime.executor import CpuExecutor
    from runtime.reference import Pace
    from runtime.workspace import Workspace

    machine, links = _machine(setting), _links(setting)

    # One for probes and replay: its readings are then taken between launches from the start.
    pace = None if reference_ns is None else Pace(reference_ns)

    @contextmanager
    def fresh() -> Iterator[tuple[simpy.Environment, CpuExecutor]]:
        env = simpy.Environment()
        yield env, CpuExecutor(env, machine, links, pace=pace)

    env = simpy.Environment()
    workspace = Workspace(machine, SAMPLED_EVERY if every is None else every)
    executor = CpuExecutor(env, machine, links, workspace, pace)
    yield World(env, executor, machine, _cpu_meter(machine, executor.paused), fresh)


@contextmanager
def _wall(
    setting: Setting, every: int | None = None, reference_ns: int | None = None
) -> Iterator[World]:
    from runtime.clock import WallClock
    from runtime.reference import Pace
    from runtime.wall import WallExecutor
    from runtime.workspace import Workspace

    machine, links = _machine(setting), _links(setting)
    pace = None if reference_ns is None else Pace(reference_ns)

    def new_clock() -> WallClock:
        return WallClock() if pace is None else WallClock(pace=lambda: pace.factor)

    @contextmanager
    def fresh() -> Iterator[tuple[simpy.Environment, WallExecutor]]:
        clock = new_clock()
        with WallExecutor(clock, machine, links, pace=pace) as executor:
            yield clock, executor

    clock, workspace = new_clock(), Workspace(machine, every or 0)
    with WallExecutor(clock, machine, links, workspace, pace) as executor:
        meter = _cpu_meter(machine, executor.paused, READ_EVERY)
        yield World(clock, executor, machine, meter, fresh)


@contextmanager
def _cuda(setting: Setting) -> Iterator[World]:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("backend=cuda: torch sees no GPU here; measure with backend=cpu")
    from runtime.clock import WallClock
    from runtime.cuda import CudaExecutor, set_budget
    from runtime.meter import CudaMeter

    _check_pinned(setting)
    gc.collect()  # an earlier run of this process may still hold the memory
    torch.cuda.empty_cache()
    set_budget(setting.device.usable_bytes)
    machine = _machine(setting, "cuda")

    @contextmanager
    def fresh() -> Iterator[tuple[simpy.Environment, CudaExecutor]]:
        clock = WallClock()
        with CudaExecutor(clock, machine) as executor:
            yield clock, executor

    with fresh() as (clock, executor):
        host_arenas = [machine.arenas[HOST].pages]
        meter = CudaMeter(host_arenas=host_arenas, every=READ_EVERY, paused=executor.paused)
        yield World(clock, executor, machine, meter, fresh)


def _check_pinned(setting: Setting) -> None:
    """ValueError where the host's KV, which is pinned, would take most of this machine's memory."""
    wanted = pages_of(setting)[HOST] * setting.room.page.nbytes
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if wanted > available / 2:
        raise ValueError(
            f"budget: {wanted / MIB:,.0f} MiB of host memory for swapped KV would be pinned, and "
            f"{available / MIB:,.0f} MiB are free here; set budget.host_bytes to less than half"
        )


def _machine(setting: Setting, device: str = "cpu") -> Any:
    """The model with seeded random weights and the KV pages that the ledger books."""
    import torch

    from runtime.machine import Machine
    from runtime.model import build_model
    from runtime.sampling import Sampling

    if device == "cpu":
        torch.set_num_threads(1)  # the stand-in is one core; lanes and yardstick follow it
    model = build_model(setting.spec, setting.seed, device)
    how = setting.decoding
    return Machine(
        model,
        setting.spec,
        setting.room.page.tokens,
        pages_of(setting),
        prompts_of(setting),
        Sampling(how.temperature, how.top_k, how.top_p, setting.seed),
        () if how.forced else how.eos_ids,
        device,
    )


def pages_of(setting: Setting) -> dict[Pool, int]:
    """KV pages per pool: what the capacity leaves beside the resident places."""
    room = setting.room
    resident = dict.fromkeys(room.capacity_bytes, 0)
    for place, nbytes in room.layout.places.items():
        resident[place.pool] += nbytes
    return {
        pool: (capacity - resident[pool]) // room.page.nbytes
        for pool, capacity in room.capacity_bytes.items()
    }


def prompts_of(setting: Setting) -> dict[int, Sequence[int]]:
    """Token ids of every prompt: the trace's, or seeded ones where it has lengths only."""
    vocabulary, seed = setting.spec.vocab_size, setting.seed
    return {r.request_id: prompt_of(r, vocabulary, seed) for r in setting.requests}


def _links(setting: Setting) -> dict[str, Any]:
    """The speed of both directions of the host link, by lane."""
    from runtime.link import Link

    device = setting.device
    return {
        "gpu->host": Link(device.to_host_bytes_per_s, device.link_ns),
        "host->gpu": Link(device.to_device_bytes_per_s, device.link_ns),
    }


def _cpu_meter(machine: Any, paused: Callable[[], Any] = nullcontext, every: int = 1) -> Meter:
    from runtime.meter import CpuMeter

    weights = {GPU: list(machine.decoder.model.parameters()), HOST: []}
    arenas = {pool: arena.pages for pool, arena in machine.arenas.items()}
    return CpuMeter(weights, arenas, every, paused)
