"""vLLM v1's scheduler: whoever runs goes first in order, then whoever waits, under one budget."""

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

    Its other half is paged restart with `prompts: must_fit`, `gives_way: true` and no watermark:
    the tail of running is preempted, and nobody comes in with a step that preempted.
    """

    token_budget: int = 2048
    max_jobs: int = 256

    @property
    def traits(self) -> Traits:
        """The promises of this scheduling."""
        return Traits(repeats=True, appends=True, step_tokens=self.token_budget)

    def __post_init__(self) -> None:
        check_limits("vLLM v1", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        decodes = view.running_decodes()
        others = view.serving[len(decodes) :]
        coming = view.waiting[: max(0, self.max_jobs - self._seats_taken(view))]
        return fill(chain(others, coming), self.token_budget, view, decodes)

    def _seats_taken(self, view: View) -> int:
        """A job that has ended keeps its seat until its pages are back, as in vLLM."""
        taken = len(view.serving)
        if max(len(view.held_bytes), taken) + len(view.waiting) <= self.max_jobs:
            return taken  # there is a seat for everybody
        return max(num_holders(view), taken)
