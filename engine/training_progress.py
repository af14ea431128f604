"""Where a training job moves on: the one place where the order of its work is checked."""

from __future__ import annotations

from engine.plan import Slice, Work
from engine.training import Training


def advance_training(piece: Slice) -> bool:
    """Moves a training job's frontier; returns whether a step is complete with this slice."""
    training = piece.job.training
    assert training is not None, f"{_who(piece)} does not train"
    if piece.work is Work.UPDATE:
        _update(training, piece)
        return training.complete_steps()
    units = range(training.spec.num_units) if piece.layers is None else piece.layers
    if piece.version:
        _check_version(training, units, piece)
    if piece.work is Work.FORWARD:
        _forward(training, units, piece)
        return False
    _backward(training, units, piece)
    return training.complete_steps()


def _who(piece: Slice) -> str:
    """For messages."""
    return f"job {piece.job.job_id}"


def _check_version(training: Training, units: range, piece: Slice) -> None:
    for unit in units:
        assert piece.version <= training.version(unit), (
            f"{_who(piece)}: weight version {piece.version} of unit {unit} does not exist"
        )


def _forward(training: Training, units: range, piece: Slice) -> None:
    total, done = training.spec.microbatch_tokens, training.progress(piece.microbatch)[0]
    for unit in units:
        below = total if unit == 0 else done[unit - 1]
        assert done[unit] + piece.tokens <= below, (
            f"{_who(piece)}: forward of unit {unit} out of order"
        )
        done[unit] += piece.tokens


def _backward(training: Training, units: range, piece: Slice) -> None:
    total, last = training.spec.microbatch_tokens, training.spec.num_units - 1
    forward, done = training.progress(piece.microbatch)
    assert forward[-1] == total, f"{_who(piece)}: backward before the forward is complete"
    assert units.start >= training.first, (
        f"{_who(piece)}: nothing below unit {training.first} trains"
    )
    for unit in reversed(units):
        above = total if unit == last else done[unit + 1]
        assert done[unit] + piece.tokens <= above, (
            f"{_who(piece)}: backward of unit {unit} out of order"
        )
        done[unit] += piece.tokens


def _update(training: Training, piece: Slice) -> None:
    spec = training.spec
    total, each = spec.microbatch_tokens, spec.microbatches
    step = piece.microbatch // each
    clips = spec.recipe.clip_norm is not None  # by the norm of all gradients
    for chunk in piece.layers or training.trained_by:
        assert training.updated.get(chunk) == step, f"{_who(piece)}: update of {chunk} out of order"
        for microbatch in range(step * each, (step + 1) * each):
            done = training.frontier(microbatch)[1]
            units = (training.first,) if clips else training.trained_by[chunk]
            assert all(done[u] == total for u in units), f"{_who(piece)}: {chunk} updated too early"
        training.updated[chunk] += 1
