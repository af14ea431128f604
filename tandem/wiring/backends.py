"""The four backends: a clock and its pace, an executor and, where memory is measured, a meter."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import simpy

from engine.contract.executor import Executor, Meter
from engine.loop.state import VirtualClock
from models.spec import ModelSpec
from tandem.config.check import conform
from tandem.wiring.cost import about
from tandem.wiring.machines import (
    check_arena,
    check_here,
    cpu_meter,
    device_bytes_of,
    gpu_meter,
    links_of,
    on_cpu,
    on_gpus,
    runs_adapters,
    served,
    warn_of_pinned,
)
from tandem.wiring.run_spec import RunSpec
from traces.training.recipe import Recipe

if TYPE_CHECKING:  # torch comes with them, or they come later
    from runtime.executors.machine import Machine
    from runtime.measure.reference import ClockPace
    from runtime.serving.machine import ServingMachine
    from sim.executor import SimExecutor

log = logging.getLogger(__name__)
NEVER = 1_000_000  # collections of the middle generation before one of the oldest


@contextmanager
def no_full_collections(begins_with_one: bool = True) -> Iterator[None]:
    """Young garbage is still collected in the block; old garbage is collected after it.

    A full collection walks all that transformers has loaded: it can take 0.4 s inside a launch of
    8 ms, and no cost model can know when it comes. A collection at the beginning gives back the
    memory of an earlier run; where no memory is measured, it may take longer than the run.
    """
    young, middle, old = gc.get_threshold()
    if begins_with_one:
        gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


AUTO = "auto"
KEY = "reference_ns"


def is_auto(config: Mapping[str, Any]) -> bool:
    """Whether the nominal times of the reference works are still to be found."""
    return bool(config["backend"].get(KEY) == AUTO)


def with_reference(config: Mapping[str, Any], nominal_ns: Sequence[int]) -> dict[str, Any]:
    """The configuration with these nominal times of the reference works."""
    return {**config, "backend": {**config["backend"], KEY: [*nominal_ns]}}


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `auto` replaced by what the profile was measured with.

    ValueError without a profile, or where that was measured in real time or by an older clock.
    """
    if not is_auto(config):
        return dict(config)
    profile = config["profile"]
    if profile is None:
        raise ValueError(f"backend.{KEY}={AUTO} is that of a profile; name one with profile=")
    nominal = about(Path(str(profile))).get(KEY)
    if nominal is None:
        raise ValueError(
            f"backend.{KEY}={AUTO}: profile={profile} was measured in real time; "
            f"calibrate with backend.{KEY}={AUTO} too"
        )
    if not isinstance(nominal, list):
        raise ValueError(
            f"profile={profile} was measured with an older clock, of one reference work; "
            "calibrate anew"
        )
    return with_reference(config, nominal)


def trained_ns(spec: ModelSpec, recipe: Recipe) -> tuple[int, ...]:
    """What the reference works of training take on this machine just now: a unit, an update."""
    import torch

    from runtime.measure.reference import settled_ns, training_references

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return settled_ns(training_references(spec, recipe))


def measured_ns(spec: ModelSpec, seed: int) -> tuple[int, ...]:
    """What the reference works take on this machine just now: decodes, prompt."""
    import torch

    from runtime.measure.reference import references, settled_ns
    from runtime.serving.model import build_model

    torch.set_num_threads(1)
    return settled_ns(references(build_model(spec, seed), spec))


CLOCKS = {
    "sim": ("virtual",),
    "lockstep": ("virtual",),
    "cpu": ("service", "wall"),
    "cuda": ("wall",),
}
MEASURED = ("cpu", "cuda")
SAMPLED_EVERY = 20  # launches per sample of workspace, where a sample takes no time of the run
READ_EVERY = 16  # settles per reading of memory, where a reading takes the run's own time


class Opened(NamedTuple):
    """An executor on a clock of its own, and what reads the memory beside its launches."""

    env: simpy.Environment
    executor: Executor
    meter: Meter | None


