"""Static batching: a batch is served to its end before the next one is admitted."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import check_limits


@dataclass(frozen=True)
class StaticBatching:
    """Request-level scheduling, as before Orca (Orca, OSDI'22, section 2).

    Waiting requests start together; none is admitted until all of them have finished. Padding of
    short prompts is not imitated: the cost is that of the tokens themselves.

    Args:
        max_jobs: requests of a batch.

    Raises:
        ValueError: `max_jobs` is below 1.
    """

    max_jobs: int = 16

    @property
    def traits(self) -> Traits:
        return Traits(repeats=True, max_jobs=self.max_jobs)

    def __post_init__(self) -> None:
        check_limits("static batching", max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = view.serving or view.waiting[: self.max_jobs]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)
