"""Priorities and SLO classes: the most urgent job first, by class and first-token deadline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import by_rank, check_limits, fill


@dataclass(frozen=True)
class EarliestDeadline:
    """Decodes, then prompts, each by the priority of their SLO class and then by deadline.

    Equal deadlines give first come, first served. Equal priorities give earliest deadline first,
    which meets all deadlines where any order of prompts does (one server, prompts cut into slices).

    Preemption starts at the end of this order: a prompt, also an urgent one, goes before a decode,
    and the least urgent prompt or decode goes first. A job in service that the token budget leaves
    out goes before all of these.

    Args:
        priority: per SLO class; the lowest is served first.
        deadline_s: per SLO class, seconds from arrival to the first token.
        default_priority: of a class that `priority` does not name.
        default_deadline_s: of a class that `deadline_s` does not name, in seconds.
        token_budget: tokens of a step.
        max_jobs: jobs in service.

    Raises:
        ValueError: a limit is below 1, or a deadline below 0.
    """

    priority: Mapping[str, int] | None = None
    deadline_s: Mapping[str, float] | None = None
    default_priority: int = 0
    default_deadline_s: float = 10.0
    token_budget: int = 2048
    max_jobs: int = 256

    @property
    def traits(self) -> Traits:
        """What this scheduling promises to the engine."""
        return Traits(repeats=True, step_tokens=self.token_budget, max_jobs=self.max_jobs)

    def __post_init__(self) -> None:
        check_limits("earliest deadline", token_budget=self.token_budget, max_jobs=self.max_jobs)
        within_s = {**(self.deadline_s or {}), "default": self.default_deadline_s}
        for name, seconds in within_s.items():
            if seconds < 0:
                raise ValueError(f"earliest deadline: {name} has {seconds} s, must not be below 0")

    def batch(self, view: View) -> tuple[Slice, ...]:
        return fill(by_rank(view, self._urgency, self.max_jobs), self.token_budget, view)

    def _urgency(self, job: Job) -> tuple[float, ...]:
        within_s = (self.deadline_s or {}).get(job.slo, self.default_deadline_s)
        priority = (self.priority or {}).get(job.slo, self.default_priority)
        return priority, job.arrival_ns + within_s * 1e9
