"""Chunked prefill: decodes first, then slices of prompts, up to a token budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import arrivals, check_limits, fill


@dataclass(frozen=True)
class ChunkedPrefill:
    """Every step mixes decodes and prompt slices under one token budget (Sarathi-Serve, OSDI'24).

    Order: decodes of running jobs, prompts that have begun, prompts that wait.
    """

    token_budget: int = 512
    max_jobs: int = 256

    @property
    def traits(self) -> Traits:
        """The promises of this scheduling."""
        return Traits(repeats=True, appends=True, step_tokens=self.token_budget)

    def __post_init__(self) -> None:
        check_limits("chunked prefill", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        decodes, begun = view.in_service()
        prompts = [*begun, *arrivals(view, self.max_jobs)]
        return fill(prompts, self.token_budget, view, decodes)
