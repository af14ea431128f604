"""How long users think between an answer and their next turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traces.request import Request

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Think:
    """Think times of one mean in seconds: all equal, or exponential by seed."""

    mean_s: float = 0.0
    is_exponential: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.mean_s < float("inf"):
            raise ValueError(f"think time is {self.mean_s} s; it must be at least 0")

    def times_ns(self, n: int, seed: int = 0) -> list[int]:
        """n think times in nanoseconds."""
        drawn = np.random.default_rng(seed).exponential(1.0, n) if self.is_exponential else 1.0
        return [int(t) for t in np.rint(np.broadcast_to(drawn, n) * self.mean_s * NS_PER_S)]


def with_think(requests: Sequence[Request], think: Think, seed: int = 0) -> list[Request]:
    """The same requests; every turn after the first gets a think time."""
    times = iter(think.times_ns(sum(r.turn > 0 for r in requests), seed))
    return [replace(r, think_ns=next(times)) if r.turn > 0 else r for r in requests]
