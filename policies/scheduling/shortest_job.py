"""Shortest job first, by the predicted tokens that each job has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.view import View
from policies.scheduling.order import by_rank, check_limits, fill


class LengthPredictor(Protocol):
    """Predicts output lengths. Pure: equal jobs give equal predictions.

    The true length is behind the oracle boundary.
    """

    def output_tokens(self, job: Job) -> float:
        """Expected output of a job in tokens, those generated so far included.

        Args:
            job: a job that waits or is in service.

        Returns:
            Tokens; an estimate, which may be no whole number.
        """


@dataclass(frozen=True)
class PromptShare:
    """Output in proportion to the prompt.

    Args:
        share: output tokens per prompt token.
    """

    share: float = 0.5

    def output_tokens(self, job: Job) -> float:
        """See LengthPredictor."""
        return self.share * job.prompt_tokens


@dataclass(frozen=True)
class ClassMean:
    """The mean output of a job's SLO class, as known from earlier traffic.

    Args:
        mean_tokens: output tokens per SLO class.
        default_tokens: output tokens of a class that `mean_tokens` does not name.
    """

    mean_tokens: Mapping[str, float] | None = None
    default_tokens: float = 256.0

    def output_tokens(self, job: Job) -> float:
        """See LengthPredictor."""
        return (self.mean_tokens or {}).get(job.slo, self.default_tokens)


@dataclass(frozen=True)
class ShortestJob:
    """Decodes, then prompts, each by tokens left: of the prompt and, as predicted, of the output.

    The mean latency is the best where predictions are right (shortest remaining processing time);
    long jobs may starve. A job that outlives its prediction counts as one token from its end.

    Args:
        predictor: of output lengths.
        token_budget: tokens of a step.
        max_jobs: jobs in service.

    Raises:
        ValueError: a limit is below 1.
    """

    predictor: LengthPredictor
    token_budget: int = 2048
    max_jobs: int = 256

    @property
    def traits(self) -> Traits:
        """What this scheduling promises to the engine."""
        return Traits(step_tokens=self.token_budget, max_jobs=self.max_jobs)

    def __post_init__(self) -> None:
        check_limits("shortest job", token_budget=self.token_budget, max_jobs=self.max_jobs)

    def batch(self, view: View) -> tuple[Slice, ...]:
        return fill(by_rank(view, self._left, self.max_jobs), self.token_budget, view)

    def _left(self, job: Job) -> tuple[float, ...]:
        generated = job.known_tokens - job.prompt_tokens
        output = max(1.0, self.predictor.output_tokens(job) - generated)
        return (job.remaining_tokens + output,)
