"""What happened to requests, samples and records, and the table of requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
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


class Stretches:
    """Tokens that a request got from a device, by its stretches without a gap.

    A stretch is a part of the times at which the device delivered tokens. Its first and its end are
    two numbers of `bounds`; the end of the newest one is not there while it goes on.
    """

    __slots__ = ("bounds", "device_ns")

    def __init__(self, device_ns: Times) -> None:
        self.device_ns = device_ns
        self.bounds: Times = array("q")

    @property
    def closed(self) -> Times:
        """The bounds, with the newest end if that is not there yet."""
        bounds = self.bounds
        return bounds + array("q", [len(self.device_ns)]) if len(bounds) % 2 else bounds

    def __len__(self) -> int:
        bounds = self.closed
        return sum(bounds[1::2]) - sum(bounds[::2])

    @property
    def first_ns(self) -> int:
        return self.device_ns[self.bounds[0]]

    @property
    def last_ns(self) -> int:
        return self.device_ns[self.closed[-1] - 1]

    @property
    def times(self) -> Iterator[int]:
        bounds = self.closed
        for first, end in zip(bounds[::2], bounds[1::2], strict=True):
            yield from self.device_ns[first:end]


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
    stretches: list[Stretches] = field(default_factory=list)  # by device, in order of delivery
    written_tokens: int = 0  # once its row is written, which has their times

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        return self.written_tokens + sum(map(len, self.stretches))

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
        return list(chain.from_iterable([part.times for part in self.stretches]))


@dataclass(slots=True)
class SampleOutcome:
    """What happened to one sample of a finetuning job."""

    tokens: int
    start_ns: int
    left: int  # tokens that units still have to go back over
    forward_tokens: int = 0
    recorded_tokens: int = 0  # whose forward it was spared
    last_ns: int = 0
    restarts: int = 0
    since: int = 0  # the plan from which on its launches count
    request_id: int | None = None  # that it is feedback on

    def settle(self, piece: Slice, end_ns: int) -> None:
        """A window of the sample has ended."""
        training, units = piece.job.training, piece.layers
        assert training is not None and units is not None, "a window of a finetuning job"
        self.last_ns = end_ns
        if piece.work is Work.BACKWARD:
            self.left -= piece.tokens * len(units)
        elif units.stop == training.spec.num_units:
            self.forward_tokens += piece.tokens
            used = training.adopted(piece.microbatch) if piece.record else None
            self.recorded_tokens += 0 if used is None else used.tokens


@dataclass
class RecordOutcome:
    """What happened to one record of a served prompt."""

    request_id: int
    job_id: int  # that might learn from it
    version: int  # of the adapter that its tokens ran through
    made_ns: int
    tokens: int = 0
    kept_bytes: int = 0
    end_ns: int | None = None
    status: str = "left"
    used_ns: int | None = None
    sample: int | None = None
    used_tokens: int = 0
    updates_behind: int | None = None

    def extend(self, tokens: int, nbytes: int) -> None:
        """More tokens of the prompt are recorded."""
        self.tokens += tokens
        self.kept_bytes += nbytes

    def use(self, sample: int, tokens: int, updates_behind: int, now_ns: int) -> None:
        """A sample starts behind the record, which spares it the forward of so many tokens."""
        self.sample, self.used_tokens, self.updates_behind = sample, tokens, updates_behind
        self.used_ns = now_ns

    def end(self, is_lost: bool, now_ns: int) -> None:
        """All of it is given back; `is_lost`: by a sample that gave way before it was through."""
        self.end_ns = now_ns
        self.status = "dropped" if self.used_ns is None else "lost" if is_lost else "used"

    def row(self) -> tuple[object, ...]:
        """Its row of RECORDS."""
        status = "used" if self.end_ns is None and self.used_ns is not None else self.status
        return (
            self.request_id,
            self.job_id,
            self.version,
            self.tokens,
            self.kept_bytes,
            self.made_ns,
            self.end_ns,
            status,
            self.used_ns,
            self.sample,
            self.used_tokens,
            self.updates_behind,
        )


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
    parts = [part for outcome in outcomes for part in outcome.stretches]
    bounds, of_part = array("q"), list[int]()
    for part in parts:
        closed = part.closed
        bounds.extend(closed)
        of_part.append(len(closed) // 2)
    firsts, ends = np.array(bounds, np.int64).reshape(-1, 2).T
    counts = ends - firsts
    starts, stretches = starts_of(counts), starts_of(_int64(of_part))
    own = starts[stretches[starts_of(_int64([len(o.stretches) for o in outcomes]))]]
    at = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
    devices = {id(part.device_ns): part.device_ns for part in parts}
    if len(devices) == 1:
        return own, np.frombuffer(parts[0].device_ns, np.int64)[at]
    times: Ints = np.empty(len(at), np.int64)
    chosen: Ints = np.repeat(_int64([id(part.device_ns) for part in parts]), _int64(of_part))
    chosen = np.repeat(chosen, counts)
    for number, device_ns in devices.items():
        is_here = chosen == number
        times[is_here] = np.frombuffer(device_ns, np.int64)[at[is_here]]
    return own, times


def _int64(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))
