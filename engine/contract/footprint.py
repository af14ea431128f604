"""What a launch of a training job touches, and what it exchanges with its group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.contract.job import TrainingProgress, layout_of
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
from traces.serving.request import TrainingJob


@dataclass(frozen=True, slots=True)
class LaunchFootprint:
    """A launch before it is drafted. What a unit saves has a place also where it takes no bytes:
    something of its graph is there."""

    piece: Slice
    brought: tuple[tuple[Place, int], ...]  # must hold what is new; bytes, for those that begin
    grows: tuple[Grow, ...]  # begin with it, where it runs
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    frees: tuple[Place, ...] = ()  # end with it, in whatever tier they are
    sends: tuple[Place, ...] = ()  # go to the host behind it
    on: str = COMPUTE_LANE
    again: bool = False
    gathers: tuple[Exchange, ...] = ()  # weights that other devices have, before it
    reduces: tuple[Exchange, ...] = ()  # gradients, behind it
    drops: tuple[Place, ...] = ()  # gathered, and of no use to the next launch

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
    """A task's launches: one, or two where a forward is repeated before its backward.

    With `reuses` gradients lie in the storage of their weights (PatrickStar), which an update then
    finds there.
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
    """Whether what it saves goes to the host until its backward."""
    return unit.mode is Mode.OFFLOAD and unit.saved_bytes > 0


