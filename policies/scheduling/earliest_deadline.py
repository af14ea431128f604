"""Priorities and SLO classes: the most urgent first, by class and deadline of the first token."""

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
    """Decodes, then prompts, each by priority of their class and then by deadline.

    `priority` of an SLO class: lower is served first; `deadline_s`: seconds from arrival to the
    first token. A class that is not named has `default_priority` and `default_deadline_s`. With
    equal deadlines it is first come first served; with equal priorities it is earliest deadline
    first, which meets all deadlines where any order of prompts does (on one server, prompts cut).
    Pages are taken from the end of this order: of prompts, also urgent ones, before decodes, and
    among either the least urgent first. Who is in service but finds no budget loses them before.
    """

    priority: Mapping[str, int] | None = None
    deadline_s: Mapping[str, float] | None = None
    default_priority: int = 0
    default_deadline_s: float = 10.0
    token_budget: int = 2048
    max_jobs: int = 256

    @property
    def traits(self) -> Traits:
        """The promises of this scheduling."""
        return Traits(repeats=True, step_tokens=self.token_budget)

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
