"""Shortest prompt first: the waiting job with the shortest prompt is admitted first.

A policy from outside the project. It needs the engine's vocabulary and nothing else:

    tandem run --config-dir examples/shortest_prompt_first/conf scheduling=shortest
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View


@dataclass(frozen=True)
class ShortestPromptFirst:
    """Decodes first, then prompts by length, under a token budget. A long prompt may starve."""

    token_budget: int = 512
    max_jobs: int = 64

    @property
    def traits(self) -> Traits:
        return Traits(step_tokens=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        room = max(0, self.max_jobs - len(view.serving))
        waiting = sorted(view.waiting, key=lambda job: (job.prompt_tokens, job.job_id))
        decodes = [job for job in view.serving if not job.is_prefilling]
        begun = [job for job in view.serving if job.is_prefilling]
        slices, left = [], self.token_budget
        for job in [*decodes, *begun, *waiting[:room]]:
            tokens = min(job.remaining_tokens, left)
            if tokens:
                slices.append(Slice(job, tokens))
                left -= tokens
        return tuple(slices)
