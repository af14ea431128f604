"""A multi-level feedback queue: the job that has got the least service so far goes first.

A policy from outside the project. It needs no prediction of lengths, and preempts:

    tandem run --config-dir examples/feedback_queue/conf scheduling=feedback_queue
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View


@dataclass(frozen=True)
class FeedbackQueue:
    """Least attained service, in levels whose bounds double. Within a level the first to arrive
    goes first. A job that gets no slice keeps its pages, and goes on when its turn comes.
    """

    token_budget: int = 512
    batch_jobs: int = 16  # jobs with a slice in one step
    max_jobs: int = 64  # jobs in service, paused ones among them
    quantum_tokens: int = 512  # service on the highest level

    @property
    def traits(self) -> Traits:
        return Traits(step_tokens=self.token_budget, max_jobs=self.max_jobs)

    def level(self, job: Job) -> int:
        """0 is served first. A restarted job stays on the level that it had reached."""
        has_answered = job.known_tokens > job.prompt_tokens
        attained = job.known_tokens if has_answered else job.computed_tokens
        return (attained // self.quantum_tokens).bit_length()

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        order = sorted(jobs, key=lambda job: (self.level(job), job.arrival_ns, job.job_id))
        running, room = set(view.serving), self.max_jobs - len(view.serving)
        slices, left = [], self.token_budget
        for job in order:
            is_new = job not in running
            tokens = min(job.remaining_tokens, left)
            if not tokens or len(slices) == self.batch_jobs:
                break
            if is_new and room <= 0:
                continue
            room -= is_new
            slices.append(Slice(job, tokens))
            left -= tokens
        return tuple(slices)
