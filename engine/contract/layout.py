"""The layout, which a planner decides before the first step: chunks, units, stages, places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from engine.contract.adapters import AdapterSpec, adapter_homes
from engine.contract.regions import Place, Pool, Work

if TYPE_CHECKING:
    from models.training.shape import TrainingShape, WindowBytes
    from traces.serving.request import TrainingJob


WIDENED = 1 << 22  # 16-bit gradients become float32 for an update, so many elements at a time
WIDE_BYTES = 4
ALL = Fraction(1)


class Mode(StrEnum):
    """Where a unit's activations are between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parameters that are kept, moved and updated as one. Bytes include its padding.

    In a group a device may own a part of each chunk. Bytes are then those of its own part, and
    units compute with `remote_bytes` of weights beside it.

    Attributes:
        parameters: parameters of the TrainingShape by number, in the order in which they lie.
        weight_bytes: bytes of weights.
        gradient_bytes: bytes of gradients; 0 where no parameter trains.
        optimizer_bytes: bytes of optimizer states.
        update_bytes: workspace of an update.
        remote_bytes: bytes of weights that other devices of the group own.
    """

    parameters: tuple[int, ...]
    weight_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    update_bytes: int = 0
    remote_bytes: int = 0

    @property
    def trains(self) -> bool:
        """Whether its parameters train."""
        return bool(self.gradient_bytes)

    @property
    def whole_bytes(self) -> int:
        """Weights of all devices' parts together."""
        return self.weight_bytes + self.remote_bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """A link of the chain: the chunks that it touches and the bytes it takes for a microbatch.

    Attributes:
        chunks: chunks whose weights it reads.
        trained: chunks whose gradients its backward adds to.
        mode: where its activations are between forward and backward.
        input_bytes: its input, and the gradient of it.
        saved_bytes: activations that its forward keeps beside the input.
        forward_bytes: workspace of a forward that keeps activations.
        light_bytes: workspace of a forward that keeps none.
        backward_bytes: workspace of its backward.
        tied_gradient_bytes: gradients of tables that a unit below adds to as well.
        sends_input: whether its input is on the host until its backward.
    """

    chunks: tuple[int, ...]
    trained: tuple[int, ...]
    mode: Mode
    input_bytes: int
    saved_bytes: int
    forward_bytes: int
    light_bytes: int
    backward_bytes: int
    tied_gradient_bytes: int = 0
    sends_input: bool = False


class TrainingTask(NamedTuple):
    """A task of a training job.

    Attributes:
        work: what is done.
        part: the unit; of an update the chunk.
        microbatch: counted through the job; in the order of a stage, from the step under way.
    """

    work: Work
    part: int
    microbatch: int

    def later(self, microbatches: int) -> TrainingTask:
        """The task of a later microbatch.

        Args:
            microbatches: how many microbatches later.

        Returns:
            The work on that part then.
        """
        return TrainingTask(self.work, self.part, self.microbatch + microbatches)


