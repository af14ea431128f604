"""The footprint of a training launch: the places it touches, and exchanges with its group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.contract.layout import Mode, TrainingLayout, Unit
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Collective, Grow, Pattern, Slice
from engine.contract.regions import (
    NORM_BYTES,
    Place,
    Tier,
    Work,
    gathered,
    gradient,
    hidden,
    input_gradient,
    norm,
    optimizer,
    saved,
    tied_gradient,
    unreduced,
    weight,
    workspace,
)
from engine.contract.rules import Remedy, SettingsConflict
from engine.contract.training_progress import TrainingProgress, layout_of
from traces.serving.request import TrainingJob


@dataclass(frozen=True, slots=True)
class LaunchFootprint:
    """The memory of one launch of a training task, before a memory policy adds it to a plan.

    Saved activations have a place even with 0 bytes: it stands for the graph of the unit.

    Attributes:
        piece: the slice of the launch.
        brought: places that hold the newest contents before it, with their bytes, by which places
            that are not held yet begin.
        grows: places that begin with it, where it runs.
        reads: places that it reads.
        writes: places that it writes.
        frees: places that end with it, in any tier.
        sends: places that go to the host behind it.
        on: its lane.
        again: whether it repeats a forward for its backward.
        gathers: exchanges before it, of weights that other devices own.
        reduces: exchanges behind it, of gradients.
        drops: gathered weights that the next launch does not use.
    """

    piece: Slice
    brought: tuple[tuple[Place, int], ...]
    grows: tuple[Grow, ...]
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    frees: tuple[Place, ...] = ()
    sends: tuple[Place, ...] = ()
    on: str = COMPUTE_LANE
    again: bool = False
    gathers: tuple[Exchange, ...] = ()
    reduces: tuple[Exchange, ...] = ()
    drops: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        piece = self.piece
        part = "chunk" if piece.work is Work.UPDATE else "unit"
        at = piece.layers.start if piece.layers else 0
        return f"the {piece.work} of {part} {at} of training job {piece.job.job_id}"


def launches_of(
    piece: Slice, device: int, updates_on: str = COMPUTE_LANE, reuses: bool = False
) -> Iterator[LaunchFootprint]:
    """The footprints of a task's launches: one, or two with a forward repeated for its backward.

    Args:
        piece: a slice of one unit, or of one chunk's update, of a job with a layout.
        device: where it runs.
        updates_on: the lane of updates.
        reuses: whether gradients lie in the storage of their weights (PatrickStar), where an update
            then finds them.

    Returns:
        The launches, in order.

    Raises:
        ValueError: the job has no layout.
        SettingsConflict: its recipe does not allow `reuses`.
    """
    training = piece.job.training
    assert training is not None and piece.layers is not None, "a task of a training job"
    layout, part = layout_of(training), piece.layers.start
    if reuses:
        _check_reuse(training.spec)
    maker = _Maker(piece, layout, part, device, reuses)
    for launch in maker.launches(updates_on):
        yield launch if layout.ranks == 1 else in_group(launch, training, device, reuses)


def goes_out(unit: Unit) -> bool:
    """Whether the activations that a unit saves go to the host until its backward.

    Args:
        unit: a unit of a layout.

    Returns:
        True where its mode is offload and it saves bytes.
    """
    return unit.mode is Mode.OFFLOAD and unit.saved_bytes > 0


def _check_reuse(spec: TrainingJob) -> None:
    dtype, microbatches = spec.recipe.dtype, spec.microbatches
    needs = []
    if dtype != "bfloat16":
        needs.append(f"masters (bfloat16, not {dtype})")
    if microbatches > 1:
        needs.append(f"one microbatch a step, not {microbatches}")
    if needs:
        raise SettingsConflict(
            f"training job {spec.job_id}: reuses_gradients puts gradients over weights, which "
            f"needs {' and '.join(needs)}",
            (Remedy.OWN_GRADIENTS,),
        )


@dataclass(frozen=True, slots=True)
class _Maker:
    """Names the places of a task. `part` is its unit, or the chunk that it updates."""

    piece: Slice
    layout: TrainingLayout
    part: int
    device: int
    reuses: bool

    @property
    def _unit(self) -> Unit:
        return self.layout.units[self.part]

    @property
    def _id(self) -> int:
        return self.piece.job.job_id

    @property
    def _training(self) -> TrainingProgress:
        return _training(self.piece)

    def launches(self, updates_on: str) -> Iterator[LaunchFootprint]:
        """The launches of the task on a device without a group."""
        if self.piece.work is Work.UPDATE:
            yield self.update(updates_on)
        elif self.piece.work is Work.FORWARD:
            yield self.forward()
        else:
            if self._unit.mode is Mode.RECOMPUTE:
                yield self.forward(again=True)
            yield self.backward()

    def forward(self, again: bool = False) -> LaunchFootprint:
        """A forward. It keeps activations where a backward follows that does not repeat it."""
        unit, u, layout = self._unit, self.part, self.layout
        has_backward = u >= layout.first
        keeps = again or (has_backward and unit.mode is not Mode.RECOMPUTE)
        put_out = () if again else self._hidden(u + 1)
        kept = self._saved() if keeps else ()
        work_bytes = unit.forward_bytes if keeps else unit.light_bytes
        if again:  # its output, which no launch reads, is workspace
            work_bytes += sum([op.nbytes for op in self._hidden(u + 1)])
        work = self._workspace(work_bytes)
        grows, below = (*put_out, *kept, *work), _places(self._hidden(u))
        sent = (*(_places(kept) if goes_out(unit) else ()), *_places(() if again else self._sent()))
        return LaunchFootprint(
            self.piece if not again else self.piece._replace(work=Work.FORWARD),
            (*self._weights(), *_brought(self._sent())),
            grows,
            (*self._weight_places(), *below),
            _places(grows),
            (*_places(work), *(() if has_backward else below)),
            sent,
            again=again,
        )

    def backward(self) -> LaunchFootprint:
        """A backward: adds to gradients, and passes that of its input on if a lower unit trains."""
        unit, u = self._unit, self.part
        trained, kept = unit.trained, self._saved()
        waiting = self._tied_gradient(unit.tied_gradient_bytes)
        is_lowest = u == self.layout.first
        passed = (
            *(_made_norm(self.piece, self.device) if is_lowest else self._input_gradient(u)),
            *waiting,
        )
        came = _places(self._input_gradient(u + 1))
        if is_lowest:
            came += _places(
                self._tied_gradient(sum([above.tied_gradient_bytes for above in self.layout.units]))
            )
        work_bytes = unit.backward_bytes - sum(
            [op.nbytes for op in waiting]
        )  # the gradient is made in its own place
        grows = (*passed, *self._workspace(max(0, work_bytes)))
        if self.reuses:
            begun: tuple[tuple[Place, int], ...] = ()
            reads = self._weight_places(without=trained)
            writes = tuple([weight(self._id, c, device=self.device) for c in trained])
        else:
            chunks = self.layout.chunks
            begun = tuple([(self._gradient(c), chunks[c].gradient_bytes) for c in trained])
            reads, writes = self._weight_places(), tuple([place for place, _ in begun])
        away = _brought((*(kept if goes_out(unit) else ()), *self._sent()))
        inputs = (*_places(kept), *_places(self._hidden(u)), *came)
        return LaunchFootprint(
            self.piece,
            (*self._weights(), *begun, *away),
            grows,
            (*reads, *inputs),
            (*writes, *_places(grows)),
            (*_places(grows[len(passed) :]), *inputs),
        )

    def update(self, on: str) -> LaunchFootprint:
        """The update of a chunk; on the host's lane all its places are on the host."""
        c, chunk = self.part, self.layout.chunks[self.part]
        tier, device = (Tier.HOST, 0) if on == HOST_LANE else (Tier.GPU, self.device)
        newest, made = self._versions()
        states = [(weight(self._id, c, tier, device, made), chunk.weight_bytes)]
        if chunk.optimizer_bytes:
            states.append((optimizer(self._id, c, tier, device), chunk.optimizer_bytes))
        grows = _grow(workspace(self._id, tier, device), chunk.update_bytes)
        work, at = _places(grows), (tier, device)
        writes = (*[place for place, _ in states], *work)
        added = () if self.reuses else ((gradient(self._id, c, *at), chunk.gradient_bytes),)
        summed = (*added, *_read_norm(self.piece, *at))
        reads = tuple([place for place, _ in summed])
        frees = (*reads[: len(added)], *work, *_ended_norm(self.piece, *at))
        if made != newest:  # the version before is still computed with
            before = weight(self._id, c, tier, device, newest)
            summed, reads = (*summed, (before, chunk.weight_bytes)), (*reads, before)
        return LaunchFootprint(self.piece, (*states, *summed), grows, reads, writes, frees, on=on)

    # ---- places of a unit
    def _weights(self) -> tuple[tuple[Place, int], ...]:
        chunks = self.layout.chunks
        pairs = zip(self._weight_places(), self._unit.chunks, strict=True)
        return tuple([(place, chunks[c].weight_bytes) for place, c in pairs])

    def _weight_places(self, without: tuple[int, ...] = ()) -> tuple[Place, ...]:
        chunks, version = [c for c in self._unit.chunks if c not in without], 0
        if self.layout.versions > 1:
            version = self._training.version_for(self.piece.microbatch) % self.layout.versions
        return tuple([weight(self._id, c, Tier.GPU, self.device, version) for c in chunks])

    def _versions(self) -> tuple[int, int]:
        """Which of the kept versions an update begins with, and which it writes over."""
        count = self.layout.versions
        number = self.piece.microbatch // self._training.spec.microbatches
        return number % count, (number + 1) % count

    def _gradient(self, chunk: int) -> Place:
        return gradient(self._id, chunk, device=self.device)

    def _saved(self) -> tuple[Grow, ...]:
        place = saved(self._id, self.part, self.piece.microbatch, device=self.device)
        return (Grow(place, self._unit.saved_bytes),)

    def _hidden(self, unit: int) -> tuple[Grow, ...]:
        units = self.layout.units
        if not 0 < unit < len(units):
            return ()
        place = hidden(self._id, unit, len(units), self.piece.microbatch, device=self.device)
        return _grow(place, units[unit].input_bytes)

    def _sent(self) -> tuple[Grow, ...]:
        """The input, if it waits for the backward on the host."""
        return self._hidden(self.part) if self._unit.sends_input else ()

    def _input_gradient(self, unit: int) -> tuple[Grow, ...]:
        units = self.layout.units
        if not 0 < unit < len(units):
            return ()
        microbatch = self.piece.microbatch if self._training.is_pipelined else None
        place = input_gradient(self._id, unit, self.device, microbatch)
        return _grow(place, units[unit].input_bytes)

    def _tied_gradient(self, nbytes: int) -> tuple[Grow, ...]:
        """The place of a tied gradient; none where the sum of the step begins with it."""
        begins = self.piece.microbatch % self._training.spec.microbatches == 0
        # a group adds up whole gradients of each microbatch, which begin with it
        begins |= any([chunk.remote_bytes for chunk in self.layout.chunks])
        return (
            ()
            if begins and not self.reuses
            else _grow(tied_gradient(self._id, self.device), nbytes)
        )

    def _workspace(self, nbytes: int) -> tuple[Grow, ...]:
        return _grow(workspace(self._id, device=self.device), nbytes)


