"""The norm by which a step's gradients are clipped: the last backward makes it, every update reads
it, the last one gives it back. So no update begins before all backwards have ended, whichever lane
it runs on (PatrickStar's specification, pitfall 9); without clipping each waits for its own."""

from __future__ import annotations

from engine.plan import Grow, Place, Slice, Tier
from engine.regions import NORM_BYTES, norm
from engine.training import Training


def made_norm(piece: Slice, device: int) -> tuple[Grow, ...]:
    """What a backward of the lowest unit that trains puts out, if it is the last one of its step
    and gradients are clipped."""
    training = _training(piece)
    if not _clips(training) or (piece.microbatch + 1) % training.spec.microbatches:
        return ()
    return (Grow(norm(piece.job.job_id, device=device), NORM_BYTES),)


def wanted_norm(piece: Slice, tier: Tier, device: int) -> tuple[tuple[Place, int], ...]:
    """What an update wants beside states and gradients of its chunk."""
    place = norm(piece.job.job_id, tier, device)
    return ((place, NORM_BYTES),) if _clips(_training(piece)) else ()


def ended_norm(piece: Slice, tier: Tier, device: int) -> tuple[Place, ...]:
    """What is of no use behind an update: the same, behind the last one of its step."""
    found = wanted_norm(piece, tier, device)
    assert piece.layers is not None, "an update is of one chunk"
    if not found or piece.layers.start != max(_training(piece).trained_by):
        return ()
    return tuple([place for place, _ in found])


def _clips(training: Training) -> bool:
    return training.spec.has_update and training.spec.recipe.clip_norm is not None


def _training(piece: Slice) -> Training:
    training = piece.job.training
    assert training is not None, "a task of a training job"
    return training