@dataclass(frozen=True, eq=False)
class Backend:
    """Where a run happens: a clock, an executor and, unless it is simulated, a machine.

    Executors share `machine`; a simulation has none. `fresh` opens another executor over this
    machine, on a clock of its own, for probes and calibration.
    """

    env: simpy.Environment
    executor: Executor
    machine: Machine[Any] | None = None
    meter: Meter | None = None
    fresh: Callable[[], AbstractContextManager[Opened]] | None = None
    probe_look_s: float | None = None  # how long each look for drift takes

    @property
    def outputs(self) -> Callable[[int], Sequence[int]] | None:
        """Generated token ids by request; None where no token is generated."""
        return None if self.machine is None else self.machine.outputs

    @property
    def loss_of(self) -> Callable[[int, int], float] | None:
        """Loss by step and microbatch of a training job; None where nothing is really trained."""
        return None if self.machine is None else self.machine.loss

    @property
    def serving(self) -> ServingMachine | None:
        """What serves on the first device: it is probed and calibrated."""
        return next(iter(served(self.machine)), None) if self.machine is not None else None

    def probe(self) -> dict[str, float]:
        """Seconds of fixed pieces of work; empty in a simulation, and where probes are off."""
        if self.fresh is None or self.probe_look_s is None:
            return {}
        from runtime.measure.reference import probe, probe_plainly

        if (serving := self.serving) is None:
            return probe_plainly(self.probe_look_s)
        with self.fresh() as opened:
            return probe(opened.env, opened.executor, serving, self.probe_look_s)


@contextmanager
def backend_of(run_spec: RunSpec, backend: Mapping[str, Any]) -> Iterator[Backend]:
    """The backend that a config node names; its threads and memory end with the block.

    Args:
        run_spec: The run, built from its configuration.
        backend: The config node `backend`.

    Raises:
        ValueError: The node names no backend or clock that there is, or this machine cannot hold
            the run.
    """
    name, clock = backend["name"], backend["clock"]
    every = conform(backend.get("workspace_every"), int | None, "backend.workspace_every")
    reference_ns = conform(
        backend.get("reference_ns"), tuple[int, int] | None, "backend.reference_ns"
    )
    if name not in CLOCKS:
        raise ValueError(f"backend.name={name}: there are {', '.join(CLOCKS)}")
    if clock not in CLOCKS[name]:
        raise ValueError(f"backend {name} has no clock {clock!r}; take {' or '.join(CLOCKS[name])}")
    ranks = max((trainee.job.ranks for trainee in run_spec.trainees), default=1)
    if ranks > 1 and name != "sim":
        raise ValueError(
            f"group: backend {name} trains on one device, not {ranks}; take backend=sim or "
            "group.devices=1"
        )
    openers: dict[str, Callable[[RunSpec], AbstractContextManager[Backend]]] = {
        "sim": _sim,
        "lockstep": _lockstep,
        "cpu": partial(
            _wall if clock == "wall" else _service, every=every, reference_ns=reference_ns
        ),
        "cuda": partial(_cuda, attention=backend.get("attention")),
    }
    probe_look_s = conform(backend.get("probe_look_s"), float | None, "backend.probe_look_s")
    if run_spec.has_two_lanes and name == "cpu":
        log.warning(
            "backend=cpu: one thread runs both compute lanes in turn, so times are not those of "
            "spatial sharing (backend=sim assumes some); tokens, losses and gradients are"
        )
    if name in ("lockstep", "cpu"):
        check_here(run_spec)  # before torch is imported, and weights are drawn
    with openers[name](run_spec) as made:
        yield replace(made, probe_look_s=probe_look_s)


@contextmanager
def _sim(run_spec: RunSpec) -> Iterator[Backend]:
    env = VirtualClock()
    yield Backend(env, _simulated(env, run_spec))


def _simulated(env: simpy.Environment, run_spec: RunSpec) -> SimExecutor:
    """The executor of a simulation, by the number of compute lanes that the policy names."""
    from sim.executor import SimExecutor
    from sim.two_lanes import TwoLaneExecutor

    if run_spec.has_two_lanes:
        return TwoLaneExecutor(env, run_spec.durations, run_spec.lane_share)
    return SimExecutor(env, run_spec.durations)


@contextmanager
def _lockstep(run_spec: RunSpec) -> Iterator[Backend]:
    from runtime.executors.lockstep import LockstepExecutor

    env, machine = VirtualClock(), on_cpu(run_spec)
    executor = LockstepExecutor(machine, _simulated(env, run_spec))
    yield Backend(env, executor, machine, cpu_meter(machine))


