"""Orca's iteration-level scheduling: all jobs in the order of arrival, prompts whole and mixed."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import Slice
from engine.view import View
from policies.order import check_limits


@dataclass(frozen=True)
class Orca:
    """Up to `max_jobs` jobs a step, first come first served (Orca, OSDI'22, algorithm 1).

    A step mixes decodes with whole prompts, however long. Its other half is a reservation of the
    longest sequence.
    """

    max_jobs: int = 64

    def __post_init__(self) -> None:
        check_limits("Orca", max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = sorted([*view.serving, *view.waiting], key=lambda j: (j.arrival_ns, j.job_id))
        seats = self.max_jobs - len(view.serving)
        waiting = {job.job_id for job in view.waiting}
        chosen = []
        for job in jobs:
            if job.job_id in waiting:
                if seats <= 0:
                    continue
                seats -= 1
            chosen.append(Slice(job, job.remaining_tokens))
        return tuple(chosen)