def _check_reuse(spec: TrainingJob) -> None:
    dtype, microbatches = spec.recipe.dtype, spec.microbatches
    needs = []
    if dtype != "bfloat16":
        needs.append(f"masters (bfloat16, not {dtype})")
    if microbatches > 1:
        needs.append(f"one microbatch a step, not {microbatches}")
    if needs:
        raise ValueError(
            f"training job {spec.job_id}: reuses_gradients puts gradients over weights, which "
            f"needs {' and '.join(needs)}; set reuses_gradients=false"
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

    def launches(self, updates_on: str) -> Iterator[LaunchFootprint]:
        """As a device by itself does the task."""
        if self.piece.work is Work.UPDATE:
            yield self.update(updates_on)
        elif self.piece.work is Work.FORWARD:
            yield self.forward()
        else:
            if self._unit.mode is Mode.RECOMPUTE:
                yield self.forward(again=True)
            yield self.backward()

    def forward(self, again: bool = False) -> LaunchFootprint:
        """Keeps what its backward needs, unless that repeats it or there is none."""
        unit, u, layout = self._unit, self.part, self.layout
        has_backward = u >= layout.first
        keeps = again or (has_backward and unit.mode is not Mode.RECOMPUTE)
        put_out = () if again else self._hidden(u + 1)
        kept = self._saved() if keeps else ()
        work_bytes = unit.forward_bytes if keeps else unit.light_bytes
        if again:  # puts out once more what nobody wants
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
        """Adds to gradients and passes one on, as long as something below it trains."""
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
        work_bytes = unit.backward_bytes - sum([op.nbytes for op in waiting])  # it is made there
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
        """Of a chunk, on the device or on the host's lane: there all must lie on the host."""
        c, chunk = self.part, self.layout.chunks[self.part]
        tier, device = (Tier.HOST, 0) if on == HOST_LANE else (Tier.GPU, self.device)
        states = [(weight(self._id, c, tier, device), chunk.weight_bytes)]
        if chunk.optimizer_bytes:
            states.append((optimizer(self._id, c, tier, device), chunk.optimizer_bytes))
        grows = _grow(workspace(self._id, tier, device), chunk.update_bytes)
        work, at = _places(grows), (tier, device)
        writes = (*[place for place, _ in states], *work)
        added = () if self.reuses else ((gradient(self._id, c, *at), chunk.gradient_bytes),)
        summed = (*added, *_read_norm(self.piece, *at))
        reads = tuple([place for place, _ in summed])
        frees = (*reads[: len(added)], *work, *_ended_norm(self.piece, *at))
        return LaunchFootprint(self.piece, (*states, *summed), grows, reads, writes, frees, on=on)

    # ---- places of a unit
    def _weights(self) -> tuple[tuple[Place, int], ...]:
        chunks = self.layout.chunks
        pairs = zip(self._weight_places(), self._unit.chunks, strict=True)
        return tuple([(place, chunks[c].weight_bytes) for place, c in pairs])

    def _weight_places(self, without: tuple[int, ...] = ()) -> tuple[Place, ...]:
        chunks = [c for c in self._unit.chunks if c not in without]
        return tuple([weight(self._id, c, device=self.device) for c in chunks])

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
        return _grow(input_gradient(self._id, unit, self.device), units[unit].input_bytes)

    def _tied_gradient(self, nbytes: int) -> tuple[Grow, ...]:
        """Nothing where the sum itself, which begins with it, is the place to wait."""
        training = self.piece.job.training
        assert training is not None
        begins = self.piece.microbatch % training.spec.microbatches == 0
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
# The last backward makes it, every update reads it, the last one gives it back. So no update begins
# before all backwards have ended, whichever lane it runs on (PatrickStar's specification, pitfall
# 9); without clipping each waits for its own.
def _made_norm(piece: Slice, device: int) -> tuple[Grow, ...]:
    """What a backward of the lowest unit that trains puts out, if it is the last one of its step
    and gradients are clipped."""
    training = _training(piece)
    if not _clips(training) or (piece.microbatch + 1) % training.spec.microbatches:
        return ()
    return (Grow(norm(piece.job.job_id, device=device), NORM_BYTES),)


def _read_norm(piece: Slice, tier: Tier, device: int) -> tuple[tuple[Place, int], ...]:
    """What an update wants beside states and gradients of its chunk."""
    place = norm(piece.job.job_id, tier, device)
    return ((place, NORM_BYTES),) if _clips(_training(piece)) else ()


def _ended_norm(piece: Slice, tier: Tier, device: int) -> tuple[Place, ...]:
    """What is of no use behind an update: the same, behind the last one of its step."""
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
    """A collective before it is drafted. `begins`: the buffer that it fills."""

    pattern: Pattern
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    nbytes: int
    begins: Grow | None = None

    def op(self, device: int) -> Collective:
        """The operation, new each time."""
        return Collective(self.pattern, self.reads, self.writes, self.nbytes, device)


def in_group(
    launch: LaunchFootprint, training: TrainingProgress, device: int, reuses: bool
) -> LaunchFootprint:
    """A launch of a device by itself as each device of a group runs it.

    Forward and backward come behind the gathering of weights of which other devices have parts. A
    backward adds to whole gradients of its microbatch, which are added up over all devices behind
    the last unit of their chunk.
    """
    layout, piece = layout_of(training), launch.piece
    if piece.work is Work.UPDATE:
        return launch  # of the own part
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
    if reuses:  # gradients lie in what was gathered, too, which then stays until they are reduced
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
    """The other devices' parts of a chunk's weights come beside the own one."""
    chunk, away = layout.chunks[c], gathered(job_id, c, device)
    own, begins = weight(job_id, c, device=device), Grow(away, chunk.remote_bytes)
    return Exchange(Pattern.ALL_GATHER, (own,), (away,), chunk.whole_bytes, begins)


def gathers(layout: TrainingLayout, job_id: int, u: int, device: int) -> tuple[Exchange, ...]:
    """Of all chunks of a unit of which other devices have parts; none without a group."""
    if layout.ranks == 1:
        return ()
    own = [c for c in layout.units[u].chunks if layout.chunks[c].remote_bytes]
    return tuple([gather(layout, job_id, c, device) for c in own])


def left_behind(training: TrainingProgress, work: Work, u: int, device: int) -> tuple[Place, ...]:
    """What was gathered for a unit, and is of no use to the launch behind it."""
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
    """Chunks whose gradients are complete with the backward of a unit, and are added up.

    Where devices have parts, behind each microbatch: nobody keeps whole gradients for long. Where
    each has all, once a step.
    """
    layout = layout_of(training)
    ends = [c for c in layout.units[u].trained if min(training.trained_by[c]) == u]
    is_last = (microbatch + 1) % training.spec.microbatches == 0
    return tuple([c for c in ends if is_last or layout.chunks[c].remote_bytes])


def reduction(training: TrainingProgress, c: int, device: int, reuses: bool) -> Exchange:
    """Gradients of a chunk become those of all devices: of the own part, or, where each device has
    all of it, of the whole. With `reuses` they lie over the weights."""
    layout, job_id = layout_of(training), training.spec.job_id
    chunk, own = layout.chunks[c], gradient(job_id, c, device=device)
    if reuses:
        own = weight(job_id, c, device=device)
    if not chunk.remote_bytes:
        return Exchange(Pattern.ALL_REDUCE, (own,), (own,), chunk.weight_bytes)
    reads = (own, gathered(job_id, c, device)) if reuses else (unreduced(job_id, c, device),)
    return Exchange(Pattern.REDUCE_SCATTER, reads, (own,), chunk.whole_bytes)
