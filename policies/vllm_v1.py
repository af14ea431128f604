"""vLLM v1's scheduler: whoever runs goes first in order, then whoever waits, under one budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from engine.plan import Slice
from engine.view import View
from policies.order import arrivals, check_limits, fill


@dataclass(frozen=True)
class VllmV1:
    """Prompts and decodes alike are tokens to catch up with, in the order of admission (vLLM 0.19).

    Its other half is paged restart with `prompts: must_fit`, `gives_way: true` and no watermark:
    the tail of running is preempted, and nobody comes in with a step that preempted.
    """

    token_budget: int = 2048
    max_jobs: int = 256
    repeats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_limits("vLLM v1", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        return fill(chain(view.serving, arrivals(view, self.max_jobs)), self.token_budget)
