"""Orca's iteration-level scheduling: all jobs in the order of arrival, prompts whole and mixed."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import check_limits


@dataclass(frozen=True)
class Orca:
    """Jobs in the order of arrival, first come, first served (Orca, OSDI'22, algorithm 1).

    A step mixes decodes with whole prompts, however long. The memory half that belongs to it is
    MaxReservation, a reservation of the longest sequence.

    Args:
        max_jobs: jobs of a step.

    Raises:
        ValueError: `max_jobs` is below 1.
    """

    max_jobs: int = 16

    @property
    def traits(self) -> Traits:
        return Traits(repeats=True, max_jobs=self.max_jobs)

    def __post_init__(self) -> None:
        check_limits("Orca", max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        jobs.sort(key=lambda job: (job.arrival_ns, job.job_id))
        return tuple(Slice(job, job.remaining_tokens) for job in jobs[: self.max_jobs])