@dataclass(frozen=True, slots=True)
class Stage:
    """Neighbouring units of a training job, and the order of their tasks.

    The order is `beginning`, then `period` once for each step, and `end` in place of the last one.
    A period may hold tasks of later steps: PipeDream-2BW's pipeline stays full between them.

    Attributes:
        units: numbers of its units.
        period: the tasks of a step, with microbatches from its first one.
        beginning: tasks before the first period.
        end: the tasks of the last step, with microbatches from its first one; None: a period.
        device: where it runs; None: on any device.
    """

    units: range
    period: tuple[TrainingTask, ...]
    beginning: tuple[TrainingTask, ...] = ()
    end: tuple[TrainingTask, ...] | None = None
    device: int | None = None

    def task(self, index: int, job: TrainingJob) -> TrainingTask | None:
        """A task by its number in the order.

        Args:
            index: tasks of the stage before it, from the first step on.
            job: the training job.

        Returns:
            The task, with its microbatch counted through the job; None behind the last one.
        """
        if index < len(self.beginning):
            return self.beginning[index]
        step = self._step(index, job)
        tasks, at = self._tasks_of(step, job), index - self._start_of(step)
        return tasks[at].later(step * job.microbatches) if at < len(tasks) else None

    def num_left(self, index: int, job: TrainingJob) -> int:
        """How many tasks there are from one to the end of its period.

        Args:
            index: tasks of the stage before it, from the first step on.
            job: the training job.

        Returns:
            A number of tasks; those of the beginning count with the first period.
        """
        step = self._step(index, job)
        return max(0, self._start_of(step) + len(self._tasks_of(step, job)) - index)

    def _step(self, index: int, job: TrainingJob) -> int:
        periods = max(0, index - len(self.beginning)) // len(self.period)
        return min(periods, job.num_steps - 1)

    def _start_of(self, step: int) -> int:
        return len(self.beginning) + step * len(self.period)

    def _tasks_of(self, step: int, job: TrainingJob) -> tuple[TrainingTask, ...]:
        is_last = step == job.num_steps - 1
        return self.period if self.end is None or not is_last else self.end


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """Chunks, units and stages of one training job, on one device of its group.

    Attributes:
        chunks: its chunks, by number.
        units: its units, in the order of the forward.
        first: the unit at which a backward ends.
        ranks: devices of the group.
        windows: of a finetuning job, its bytes per token; None of another.
        stages: by number, with the orders of their tasks; (): one stage, which updates last. Of a
            finetuning job none: its windows go in any order that its frontiers allow.
        versions: of weights that are kept at once: 2 where microbatches of the next step begin
            before the updates of this one (PipeDream-2BW).
        persistent: chunks whose states stay on the device and are updated there (ProTrain).
        buffers: how many other chunks have weights on the device at once (ProTrain).
        swaps_ahead: turns of units before its backward at which a unit's offloaded activations are
            fetched (ProTrain).
        peak_bytes: of the device, the least with which a step runs; 0: the planner has not said.
        step_ns: of a step, as the planner foretells it; 0: it has not. It is told, and nothing
            follows from it.
    """

    chunks: tuple[Chunk, ...]
    units: tuple[Unit, ...]
    first: int = 0
    ranks: int = 1
    windows: WindowBytes | None = None
    stages: tuple[Stage, ...] = ()
    versions: int = 1
    persistent: frozenset[int] = frozenset()
    buffers: int = 0
    swaps_ahead: int = 1
    peak_bytes: int = 0
    step_ns: int = field(default=0, compare=False)

    def __repr__(self) -> str:
        return f"TrainingLayout({len(self.chunks)} chunks, {len(self.units)} units)"

    def __hash__(self) -> int:
        """By its size alone: what is cached by a layout hashes no chunk."""
        return hash((len(self.chunks), len(self.units), self.first, self.ranks))

    @property
    def num_units(self) -> int:
        """Layers, embedding and head."""
        return len(self.units)

    @property
    def trained_by(self) -> dict[int, tuple[int, ...]]:
        """By chunk that trains, the units whose backwards add to its gradients."""
        found: dict[int, tuple[int, ...]] = {}
        for c, chunk in enumerate(self.chunks):
            if chunk.trains:
                found[c] = tuple(u for u, unit in enumerate(self.units) if c in unit.trained)
        return found


def one_stage(
    job: TrainingJob, trained_by: Mapping[int, Sequence[int]], first: int, is_eager: bool = False
) -> Stage:
    """All units as one stage: each microbatch goes forward, and then backward.

    Updates follow all backwards of the step, in the order of chunks. An eager one follows the last
    backward that adds to its gradients, in the step's last microbatch. Where gradients are clipped
    no update can be eager: each needs the norm of all gradients.

    Args:
        job: the training job.
        trained_by: by chunk that trains, the units that add to its gradients.
        first: the unit at which a backward ends.
        is_eager: whether updates are.

    Returns:
        The stage, for any device.
    """
    tasks, last = list[TrainingTask](), job.microbatches - 1
    left = sorted(trained_by) if job.has_update else []
    is_eager &= job.recipe.clip_norm is None
    for k in range(job.microbatches):
        tasks += [TrainingTask(Work.FORWARD, u, k) for u in range(job.num_units)]
        for u in range(job.num_units - 1, first - 1, -1):
            tasks.append(TrainingTask(Work.BACKWARD, u, k))
            if is_eager and k == last:
                tasks += [TrainingTask(Work.UPDATE, c, k) for c in left if min(trained_by[c]) == u]
    if not is_eager:
        tasks += [TrainingTask(Work.UPDATE, c, last) for c in left]
    return Stage(range(job.num_units), tuple(tasks))


