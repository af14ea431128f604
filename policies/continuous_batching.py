"""Continuous batching, prefill first: the order of early vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import Slice
from engine.view import View


@dataclass(frozen=True)
class ContinuousBatching:
    """A step holds either whole prompts or one decode of each running job (vLLM v0, 2023).

    Prompts go first. `token_budget` bounds the prompt tokens of a step, but the first prompt is
    taken whatever its length; `max_jobs` bounds the jobs in service.
    """

    token_budget: int = 2048
    max_jobs: int = 256

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"continuous batching: {name} must be at least 1")

    def batch(self, view: View) -> tuple[Slice, ...]:
        return self._prompts(view) or tuple(Slice(j, j.remaining_tokens) for j in view.serving)

    def _prompts(self, view: View) -> tuple[Slice, ...]:
        prompts: list[Slice] = []
        left = self.token_budget
        for job in view.waiting[: max(0, self.max_jobs - len(view.serving))]:
            if prompts and job.remaining_tokens > left:
                break
            prompts.append(Slice(job, job.remaining_tokens))
            left -= job.remaining_tokens
        return tuple(prompts)
