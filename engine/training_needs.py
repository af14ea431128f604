"""What the launch of a task must name and find: its footprint, as a plan is checked by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.exchange import Exchange
from engine.footprint import Launching, launches_of
from engine.plan import HOST_LANE, Compute, Kind, Place, Slice, Tier, Work
from engine.regions import GATHERED, gradient, later, optimizer, unreduced, weight
from engine.training import Training, layout_of

Key = tuple[int, Work, int, int, bool, str, int, bool]


class Needs(NamedTuple):
    """Places of a launch, for the microbatch of a step that they were asked for."""

    reads: tuple[Place, ...]  # hold the newest contents
    writes: tuple[Place, ...]  # all that is written
    changes: tuple[Place, ...]  # of these, what is read first
    begins: tuple[Place, ...]  # gradients that must be empty: nothing of the step is in them
    sums: tuple[Place, ...]  # gradients that hold what was added before
    sizes: tuple[tuple[Place, int], ...]  # bytes at least, where nothing is written yet
    kept: tuple[tuple[int, int], ...]  # the same of activations that it writes, by their index
    moving: tuple[int, ...]  # which of those read are activations
    gathered: tuple[tuple[Place, Place], ...]  # weights of other devices, and the own ones
    state: Place | None  # of the optimizer: may begin with the first update
    due: tuple[Exchange, ...]  # follows at once

    def reads_later(self, microbatches: int) -> tuple[Place, ...]:
        """What it reads so many microbatches later."""
        return _later(self.reads, self.moving, microbatches)

    def writes_later(self, microbatches: int) -> tuple[Place, ...]:
        """What it writes then."""
        return _later(self.writes, [i for i, _ in self.kept], microbatches)


def _later(places: tuple[Place, ...], moving: Sequence[int], count: int) -> tuple[Place, ...]:
    if not (count and moving):
        return places
    found = [*places]
    for i in moving:
        found[i] = later(found[i], count)
    return tuple(found)


def reuses_weights(op: Compute, piece: Slice, training: Training) -> bool:
    """Whether a backward puts gradients over their weights: it names these, and no gradients."""
    layout, job_id = layout_of(training), piece.job.job_id
    if piece.work is not Work.BACKWARD or piece.layers is None:
        return False
    trained = layout.units[piece.layers.start].trained
    if not trained or weight(job_id, trained[0], device=op.device) not in op.writes:
        return False
    apart = {place(job_id, c, device=op.device) for c in trained for place in (gradient, unreduced)}
    return apart.isdisjoint(op.writes)


def needs_of(piece: Slice, training: Training, op: Compute, reuses: bool) -> Needs:
    """What one launch of a task needs. ValueError where its job cannot reuse weights."""
    task = piece._replace(work=Work.BACKWARD) if op.again else piece
    launch = next(x for x in launches_of(task, op.device, op.on, reuses) if x.again == op.again)
    layout, job_id, at = layout_of(training), piece.job.job_id, op.device
    sizes = {**dict(launch.brought), **{grow.place: grow.nbytes for grow in launch.grows}}
    assert piece.layers is not None, "a task has one part"
    part, reads = piece.layers.start, launch.reads
    changes, begins, sums = tuple[Place, ...](), tuple[Place, ...](), tuple[Place, ...]()
    state: Place | None = None
    if piece.work is Work.UPDATE:
        tier, device = (Tier.HOST, 0) if op.on == HOST_LANE else (Tier.GPU, at)
        changes = (weight(job_id, part, tier, device),)
        if layout.chunks[part].optimizer_bytes:
            state = optimizer(job_id, part, tier, device)
    elif piece.work is Work.BACKWARD:
        begins, sums, changes = _added(launch, piece, training, reuses, at)
    for exchange in launch.reduces:  # into a sum, which is there
        for place in () if reuses else exchange.writes:
            sizes.setdefault(place, layout.chunks[place.region.part].gradient_bytes)
    gathered = [(p, weight(job_id, p.region.part, device=at)) for p in reads if is_gathered(p)]
    for place, own in gathered:
        sizes[place] = layout.chunks[own.region.part].remote_bytes
    return Needs(
        reads,
        launch.writes,
        changes,
        begins,
        sums,
        tuple([pair for pair in sizes.items() if not _moves(pair[0])]),
        tuple([(i, sizes[p]) for i, p in enumerate(launch.writes) if _moves(p)]),
        tuple([i for i, place in enumerate(reads) if _moves(place)]),
        tuple(gathered),
        state,
        launch.reduces,
    )


def _moves(place: Place) -> bool:
    """Whether a place is another one in each microbatch."""
    return place.region.kind is Kind.ACTIVATION


def _added(
    launch: Launching, piece: Slice, training: Training, reuses: bool, device: int
) -> tuple[tuple[Place, ...], ...]:
    """Of a backward: gradients that begin with it, those that it adds to, and weights under its
    gradients."""
    layout, job_id = layout_of(training), piece.job.job_id
    assert piece.layers is not None, "a task has one part"
    u, k = piece.layers.start, piece.microbatch % training.spec.microbatches
    own = layout.units[u].trained
    if reuses:
        return (), (), tuple([weight(job_id, c, device=device) for c in own])
    begins, sums = list[Place](), list[Place]()
    for c in own:
        is_top, is_apart = u == max(training.trained_by[c]), bool(layout.chunks[c].remote_bytes)
        place = (unreduced if is_apart else gradient)(job_id, c, device=device)
        (begins if is_top and (is_apart or not k) else sums).append(place)
    for exchange in launch.reduces:  # what a microbatch adds up to goes to the sum of the step
        if exchange.reads != exchange.writes:
            (sums if k else begins).extend(exchange.writes)
    return tuple(begins), tuple(sums), ()


def is_gathered(place: Place) -> bool:
    """Whether a place holds weights of other devices."""
    return place.region.kind is Kind.BUFFER and place.region.slot == GATHERED
