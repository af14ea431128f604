"""Orca's iteration-level scheduling: all jobs in the order of arrival, prompts whole and mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import check_limits


@dataclass(frozen=True)
class Orca:
    """Up to `max_jobs` jobs a step, first come first served (Orca, OSDI'22, algorithm 1).

    A step mixes decodes with whole prompts, however long. Its other half is a reservation of the
    longest sequence.
    """

    max_jobs: int = 16
    traits: ClassVar[Traits] = Traits(repeats=True)

    def __post_init__(self) -> None:
        check_limits("Orca", max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        jobs.sort(key=lambda job: (job.arrival_ns, job.job_id))
        return tuple(Slice(job, job.remaining_tokens) for job in jobs[: self.max_jobs])
