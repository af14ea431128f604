"""Requests of random lengths, as `vllm bench serve --dataset-name random` makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from traces.request import Request

STREAM = 1  # of a seed: arrivals draw from the seed itself


MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths even over [n (1 - range_ratio), n (1 + range_ratio)], ends included and at least 1.

    All prompts begin with the same `prefix_tokens`, which come on top of their length. Equal seeds
    give equal requests; they all arrive at 0 until they are given arrivals.
    """

    requests: int = 200
    input_tokens: int = 1024
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"trace.{name}={getattr(self, name)}: it must be at least 1")
        if self.requests > MOST_REQUESTS:
            raise ValueError(f"trace.requests={self.requests}: at most {MOST_REQUESTS:,} are drawn")
        if self.prefix_tokens < 0:
            raise ValueError(f"trace.prefix_tokens={self.prefix_tokens}: it must be at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"trace.range_ratio={self.range_ratio}: it must be in [0, 1)")

    def drawn(self, seed: int = 0) -> list[Request]:
        """The requests, their ids in order of arrival."""
        rng = np.random.default_rng((seed, STREAM))
        inputs, outputs = (self._lengths(rng, n) for n in (self.input_tokens, self.output_tokens))
        prefix = self.prefix_tokens
        return [
            Request(
                number,
                0,
                prefix + length,
                output,
                prefix_ids=(0,) if prefix else None,
                prefix_block_tokens=prefix,
            )
            for number, (length, output) in enumerate(zip(inputs, outputs, strict=True))
        ]

    def _lengths(self, rng: np.random.Generator, mean: int) -> list[int]:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = math.ceil(mean * (1 + self.range_ratio))
        found: list[int] = rng.integers(low, high, self.requests, endpoint=True).tolist()
        return found