def eager(layout: TrainingLayout, job: TrainingJob) -> TrainingLayout:
    """A layout whose updates follow the last backward that adds to their gradients.

    Args:
        layout: a layout of one stage.
        job: the training job that it is for.

    Returns:
        An equal layout but for its stage.
    """
    stage = one_stage(job, layout.trained_by, layout.first, is_eager=True)
    return replace(layout, stages=(stage,))


def sending_inputs(layout: TrainingLayout) -> TrainingLayout:
    """A layout whose units that keep no activations on the device send their inputs to the host.

    Args:
        layout: the layout to change.

    Returns:
        An equal layout but for `sends_input` of these units.
    """

    def sends(number: int, unit: Unit) -> bool:
        return number >= layout.first and unit.mode is not Mode.KEEP and unit.input_bytes > 0

    units = [replace(unit, sends_input=sends(u, unit)) for u, unit in enumerate(layout.units)]
    return replace(layout, units=tuple(units))


def lay_out(
    shape: TrainingShape,
    chunks: Sequence[Sequence[int]],
    modes: Sequence[Mode],
    chunk_elements: int = 0,
    ranks: int = 1,
    share: Fraction = ALL,
) -> TrainingLayout:
    """The layout of a shape whose parameters lie in these chunks.

    Frozen parameters share no chunk with trained ones: they would be updated with them.

    Args:
        shape: parameters, units and bytes of the model.
        chunks: by chunk, its parameters by number; each parameter is in one chunk.
        modes: by unit, where activations are; the last unit always keeps them.
        chunk_elements: elements that every chunk is padded to; 0: no padding.
        ranks: devices of the group.
        share: the part of every chunk that a device owns.

    Returns:
        Chunks in the order given, and one unit per unit of the shape, in bytes of one device.
    """
    made = tuple(_chunk(shape, parameters, chunk_elements, share) for parameters in chunks)
    where = {p: c for c, chunk in enumerate(made) for p in chunk.parameters}
    assert sorted(where) == list(range(len(shape.parameters))), "each parameter is in one chunk"
    trains = [any(shape.parameters[p].trains for p in unit.parameters) for unit in shape.units]
    first = trains.index(True)
    units, below = [], set[int]()  # parameters of the units so far
    for u, unit in enumerate(shape.units):
        own = _in_order(where[p] for p in unit.parameters)
        trained = _in_order(where[p] for p in unit.parameters if shape.parameters[p].trains)
        mode = Mode.KEEP if u == len(shape.units) - 1 else modes[u]  # the head's backward follows
        sizes = (unit.input_bytes, unit.saved_bytes, unit.forward_bytes)
        tied = [shape.parameters[p] for p in unit.parameters if p in below]
        tied_bytes = sum([p.elements for p in tied if p.trains]) * shape.item_bytes
        below.update(unit.parameters)
        units.append(
            Unit(own, trained, mode, *sizes, unit.light_bytes, unit.backward_bytes, tied_bytes)
        )
    return TrainingLayout(made, tuple(units), first, ranks)


def lay_out_windows(
    shape: TrainingShape, chunks: Sequence[Sequence[int]], modes: Sequence[Mode]
) -> TrainingLayout:
    """The layout of a finetuning job: chunks of what it trains, and units in windows of tokens.

    Frozen parameters are in no chunk: they are the weights that are served. Gradients are float32.

    Args:
        shape: parameters and units of the model, with its `windows`.
        chunks: by chunk, its parameters by number; each parameter that trains is in one.
        modes: by unit, where activations are between forward and backward.

    Returns:
        Chunks in the order given, and one unit per unit of the shape.
    """
    assert shape.windows is not None, "a shape of a job that finetunes"
    made = tuple([_trained_chunk(shape, own) for own in chunks])
    where = {p: c for c, chunk in enumerate(made) for p in chunk.parameters}
    trained = [p for p, parameter in enumerate(shape.parameters) if parameter.trains]
    assert sorted(where) == trained, "each parameter that trains is in one chunk"
    units = list[Unit]()
    for unit, mode in zip(shape.units, modes, strict=True):
        own = _in_order(where[p] for p in unit.parameters if p in where)
        units.append(Unit(own, own, mode, 0, 0, 0, 0, 0))
    first = [bool(unit.trained) for unit in units].index(True)
    return TrainingLayout(made, tuple(units), first, windows=_windows_in(shape.windows, modes))


