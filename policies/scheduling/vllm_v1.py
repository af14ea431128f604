"""vLLM v1's scheduler: jobs in service in order, then waiting jobs, under one token budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import check_limits, fill, num_holders


@dataclass(frozen=True)
class VllmV1:
    """Prompts and decodes alike are tokens to catch up with, in the order of admission (vLLM 0.19).

    The memory half that belongs to it is PagedRestart with `prompts` must_fit, `gives_way` and no
    watermark: preemption takes the job admitted last, and a step with a preemption admits no job.

    Args:
        token_budget: tokens of a step (`max_num_batched_tokens`).
        max_jobs: jobs in service (`max_num_seqs`).

    Raises:
        ValueError: a limit is below 1.
    """

    token_budget: int = 2048
    max_jobs: int = 256

    @property
    def traits(self) -> Traits:
        """What this scheduling promises to the engine."""
        return Traits(
            repeats=True, appends=True, step_tokens=self.token_budget, max_jobs=self.max_jobs
        )

    def __post_init__(self) -> None:
        check_limits("vLLM v1", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        decodes = view.running_decodes()
        others = view.serving[len(decodes) :]
        admitted = view.waiting[: max(0, self.max_jobs - self._counted_jobs(view))]
        return fill(chain(others, admitted), self.token_budget, view, decodes)

    def _counted_jobs(self, view: View) -> int:
        """Jobs that count against `max_jobs`.

        In vLLM, a job that has ended counts until its pages are freed.
        """
        running = len(view.serving)
        if max(len(view.held_bytes), running) + len(view.waiting) <= self.max_jobs:
            return running  # all waiting jobs may enter, so the exact count decides nothing
        return max(num_holders(view), running)
