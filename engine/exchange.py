"""What launches exchange with the other devices of their group: the one place for when and what."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.plan import Collective, Grow, Pattern, Place, Work
from engine.regions import gathered, gradient, unreduced, weight
from engine.training import Training, layout_of
from engine.training_layout import TrainingLayout

if TYPE_CHECKING:
    from engine.footprint import Launching


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


def in_group(launch: Launching, training: Training, device: int, reuses: bool) -> Launching:
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
    launch: Launching, training: Training, u: int, device: int, reuses: bool
) -> Launching:
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


def left_behind(training: Training, work: Work, u: int, device: int) -> tuple[Place, ...]:
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
def reduced(training: Training, u: int, microbatch: int) -> tuple[int, ...]:
    """Chunks whose gradients are complete with the backward of a unit, and are added up.

    Where devices have parts, behind each microbatch: nobody keeps whole gradients for long. Where
    each has all, once a step.
    """
    layout = layout_of(training)
    ends = [c for c in layout.units[u].trained if min(training.trained_by[c]) == u]
    is_last = (microbatch + 1) % training.spec.microbatches == 0
    return tuple([c for c in ends if is_last or layout.chunks[c].remote_bytes])


def reduction(training: Training, c: int, device: int, reuses: bool) -> Exchange:
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