def _windows_in(windows: WindowBytes, modes: Sequence[Mode]) -> WindowBytes:
    """Bytes per token where a unit that runs again keeps its input alone until then.

    A backward has room for a copy of all that a layer keeps, and so for what is computed again.
    """
    pairs = zip(modes, windows.kept, strict=True)
    kept = [windows.hidden if n and m is Mode.RECOMPUTE else n for m, n in pairs]
    return replace(windows, kept=tuple(kept))


def _trained_chunk(shape: TrainingShape, parameters: Sequence[int]) -> Chunk:
    own = [shape.parameters[p] for p in parameters]
    count = sum([p.elements for p in own])
    assert all([p.trains for p in own]), "a chunk of what trains"
    return Chunk(
        tuple(parameters),
        count * shape.item_bytes,
        count * WIDE_BYTES,
        count * shape.optimizer_item_bytes,
    )


def equal_share(ranks: int) -> Fraction:
    """The share of a device where each of `ranks` devices owns an equal part of every chunk.

    Args:
        ranks: devices of the group.

    Returns:
        The part of every chunk that one device owns.
    """
    return Fraction(1, ranks)


def owners_share(ranks: int, chunks: int) -> Fraction:
    """The share of the device that owns most, where devices own whole chunks in turn.

    It is an average over the chunks, so that the bytes which the device holds, moves and updates
    of all chunks are those of the chunks that it owns.

    Args:
        ranks: devices of the group.
        chunks: how many chunks there are.

    Returns:
        ceil(chunks / ranks) / chunks.
    """
    return Fraction(-(-chunks // ranks), chunks)


def _chunk(
    shape: TrainingShape, parameters: Sequence[int], elements: int, share: Fraction
) -> Chunk:
    own = [shape.parameters[p] for p in parameters]
    count = ceil(share * max(elements, sum(p.elements for p in own)))  # of a device
    weight_bytes = count * shape.item_bytes
    remote_bytes = (ceil(count / share) - count) * shape.item_bytes
    kinds = {p.trains for p in own}
    assert len(kinds) == 1, "frozen and trained parameters share a chunk"
    if not kinds.pop():
        return Chunk(tuple(parameters), weight_bytes, remote_bytes=remote_bytes)
    widest = ceil(share * max(p.elements for p in own))
    widened = 0 if shape.item_bytes == WIDE_BYTES else widest
    return Chunk(
        tuple(parameters),
        weight_bytes,
        weight_bytes,
        count * shape.optimizer_item_bytes,
        min(WIDENED, widened) * WIDE_BYTES,
        remote_bytes,
    )


def _in_order(chunks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(chunks)))


@dataclass(frozen=True, slots=True)
class Layout:
    """The decisions of a planner.

    Attributes:
        places: bytes of each place that is held before the first step.
        training: by job, its chunks and units.
        adapters: those that requests may run through; their homes are among the places.
        alternatives: by job, layouts by which it may go on between two steps (`Plan.relaid`), the
            fastest first. They differ in where states and activations are, not in chunks or order.
    """

    places: Mapping[Place, int] = field(default_factory=dict)
    training: Mapping[int, TrainingLayout] = field(default_factory=dict)
    adapters: tuple[AdapterSpec, ...] = ()
    alternatives: Mapping[int, tuple[TrainingLayout, ...]] = field(default_factory=dict)

    def shown(self) -> Layout:
        """A read-only copy, for policies.

        Returns:
            A layout whose mappings refuse writes.
        """
        places, training = MappingProxyType(self.places), MappingProxyType(self.training)
        alternatives = MappingProxyType(self.alternatives)
        return replace(self, places=places, training=training, alternatives=alternatives)

    def with_adapters(self, adapters: Sequence[AdapterSpec], pools: Iterable[Pool]) -> Layout:
        """This layout with adapters on the hosts.

        Args:
            adapters: those that requests may run through.
            pools: the pools of the machine.

        Returns:
            A layout with their first versions among its places.
        """
        places = {**self.places, **adapter_homes(adapters, pools)}
        return replace(self, places=places, adapters=tuple(adapters))

    def __repr__(self) -> str:
        return f"Layout({len(self.places)} places, training {dict(self.training)})"