def _grow(place: Place, nbytes: int) -> tuple[Grow, ...]:
    return (Grow(place, nbytes),) if nbytes else ()


def _brought(grows: tuple[Grow, ...]) -> tuple[tuple[Place, int], ...]:
    return tuple([(op.place, op.nbytes) for op in grows])


def _places(grows: tuple[Grow, ...]) -> tuple[Place, ...]:
    return tuple([op.place for op in grows])


# ---- the norm by which a step's gradients are clipped
# The last backward of a step makes it, every update reads it, and the last update frees it. So no
# update begins before all backwards have ended, on any lane (PatrickStar's specification, pitfall
# 9). Without clipping an update waits only for the backwards of its chunk.
def _made_norm(piece: Slice, device: int) -> tuple[Grow, ...]:
    """The norm, which a step's last backward writes where gradients are clipped."""
    training = _training(piece)
    if not _clips(training) or (piece.microbatch + 1) % training.spec.microbatches:
        return ()
    return (Grow(norm(piece.job.job_id, device=device), NORM_BYTES),)


def _read_norm(piece: Slice, tier: Tier, device: int) -> tuple[tuple[Place, int], ...]:
    """The norm that an update reads where gradients are clipped."""
    place = norm(piece.job.job_id, tier, device)
    return ((place, NORM_BYTES),) if _clips(_training(piece)) else ()


