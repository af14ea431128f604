"""Continuous batching, prefill first: the order of early vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import arrivals, check_limits


@dataclass(frozen=True)
class ContinuousBatching:
    """A step holds either whole prompts or one decode of each running job (vLLM v0, 2023).

    Prompts go first. The first prompt of a step is taken whatever its length.

    Args:
        token_budget: prompt tokens of a step.
        max_jobs: jobs in service.
        padded: each prompt counts as long as the longest one of its step.
        by_arrival: decodes come in the order of arrival, else in that of admission. The last decode
            is preempted first.

    Raises:
        ValueError: a limit is below 1.
    """

    token_budget: int = 2048
    max_jobs: int = 256
    padded: bool = False
    by_arrival: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(repeats=True, prompt_tokens=self.token_budget, max_jobs=self.max_jobs)

    def __post_init__(self) -> None:
        check_limits("continuous batching", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        return self._prompts(view) or tuple(
            Slice(j, j.remaining_tokens) for j in self._running(view)
        )

    def _running(self, view: View) -> Sequence[Job]:
        if not self.by_arrival:
            return view.serving
        return sorted(view.serving, key=lambda job: (job.arrival_ns, job.job_id))

    def _prompts(self, view: View) -> tuple[Slice, ...]:
        prompts: list[Slice] = []
        total = longest = 0
        for job in arrivals(view, self.max_jobs):
            tokens = job.remaining_tokens - view.found_tokens(job)
            total, longest = total + tokens, max(longest, tokens)
            used = longest * (len(prompts) + 1) if self.padded else total
            if prompts and used > self.token_budget:
                break
            prompts.append(Slice(job, job.remaining_tokens))
        return tuple(prompts)
