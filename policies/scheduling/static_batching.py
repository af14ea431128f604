"""Static batching: a batch is served to its end before the next one is let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View


@dataclass(frozen=True)
class StaticBatching:
    """Request-level scheduling, as before Orca (Orca, OSDI'22, section 2).

    Up to `max_jobs` waiting requests start together; nobody joins until all have finished. Padding
    of short prompts is not imitated: the cost is that of the tokens themselves.
    """

    max_jobs: int = 16
    traits: ClassVar[Traits] = Traits(repeats=True)

    def __post_init__(self) -> None:
        if self.max_jobs < 1:
            raise ValueError(f"static batching: max_jobs is {self.max_jobs}, must be at least 1")

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = view.serving or view.waiting[: self.max_jobs]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)