def _ended_norm(piece: Slice, tier: Tier, device: int) -> tuple[Place, ...]:
    """The norm, which ends with the last update of a step."""
    found = _read_norm(piece, tier, device)
    assert piece.layers is not None, "an update is of one chunk"
    if not found or piece.layers.start != max(_training(piece).trained_by):
        return ()
    return tuple([place for place, _ in found])


def _clips(training: TrainingProgress) -> bool:
    return training.spec.has_update and training.spec.recipe.clip_norm is not None


def _training(piece: Slice) -> TrainingProgress:
    training = piece.job.training
    assert training is not None, "a task of a training job"
    return training


class Exchange(NamedTuple):
    """A collective before a memory policy adds it to a plan.

    Attributes:
        pattern: what is exchanged.
        reads: the device's own part or addend.
        writes: what it gets.
        nbytes: bytes of all parts together, or of a sum.
        begins: the growth of the buffer that it fills; None where it fills none.
    """

    pattern: Pattern
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    nbytes: int
    begins: Grow | None = None

    def op(self, device: int) -> Collective:
        """The operation of this exchange.

        Args:
            device: where it runs.

        Returns:
            A new object each time, as plans need.
        """
        return Collective(self.pattern, self.reads, self.writes, self.nbytes, device)


def in_group(
    launch: LaunchFootprint, training: TrainingProgress, device: int, reuses: bool
) -> LaunchFootprint:
    """A launch as each device of a group runs it.

    Before a forward or backward, weights of which other devices own parts are gathered. A backward
    adds to whole gradients of its microbatch; behind the last unit of a chunk the group adds them
    up.

    Args:
        launch: the launch on a device without a group.
        training: the job's progress.
        device: where it runs.
        reuses: whether gradients lie in the storage of their weights.

    Returns:
        The launch with its gathers, reduces and drops.
    """
    layout, piece = layout_of(training), launch.piece
    if piece.work is Work.UPDATE:
        return launch  # each device updates its own part
    assert piece.layers is not None, "a task of a training job"
    u = piece.layers.start
    found = gathers(layout, training.spec.job_id, u, device)
    away = [place for exchange in found for place in exchange.writes]
    drops = () if launch.again else left_behind(training, piece.work, u, device)
    shown = replace(launch, reads=(*launch.reads, *away), gathers=found, drops=drops)
    return shown if piece.work is Work.FORWARD else _backward(shown, training, u, device, reuses)


