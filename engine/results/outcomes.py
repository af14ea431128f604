"""What happened to requests and samples, and the table of requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from engine.contract.plan import Slice
from engine.contract.regions import Work
from engine.results.schema import TABLES, Ints, lists, starts_of
from engine.results.tables import Outputs, Times, table_of_columns
from traces.serving.request import Request


class Stretch:
    """Tokens that a request got without a gap: a part of the delivery times of a device."""

    __slots__ = ("device_ns", "end", "first")

    def __init__(self, times: Times) -> None:
        self.device_ns, self.first = times, len(times)
        self.end: int | None = None  # None while it goes on

    def __len__(self) -> int:
        return (len(self.device_ns) if self.end is None else self.end) - self.first

    @property
    def first_ns(self) -> int:
        return self.device_ns[self.first]

    @property
    def last_ns(self) -> int:
        return self.device_ns[-1 if self.end is None else self.end - 1]

    @property
    def times(self) -> Times:
        return self.device_ns[self.first : self.end]


class Deliveries:
    """Times at which a device delivered tokens; requests are looked at only when they change."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._times: Times = array("q")
        self._ids: Sequence[int] = ()
        self._now: set[int] = set()  # of these ids
        self._open: dict[int, Stretch] = {}  # by request

    def add(self, ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        """Each of these requests got a token at each of these times."""
        if ids != self._ids:
            self._change(ids)
        self._times.extend(times_ns)

    def _change(self, ids: tuple[int, ...]) -> None:
        before, now, going_on = self._now, set(ids), self._open
        for i in before ^ now:
            if i in before:
                going_on.pop(i).end = len(self._times)
            else:
                going_on[i] = stretch = Stretch(self._times)
                self._outcomes[i].stretches.append(stretch)
        self._ids, self._now = ids, now


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
    adapter_version: int | None = None  # with which it was admitted
    status: str = "unfinished"
    stretches: list[Stretch] = field(default_factory=list)  # never empty ones
    written_tokens: int = 0  # once its row is written, which has their times

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        own = sum([len(s) if s.end is None else s.end - s.first for s in self.stretches])
        return self.written_tokens + own

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
        return list(chain.from_iterable([stretch.times for stretch in self.stretches]))


@dataclass(slots=True)
class SampleOutcome:
    """What happened to one sample of a finetuning job."""

    tokens: int
    start_ns: int
    left: int  # tokens that units still have to go back over
    forward_tokens: int = 0
    last_ns: int = 0
    restarts: int = 0
    since: int = 0  # the plan from which on its launches count

    def settle(self, piece: Slice, end_ns: int) -> None:
        """A window of the sample has ended."""
        training, units = piece.job.training, piece.layers
        assert training is not None and units is not None, "a window of a finetuning job"
        self.last_ns = end_ns
        if piece.work is Work.BACKWARD:
            self.left -= piece.tokens * len(units)
        elif units.stop == training.spec.num_units:
            self.forward_tokens += piece.tokens


# ---- the table of requests
TOKEN_TIMES = TABLES["requests"].field("token_ns").type


def requests_table(outcomes: Sequence[Outcome], outputs: Outputs | None) -> pa.Table:
    """REQUESTS; `outputs` gives the generated ids of a request."""
    starts, times = _token_times(outcomes)
    first = [int(times[i]) if i < end else None for i, end in pairwise(starts.tolist())]
    requests = [outcome.request for outcome in outcomes]
    ids = [None if outputs is None else list(outputs(r.request_id)) for r in requests]
    columns: list[Any] = [
        [request.request_id for request in requests],
        [request.session for request in requests],
        [request.turn for request in requests],
        [request.slo for request in requests],
        [outcome.device for outcome in outcomes],
        [request.prompt_tokens for request in requests],
        np.diff(starts),
        [outcome.arrival_ns for outcome in outcomes],
        [outcome.scheduled_ns for outcome in outcomes],
        first,
        [outcome.finish_ns for outcome in outcomes],
        [outcome.restarts for outcome in outcomes],
        [outcome.swaps for outcome in outcomes],
        [outcome.cached_tokens for outcome in outcomes],
        [outcome.status for outcome in outcomes],
        lists(starts, times, TOKEN_TIMES),
        ids,
    ]
    return table_of_columns("requests", columns)


def _token_times(outcomes: Sequence[Outcome]) -> tuple[Ints, Ints]:
    """Where the times of each request begin among all, and behind them the end of all; all times.

    Requests that share a device come and go: each may have hundreds of stretches.
    """
    found: list[Stretch] = [s for outcome in outcomes for s in outcome.stretches]
    firsts = _int64([s.first for s in found])
    ends = _int64([len(s.device_ns) if s.end is None else s.end for s in found])
    starts = starts_of(ends - firsts)
    own = starts[starts_of(_int64([len(outcome.stretches) for outcome in outcomes]))]
    at = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], ends - firsts)
    devices = {id(s.device_ns): s.device_ns for s in found}
    if len(devices) == 1:
        return own, np.frombuffer(found[0].device_ns, np.int64)[at]
    times = np.empty(len(at), np.int64)
    chosen = np.repeat(_int64([id(s.device_ns) for s in found]), ends - firsts)
    for number, device_ns in devices.items():
        is_here = chosen == number
        times[is_here] = np.frombuffer(device_ns, np.int64)[at[is_here]]
    return own, times


def _int64(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))
