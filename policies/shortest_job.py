"""Shortest job first, by the predicted rest of each job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.job import Job
from engine.plan import Slice
from engine.view import View
from policies.order import by_rank, check_limits, fill
from policies.predictors import LengthPredictor


@dataclass(frozen=True)
class ShortestJob:
    """Decodes, then prompts, each by tokens left: of the prompt and, by guess, of the output.

    Best mean latency where guesses are right; long jobs may starve. A job that outlives its guess
    counts as one token from its end.
    """

    predictor: LengthPredictor
    token_budget: int = 2048
    max_jobs: int = 256
    cuts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_limits("shortest job", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        return fill(by_rank(view, self._left, self.max_jobs), self.token_budget, view)

    def _left(self, job: Job) -> tuple[float, ...]:
        generated = job.known_tokens - job.prompt_tokens
        output = max(1.0, self.predictor.output_tokens(job) - generated)
        return (job.remaining_tokens + output,)
