"""Who ends when: the lengths that policies may not see, and the ends that are in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.executor import Launch, Span
from engine.job import Job
from engine.plan import Op
from engine.roster import Roster
from engine.standing import Standing


class Ends:
    """Lengths of the trace, and jobs that left at issue and finish when an operation settles."""

    def __init__(self, roster: Roster, standing: Standing) -> None:
        self._roster, self._standing = roster, standing
        self._target: dict[int, int] = {}  # known tokens at which a request is complete
        self._with: dict[Op, list[Job]] = {}
        self._steps: dict[Op, list[tuple[Job, int]]] = {}  # of training, complete with an operation

    def __bool__(self) -> bool:
        """Whether an end is in flight."""
        return bool(self._with)

    def __iter__(self) -> Iterator[Job]:
        """Jobs whose end is in flight."""
        return (job for jobs in self._with.values() for job in jobs)

    def expect(self, job: Job, output_tokens: int) -> None:
        """A request has come, and this is how long its answer will be."""
        self._target[job.job_id] = job.known_tokens + output_tokens

    def tokens_left(self, job: Job) -> int:
        """Tokens that are still to be sampled; none or less where the job is complete."""
        return self._target[job.job_id] - job.known_tokens

    def end_with(self, op: Op, jobs: Sequence[Job]) -> None:
        """These jobs leave now and finish when the operation settles."""
        self._standing.lose(jobs, somebody_waits=bool(self._roster.waiting))
        for job in jobs:
            self._with.setdefault(op, []).append(job)
            self._roster.leave(job)

    def sampled(self, span: Span, launch: Launch) -> list[Job]:
        """Who sampled an end of sequence, or reached the length of the trace as its limit: out."""
        ids = {piece.job_id for piece in launch.pieces if piece.samples}
        jobs = [job for job in self._roster.serving if job.job_id in ids]
        done = [job for job in jobs if job.job_id in span.ended or self.tokens_left(job) <= 0]
        for job in done:
            self._standing.drop()
            self._roster.leave(job)
        return done

    def step_with(self, op: Op, job: Job, step: int) -> None:
        """A training job's step is complete when the operation settles."""
        self._steps.setdefault(op, []).append((job, step))

    def pop_steps(self, op: Op) -> Sequence[tuple[Job, int]]:
        """Steps that are complete with an operation that has ended."""
        return self._steps.pop(op, ()) if self._steps else ()

    def pop(self, op: Op) -> Sequence[Job]:
        """Who finishes with an operation that has ended."""
        return self._with.pop(op, ())