def _backward(
    launch: LaunchFootprint, training: TrainingProgress, u: int, device: int, reuses: bool
) -> LaunchFootprint:
    layout, job_id = layout_of(training), training.spec.job_id
    ends = reduced(training, u, launch.piece.microbatch)
    reduces = tuple([reduction(training, c, device, reuses) for c in ends])
    parts = [c for c in layout.units[u].trained if layout.chunks[c].remote_bytes]
    if reuses:  # gradients lie over gathered weights, too, which stay until they are reduced
        over = [gathered(job_id, c, device) for c in parts]
        kept = [gathered(job_id, c, device) for c in parts if c not in ends]
        drops = tuple([place for place in launch.drops if place not in kept])
        return replace(launch, writes=(*launch.writes, *over), reduces=reduces, drops=drops)
    own = {gradient(job_id, c, device=device): c for c in parts}
    whole = {place: unreduced(job_id, c, device) for place, c in own.items()}
    begins = [
        Grow(whole[place], layout.chunks[c].whole_bytes)
        for place, c in own.items()
        if max(training.trained_by[c]) == u
    ]
    return replace(
        launch,
        brought=tuple([x for x in launch.brought if x[0] not in own or own[x[0]] in ends]),
        grows=(*launch.grows, *begins),
        writes=tuple([whole.get(place, place) for place in launch.writes]),
        frees=(*launch.frees, *[whole[place] for place, c in own.items() if c in ends]),
        reduces=reduces,
    )


