"""Guesses of output lengths, from what a View shows of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.job import Job


class LengthPredictor(Protocol):
    """Pure: equal jobs, equal guesses. The true length is behind the oracle boundary."""

    def output_tokens(self, job: Job) -> float:
        """Expected output in all, what was generated so far included."""


@dataclass(frozen=True)
class PromptShare:
    """Output in proportion to the prompt."""

    share: float = 0.5

    def output_tokens(self, job: Job) -> float:
        return self.share * job.prompt_tokens


@dataclass(frozen=True)
class ClassMean:
    """The mean of a job's SLO class, as known from earlier traffic."""

    mean_tokens: Mapping[str, float] | None = None
    default_tokens: float = 256.0

    def output_tokens(self, job: Job) -> float:
        return (self.mean_tokens or {}).get(job.slo, self.default_tokens)
