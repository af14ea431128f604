"""What happened to one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from engine.deliveries import Stretch
from traces.request import Request


@dataclass(slots=True)
class Outcome:
    """What happened to one request."""

    request: Request
    arrival_ns: int
    device: int | None = None  # the replica it was routed to
    scheduled_ns: int | None = None
    finish_ns: int | None = None
    restarts: int = 0
    swaps: int = 0
    cached_tokens: int = 0
    status: str = "unfinished"
    stretches: list[Stretch] = field(default_factory=list)  # never empty ones

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        return sum([len(s) if s.end is None else s.end - s.first for s in self.stretches])

    @property
    def first_token_ns(self) -> int | None:
        """When the first output token was delivered."""
        return self.stretches[0].first_ns if self.stretches else None

    @property
    def last_token_ns(self) -> int | None:
        """When the newest output token was delivered."""
        return self.stretches[-1].last_ns if self.stretches else None

    @property
    def token_ns(self) -> list[int]:
        """When each output token was delivered."""
        return list(chain.from_iterable([stretch.times_ns for stretch in self.stretches]))
