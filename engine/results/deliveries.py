"""What happened to each request, and when its tokens reached the client."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from typing import TypeAlias

from traces.serving.request import Request

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length


class Stretch:
    """Tokens that a request got without a gap: a part of the delivery times of a device."""

    __slots__ = ("_times", "end", "first")

    def __init__(self, times: Times) -> None:
        self._times, self.first = times, len(times)
        self.end: int | None = None  # None while it goes on

    def __len__(self) -> int:
        return (len(self._times) if self.end is None else self.end) - self.first

    @property
    def first_ns(self) -> int:
        return self._times[self.first]

    @property
    def last_ns(self) -> int:
        return self._times[self.first + len(self) - 1]

    @property
    def times_ns(self) -> list[int]:
        return self._times[self.first : self.first + len(self)].tolist()


class Deliveries:
    """Times at which a device delivered tokens; requests are looked at only when they change."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._times: Times = array("q")
        self._ids: Sequence[int] = ()
        self._open: dict[int, Stretch] = {}  # by request

    def add(self, ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        """Each of these requests got a token at each of these times."""
        if ids != self._ids:
            self._change(ids)
        self._times.extend(times_ns)

    def _change(self, ids: tuple[int, ...]) -> None:
        going_on = self._open
        new = [*filterfalse(going_on.__contains__, ids)]
        if len(going_on) + len(new) > len(ids):
            for i in going_on.keys() - ids:
                going_on.pop(i).end = len(self._times)
        for i in new:
            going_on[i] = stretch = Stretch(self._times)
            self._outcomes[i].stretches.append(stretch)
        self._ids = ids


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