@contextmanager
def _service(
    run_spec: RunSpec, every: int | None = None, reference_ns: tuple[int, int] | None = None
) -> Iterator[Backend]:
    from runtime.executors.lockstep import CpuExecutor
    from runtime.measure.tracker import Workspace

    machine, links = on_cpu(run_spec), links_of(run_spec)

    # One for probes and replay: its readings are then taken between launches from the start.
    pace = _clock_pace(machine, run_spec, reference_ns)

    @contextmanager
    def fresh(workspace: Workspace | None = None) -> Iterator[Opened]:
        env = VirtualClock()
        executor = CpuExecutor(env, machine, links, workspace, pace)
        yield Opened(env, executor, cpu_meter(machine, executor.paused))

    with fresh(Workspace(machine, SAMPLED_EVERY if every is None else every)) as main:
        yield Backend(main.env, main.executor, machine, main.meter, fresh)


def _clock_pace(
    machine: Machine[Any], run_spec: RunSpec, reference_ns: tuple[int, int] | None
) -> ClockPace | None:
    """The yardsticks of a clock, over the weights that are served, or by the width of what is
    trained where nothing is served; None where time is real."""
    if reference_ns is None:
        return None
    if not run_spec.requests:
        from runtime.measure.reference import TrainingClockPace, training_references

        trainee = run_spec.trainees[0]
        return TrainingClockPace(
            reference_ns, training_references(trainee.spec, trainee.job.recipe)
        )
    from runtime.measure.reference import ClockPace, references

    first = served(machine)[0]
    return ClockPace(reference_ns, references(first.decoder.model, run_spec.spec))


@contextmanager
def _wall(
    run_spec: RunSpec, every: int | None = None, reference_ns: tuple[int, int] | None = None
) -> Iterator[Backend]:
    from runtime.executors.clock import WallClock
    from runtime.executors.wall import WallExecutor
    from runtime.measure.tracker import Workspace

    machine, links = on_cpu(run_spec), links_of(run_spec)
    pace = _clock_pace(machine, run_spec, reference_ns)

    def new_clock() -> WallClock:
        return WallClock() if pace is None else WallClock(pace=lambda: pace.factor)

    @contextmanager
    def fresh(workspace: Workspace | None = None) -> Iterator[Opened]:
        clock = new_clock()
        with WallExecutor(clock, machine, links, workspace, pace) as executor:
            yield Opened(clock, executor, cpu_meter(machine, executor.paused, READ_EVERY))

    with fresh(Workspace(machine, every or 0)) as main:
        yield Backend(main.env, main.executor, machine, main.meter, fresh)


@contextmanager
def _cuda(run_spec: RunSpec, attention: Any = None) -> Iterator[Backend]:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("backend=cuda: torch sees no GPU here; measure with backend=cpu")
    count = torch.cuda.device_count()
    if count < run_spec.replicas:
        raise ValueError(f"replicas={run_spec.replicas}: each takes a GPU, and torch sees {count}")
    from runtime.executors.clock import WallClock
    from runtime.executors.cuda import CudaExecutor
    from runtime.executors.device import budgets, without_cudnn_attention
    from runtime.kernels import are_chosen, check_shape
    from runtime.measure.meter import Meters

    check_arena(run_spec)
    warn_of_pinned(run_spec)
    without_cudnn_attention()
    # Windows and rows through adapters attend by torch: the kernels keep nothing for a backward.
    serves = bool(run_spec.requests) and not runs_adapters(run_spec)
    kernels = serves and are_chosen(attention)
    if kernels:
        check_shape(run_spec.spec)
    gc.collect()  # an earlier run of this process may still hold the memory
    numbers = range(run_spec.replicas)
    with budgets(dict.fromkeys(numbers, device_bytes_of(run_spec))):
        machine = on_gpus(run_spec, [f"cuda:{number}" for number in numbers], kernels)

        @contextmanager
        def fresh() -> Iterator[Opened]:
            clock = WallClock()
            with CudaExecutor(clock, machine, run_spec.replicas) as executor:
                meters = [gpu_meter(machine, i, executor.paused, READ_EVERY) for i in numbers]
                yield Opened(clock, executor, Meters(meters))

        try:
            with fresh() as main:
                yield Backend(main.env, main.executor, machine, main.meter, fresh)
        finally:
            if machine.store is not None:
                machine.store.close()