# ---- weights
def gather(layout: TrainingLayout, job_id: int, c: int, device: int) -> Exchange:
    """The exchange that gathers the other devices' parts of a chunk's weights.

    Args:
        layout: the layout of the job.
        job_id: the training job.
        c: the number of the chunk.
        device: where the weights are gathered.

    Returns:
        An all-gather that fills a buffer of its own.
    """
    chunk, away = layout.chunks[c], gathered(job_id, c, device)
    own, begins = weight(job_id, c, device=device), Grow(away, chunk.remote_bytes)
    return Exchange(Pattern.ALL_GATHER, (own,), (away,), chunk.whole_bytes, begins)


def gathers(layout: TrainingLayout, job_id: int, u: int, device: int) -> tuple[Exchange, ...]:
    """The exchanges that gather the weights of a unit; none without a group.

    Args:
        layout: the layout of the job.
        job_id: the training job.
        u: the number of the unit.
        device: where the weights are gathered.

    Returns:
        One exchange per chunk of which other devices own a part; () without a group.
    """
    if layout.ranks == 1:
        return ()
    own = [c for c in layout.units[u].chunks if layout.chunks[c].remote_bytes]
    return tuple([gather(layout, job_id, c, device) for c in own])


def left_behind(training: TrainingProgress, work: Work, u: int, device: int) -> tuple[Place, ...]:
    """Gathered weights of a unit that the launch behind it does not use.

    Args:
        training: the progress of the job, which has a layout.
        work: forward or backward.
        u: the number of the unit.
        device: where the unit runs.

    Returns:
        The places of the gathered weights.
    """
    layout, job_id = layout_of(training), training.spec.job_id
    following: tuple[int, ...] = ()
    if work is Work.FORWARD:  # the head's backward follows its forward
        following = layout.units[min(u + 1, layout.num_units - 1)].chunks
    elif u > layout.first:
        following = layout.units[u - 1].chunks
    own = [c for c in layout.units[u].chunks if c not in following]
    return tuple([gathered(job_id, c, device) for c in own if layout.chunks[c].remote_bytes])


# ---- gradients
def reduced(training: TrainingProgress, u: int, microbatch: int) -> tuple[int, ...]:
    """Chunks whose gradients the group adds up behind the backward of a unit.

    Where devices own parts, that is behind each microbatch, so that whole gradients are kept for a
    short time only. Where each device owns all of a chunk, it is once a step.

    Args:
        training: the job's progress.
        u: the unit.
        microbatch: counted through the job.

    Returns:
        The numbers of these chunks.
    """
    layout = layout_of(training)
    ends = [c for c in layout.units[u].trained if min(training.trained_by[c]) == u]
    is_last = (microbatch + 1) % training.spec.microbatches == 0
    return tuple([c for c in ends if is_last or layout.chunks[c].remote_bytes])


def reduction(training: TrainingProgress, c: int, device: int, reuses: bool) -> Exchange:
    """The exchange that adds up the gradients of a chunk over all devices.

    A device gets the sum of its own part, or of the whole chunk where it owns all of it. With
    `reuses` gradients lie over the weights.

    Args:
        training: the progress of the job, which has a layout.
        c: the number of the chunk.
        device: where it runs.
        reuses: whether gradients lie in the storage of their weights.

    Returns:
        A reduce-scatter, or an all-reduce where the device owns all of the chunk.
    """
    layout, job_id = layout_of(training), training.spec.job_id
    chunk, own = layout.chunks[c], gradient(job_id, c, device=device)
    if reuses:
        own = weight(job_id, c, device=device)
    if not chunk.remote_bytes:
        return Exchange(Pattern.ALL_REDUCE, (own,), (own,), chunk.weight_bytes)
    reads = (own, gathered(job_id, c, device)) if reuses else (unreduced(job_id, c, device),)
    return Exchange(Pattern.REDUCE_SCATTER, reads, (own,), chunk.whole_bytes)
