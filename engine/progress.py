"""The one place where the order of work is checked, and where a job moves on."""

from __future__ import annotations

from engine.job import Job
from engine.plan import Slice, Work


def advance_serving(piece: Slice) -> bool:
    """Moves a serving job's frontier; returns whether the slice yields the next token."""
    job, tokens = piece.job, piece.tokens
    left = job.remaining_tokens - tokens
    assert piece.work is Work.FORWARD, f"job {job.job_id} is served, it has no {piece.work}"
    assert piece.layers is None, f"job {job.job_id}: serving slices run through all layers"
    assert tokens > 0 and left >= 0, f"job {job.job_id}: {tokens} tokens, {left + tokens} remain"
    if piece.record:
        assert job.recorded_tokens == job.computed_tokens, "a record is a gapless prefix"
        job.recorded_tokens += tokens
    job.computed_tokens += tokens
    if left:
        return False
    job.known_tokens += 1
    return True


def start_behind(job: Job, tokens: int) -> None:
    """A job starts behind tokens that were found computed (prefix caching)."""
    assert not job.computed_tokens, f"job {job.job_id} has begun already"
    assert tokens < job.known_tokens, f"job {job.job_id}: its last token must be computed"
    job.computed_tokens = tokens


def restart(job: Job) -> None:
    """Forgets what was computed. What was generated is known and counts as prompt now."""
    job.computed_tokens = 0
    if job.training is not None:
        job.recorded_tokens = 0
        job.forward.clear()
        job.backward.clear()


def advance_training(piece: Slice) -> bool:
    """Moves a training job's frontier; returns whether a step is complete with this slice."""
    job, spec = piece.job, piece.job.training
    assert spec is not None
    layers = range(spec.num_units) if piece.layers is None else piece.layers
    for layer in layers:
        assert piece.version <= job.updated[layer], (
            f"job {job.job_id}: weight version {piece.version} of layer {layer} does not exist"
        )
    {
        Work.FORWARD: _advance_forward,
        Work.BACKWARD: _advance_backward,
        Work.UPDATE: _advance_update,
    }[piece.work](job, layers, piece)
    return _count_steps(job)


def _advance_forward(job: Job, layers: range, piece: Slice) -> None:
    assert job.training is not None
    total, done = job.training.microbatch_tokens, _mutable(job, piece.microbatch)[0]
    for layer in layers:
        below = total if layer == 0 else done[layer - 1]
        assert done[layer] + piece.tokens <= below, (
            f"job {job.job_id}: forward of layer {layer} out of order"
        )
        done[layer] += piece.tokens


def _advance_backward(job: Job, layers: range, piece: Slice) -> None:
    assert job.training is not None
    total = job.training.microbatch_tokens
    forward, done = _mutable(job, piece.microbatch)
    assert forward[-1] == total, f"job {job.job_id}: backward before the forward is complete"
    for layer in reversed(layers):
        above = total if layer == job.training.num_units - 1 else done[layer + 1]
        assert done[layer] + piece.tokens <= above, (
            f"job {job.job_id}: backward of layer {layer} out of order"
        )
        done[layer] += piece.tokens


def _advance_update(job: Job, layers: range, piece: Slice) -> None:
    assert job.training is not None
    total, each = job.training.microbatch_tokens, job.training.microbatches
    step = piece.microbatch // each
    for layer in layers:
        assert job.updated[layer] == step, f"job {job.job_id}: update of layer {layer} out of order"
        for microbatch in range(step * each, (step + 1) * each):
            assert job.frontier(microbatch)[1][layer] == total, (
                f"job {job.job_id}: update of layer {layer} before its backward"
            )
        job.updated[layer] += 1


def _mutable(job: Job, microbatch: int) -> tuple[list[int], list[int]]:
    forward, backward = job.frontier(microbatch)
    return (
        job.forward.setdefault(microbatch, list(forward)),
        job.backward.setdefault(microbatch, list(backward)),
    )


def _count_steps(job: Job) -> bool:
    spec = job.training
    assert spec is not None
    if spec.has_update:
        steps = min(job.updated)
    else:
        total = spec.microbatch_tokens
        complete = sum(1 for done in job.backward.values() if min(done) == total)
        steps = complete // spec.microbatches
    grown = steps > job.step
    job.step = steps
    return grown
