"""What launches exchange with the other devices of their group: the one place for when and what."""

from __future__ import annotations

from typing import NamedTuple

from engine.plan import Collective, Grow, Pattern, Place, Work
from engine.regions import gathered, gradient, unreduced, weight
from engine.training import Training
from engine.training_layout import TrainingLayout
from policies.cycle import layout_of


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


def gather(layout: TrainingLayout, job_id: int, c: int, device: int) -> Exchange:
    """The other devices' parts of a chunk's weights come beside the own one."""
    chunk, away = layout.chunks[c], gathered(job_id, c, device)
    own = weight(job_id, c, device=device)
    begins = Grow(away, chunk.remote_bytes)
    return Exchange(Pattern.ALL_GATHER, (own,), (away,), chunk.whole_bytes, begins)


def gathers(layout: TrainingLayout, job_id: int, u: int, device: int) -> tuple[Exchange, ...]:
    """Of all chunks of a unit of which other devices have parts; none without a group."""
    if layout.ranks == 1:
        return ()
    chunks = layout.chunks
    own = [c for c in layout.units[u].chunks if chunks[c].remote_bytes]
    return tuple([gather(layout, job_id, c, device) for c in own])


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


def reduced(training: Training, u: int, microbatch: int) -> tuple[int, ...]:
    """Chunks whose gradients are complete with the backward of a unit, and are added up.

    Where devices have parts, behind each microbatch: nobody keeps whole gradients for long. Where
    each has all, once a step.
    """
    layout = layout_of(training)
    if layout.ranks == 1:
        return ()
    ends = [c for c in layout.units[u].trained if min(training.trained_by[c]) == u]
    is_last = (microbatch + 1) % training.spec.microbatches == 0
    return tuple([c for c in ends if is_last or layout.chunks[c].remote_bytes])


def begun(training: Training, u: int, device: int) -> tuple[Grow, ...]:
    """Whole gradients that begin with the backward of a unit."""
    layout, job_id = layout_of(training), training.spec.job_id
    if layout.ranks == 1:
        return ()
    own = [c for c in layout.units[u].trained if max(training.trained_by[c]) == u]
    return tuple(
        [
            Grow(unreduced(job_id, c, device), layout.chunks[c].whole_bytes)
            for c in own
            if layout.chunks[c].remote_bytes
        ]
    )


def left_behind(training: Training, work: Work, u: int, device: int) -> tuple[Place, ...]:
    """What was gathered for a unit, and is of no use to the launch behind it."""
    layout, job_id = layout_of(training), training.spec.job_id
    if layout.ranks == 1:
        return ()
    following: tuple[int, ...] = ()
    if work is Work.FORWARD:
        following = layout.units[min(u + 1, layout.num_units - 1)].chunks
    elif u > layout.first:
        following = layout.units[u - 1].chunks
    own = [c for c in layout.units[u].chunks if c not in following]
    return tuple([gathered(job_id, c, device) for c in own if layout.chunks[c].remote_bytes])
