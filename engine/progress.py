"""Where a job that is served moves on: the one place where the order of its work is checked."""

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
        job._record(tokens)
    job._advance(tokens, not left)
    return not left


def start_behind(job: Job, tokens: int) -> None:
    """A job starts behind tokens that were found computed (prefix caching)."""
    assert not job.computed_tokens, f"job {job.job_id} has begun already"
    assert tokens < job.known_tokens, f"job {job.job_id}: its last token must be computed"
    job._compute_from(tokens)


def restart(job: Job) -> None:
    """Forgets what was computed. What was generated is known and counts as prompt now."""
    job._compute_from(0)
    if job.training is not None:
        job.training._forget()
