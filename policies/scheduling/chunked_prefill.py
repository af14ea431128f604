"""Chunked prefill: decodes first, then prefill slices, up to a token budget."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import arrivals, check_limits, fill


@dataclass(frozen=True)
class ChunkedPrefill:
    """Every step mixes decodes and prefill slices under one token budget (Sarathi-Serve, OSDI'24,
    section 4).

    Order of a step: decodes of running jobs, prompts whose prefill has begun, waiting prompts.

    Args:
        token_budget: tokens of a step, of decodes and prefill slices together.
        max_jobs: jobs in service.
        max_prefills: prompts that are in prefill at once: no other is admitted before one of them
            is through (FlexLLM: 1). None: as many as the budget holds.

    Raises:
        ValueError: a limit is below 1.
    """

    token_budget: int = 512
    max_jobs: int = 256
    max_prefills: int | None = None

    @property
    def traits(self) -> Traits:
        """What this scheduling promises to the engine."""
        return Traits(
            repeats=True,
            appends=self.max_prefills is None,
            step_tokens=self.token_budget,
            max_jobs=self.max_jobs,
        )

    def __post_init__(self) -> None:
        limits = {} if self.max_prefills is None else {"max_prefills": self.max_prefills}
        check_limits(
            "chunked prefill", token_budget=self.token_budget, max_jobs=self.max_jobs, **limits
        )

    def batch(self, view: View) -> tuple[Slice, ...]:
        decodes, begun = view.in_service()
        admitted = arrivals(view, self.max_jobs)
        if self.max_prefills is not None:
            admitted = admitted[: max(0, self.max_prefills - len(begun))]
        return fill([*begun, *admitted], self.token_budget, view, decodes)
