"""What happened to one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from engine.run import Times
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
    token_runs: list[int | Times] = field(default_factory=list)  # one token, or all of a run

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        runs = [run for run in self.token_runs if not isinstance(run, int)]
        return len(self.token_runs) - len(runs) + sum(map(len, runs))

    @property
    def first_token_ns(self) -> int | None:
        """When the first output token was delivered."""
        return next(map(_first, self.token_runs), None)

    @property
    def last_token_ns(self) -> int | None:
        """When the newest output token was delivered."""
        return next(map(_last, reversed(self.token_runs)), None)

    @property
    def token_ns(self) -> list[int]:
        """When each output token was delivered."""
        runs = ([run] if isinstance(run, int) else run.tolist() for run in self.token_runs)
        return list(chain.from_iterable(runs))


def _first(run: int | Times) -> int:
    return run if isinstance(run, int) else int(run[0])


def _last(run: int | Times) -> int:
    return run if isinstance(run, int) else int(run[-1])
