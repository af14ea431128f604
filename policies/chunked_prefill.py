"""Chunked prefill: decodes first, then slices of prompts, up to a token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.job import Job
from engine.plan import Slice
from engine.view import View


@dataclass(frozen=True)
class ChunkedPrefill:
    """Every step mixes decodes and prompt slices under one token budget (Sarathi-Serve, OSDI'24).

    Order: decodes of running jobs, prompts that have begun, prompts that wait.
    """

    token_budget: int = 512
    max_jobs: int = 256

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"chunked prefill: {name} must be at least 1")

    def batch(self, view: View) -> tuple[Slice, ...]:
        slices: list[Slice] = []
        left = self.token_budget
        for job in self._wanted(view):
            if left == 0:
                break
            slices.append(Slice(job, min(job.remaining_tokens, left)))
            left -= slices[-1].tokens
        return tuple(slices)

    def _wanted(self, view: View) -> Iterable[Job]:
        begun = []
        for job in view.serving:
            if job.is_prefilling:
                begun.append(job)
            else:
                yield job
        yield from begun
        yield from view.waiting[: max(0, self.max_jobs - len(view.serving))]
