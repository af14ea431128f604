"""What a launch of a training job touches: the one place for what begins and ends around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.plan import COMPUTE_LANE, HOST_LANE, Grow, Place, Slice, Tier, Work
from engine.regions import (
    flow,
    gathered,
    gradient,
    hidden,
    optimizer,
    saved,
    unreduced,
    weight,
    workspace,
)
from engine.training import Training
from engine.training_layout import Mode, TrainingLayout, Unit
from policies.cycle import layout_of
from policies.exchange import Exchange, begun, gathers, left_behind, reduced, reduction


@dataclass(frozen=True, slots=True)
class Launching:
    """A launch before it is drafted. What a unit saves has a place also where it takes no bytes:
    something of its graph is there."""

    piece: Slice
    brought: tuple[tuple[Place, int], ...]  # must hold what is new; bytes, for those that begin
    grows: tuple[Grow, ...]  # begin with it, on the device
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    frees: tuple[Place, ...] = ()  # end with it, in whatever tier they are
    sends: tuple[Place, ...] = ()  # go to the host behind it
    on: str = COMPUTE_LANE
    again: bool = False
    gathers: tuple[Exchange, ...] = ()  # of weights that other devices have, before it
    reduces: tuple[Exchange, ...] = ()  # of gradients, behind it
    drops: tuple[Place, ...] = ()  # gathered, and of no use to the next launch


def launches_of(
    piece: Slice, device: int, updates_on: str = COMPUTE_LANE, reuses: bool = False
) -> Iterator[Launching]:
    """A task's launches: one, or two where a forward is repeated before its backward.

    With `reuses` gradients lie in the storage of their weights (PatrickStar), which an update then
    finds there.
    """
    training = piece.job.training
    assert training is not None and piece.layers is not None, "a task of a training job"
    layout, part = layout_of(training), piece.layers.start
    if reuses:
        _check_reuse(training)
    maker = _Maker(piece, layout, part, device, reuses)
    if piece.work is Work.UPDATE:
        yield maker.update(updates_on)
    elif piece.work is Work.FORWARD:
        yield maker.forward()
    else:
        if layout.units[part].mode is Mode.RECOMPUTE:
            yield maker.forward(again=True)
        yield maker.backward()


def goes_out(unit: Unit) -> bool:
    """Whether what it saves goes to the host until its backward."""
    return unit.mode is Mode.OFFLOAD and unit.saved_bytes > 0


def _check_reuse(training: Training) -> None:
    spec, users = training.spec, training.trained_by.values()
    dtype, microbatches = spec.recipe.dtype, spec.microbatches
    if spec.ranks > 1 and any([max(units) - min(units) >= len(units) for units in users]):
        raise ValueError(
            f"training job {spec.job_id}: reuses_gradients would keep the gradients of a tied table "
            "where its weights are gathered; set reuses_gradients=false"
        )
    if dtype != "bfloat16" or microbatches > 1:
        raise ValueError(
            f"training job {spec.job_id}: reuses_gradients puts gradients over weights, which "
            f"needs masters (bfloat16, not {dtype}) and one microbatch a step, not "
            f"{microbatches}; set reuses_gradients=false"
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
    def _training(self) -> Training:
        training = self.piece.job.training
        assert training is not None, "a task of a training job"
        return training

    @property
    def _id(self) -> int:
        return self.piece.job.job_id

    def forward(self, again: bool = False) -> Launching:
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
        return Launching(
            self.piece if not again else self.piece._replace(work=Work.FORWARD),
            self._weights(),
            grows,
            (*self._weight_places(), *self._gathered(), *below),
            _places(grows),
            (*_places(work), *(() if has_backward else below)),
            _places(kept) if goes_out(unit) else (),
            again=again,
            gathers=self._gathers(),
            drops=() if again else left_behind(self._training, Work.FORWARD, u, self.device),
        )

    def backward(self) -> Launching:
        """Adds to gradients and passes one on, as long as something below it trains."""
        unit, u, training, device = self._unit, self.part, self._training, self.device
        kept, came = self._saved(), _places(self._flow(u + 1))
        passed = self._flow(u) if u > self.layout.first else ()
        work = self._workspace(unit.backward_bytes)
        ends = reduced(training, u, self.piece.microbatch)
        if self.reuses:
            states, sums = (), tuple([weight(self._id, c, device=device) for c in unit.trained])
            wholes, reads = (), self._weight_places(without=unit.trained)
        else:
            states, sums = self._gradients(ends)
            wholes, reads = begun(training, u, device), self._weight_places()
        grows = (*passed, *wholes, *work)
        away = tuple([(op.place, op.nbytes) for op in kept]) if goes_out(unit) else ()
        inputs = (*_places(kept), *_places(self._hidden(u)), *came)
        whole = [c for c in ends if self.layout.chunks[c].remote_bytes and not self.reuses]
        return Launching(
            self.piece,
            (*self._weights(), *states, *away),
            grows,
            (*reads, *self._gathered(), *inputs),
            (*sums, *_places((*passed, *work))),
            (*_places(work), *inputs, *[unreduced(self._id, c, device) for c in whole]),
            gathers=self._gathers(),
            reduces=tuple([reduction(training, c, device, self.reuses) for c in ends]),
            drops=left_behind(training, Work.BACKWARD, u, device),
        )

    def _gradients(
        self, ends: tuple[int, ...]
    ) -> tuple[tuple[tuple[Place, int], ...], tuple[Place, ...]]:
        """What of gradients must be there, and what the backward adds to: in a group whose devices
        have parts, to those of this microbatch, and the own part is there when they are added up.
        """
        chunks, states, sums = self.layout.chunks, list[tuple[Place, int]](), list[Place]()
        for c in self._unit.trained:
            is_part, own = chunks[c].remote_bytes > 0, self._gradient(c)
            if not is_part or c in ends:
                states.append((own, chunks[c].gradient_bytes))
            sums.append(unreduced(self._id, c, self.device) if is_part else own)
        return tuple(states), tuple(sums)

    def update(self, on: str) -> Launching:
        """Of a chunk, on the device or on the host's lane: there all must lie on the host."""
        c, chunk = self.part, self.layout.chunks[self.part]
        tier, device = (Tier.HOST, 0) if on == HOST_LANE else (Tier.GPU, self.device)
        states = [(weight(self._id, c, tier, device), chunk.weight_bytes)]
        if chunk.optimizer_bytes:
            states.append((optimizer(self._id, c, tier, device), chunk.optimizer_bytes))
        writes = tuple([place for place, _ in states])
        if self.reuses:
            return Launching(self.piece, tuple(states), (), (), writes, on=on)
        added = gradient(self._id, c, tier, device)
        brought = (*states, (added, chunk.gradient_bytes))
        return Launching(self.piece, brought, (), (added,), writes, (added,), on=on)

    # ---- places of a unit
    def _weights(self) -> tuple[tuple[Place, int], ...]:
        chunks = self.layout.chunks
        pairs = zip(self._weight_places(), self._unit.chunks, strict=True)
        return tuple([(place, chunks[c].weight_bytes) for place, c in pairs])

    def _weight_places(self, without: tuple[int, ...] = ()) -> tuple[Place, ...]:
        chunks = [c for c in self._unit.chunks if c not in without]
        return tuple([weight(self._id, c, device=self.device) for c in chunks])

    def _gathers(self) -> tuple[Exchange, ...]:
        return gathers(self.layout, self._id, self.part, self.device)

    def _gathered(self) -> tuple[Place, ...]:
        if self.layout.ranks == 1:
            return ()
        own = [c for c in self._unit.chunks if self.layout.chunks[c].remote_bytes]
        return tuple([gathered(self._id, c, self.device) for c in own])

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

    def _flow(self, unit: int) -> tuple[Grow, ...]:
        units = self.layout.units
        if not 0 < unit < len(units):
            return ()
        return _grow(flow(self._id, unit, self.device), units[unit].input_bytes)

    def _workspace(self, nbytes: int) -> tuple[Grow, ...]:
        return _grow(workspace(self._id, self.device), nbytes)


def _grow(place: Place, nbytes: int) -> tuple[Grow, ...]:
    return (Grow(place, nbytes),) if nbytes else ()


def _places(grows: tuple[Grow, ...]) -> tuple[Place, ...]:
    return tuple([op.place for op in grows])
