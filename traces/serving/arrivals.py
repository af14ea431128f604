"""Arrival processes: times of requests as pure functions of a count and a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from traces.records import NS_PER_S
from traces.serving.recorded_times import TimesNs, in_order, read_times_ns
from traces.serving.request import Request

MAX_NS = 1 << 62  # the sum of two times is still an int64


class Arrivals(Protocol):
    """An arrival process; equal arguments give equal times."""

    def times_ns(self, n: int, seed: int = 0) -> TimesNs:
        """The first `n` arrival times in nanoseconds, never decreasing."""
        ...


@dataclass(frozen=True, kw_only=True)
class AllAtOnce:
    """All requests arrive at time 0 (vLLM's `--request-rate inf`)."""

    def times_ns(self, n: int, seed: int = 0) -> TimesNs:
        return np.zeros(_checked_count(n), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Gamma:
    """Independent gamma gaps of mean 1/rate and coefficient of variation 1/sqrt(burstiness).

    `rate` is in requests per second. `rescale` stretches the times so that the last of n arrivals
    is at exactly n/rate, as vLLM's serving benchmark does. The mean rate of all runs is then equal,
    and the gaps are no longer independent; the plain process is the default.
    """

    rate: float = 1.0
    burstiness: float = 1.0
    rescale: bool = False

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)
        _check_positive("burstiness", self.burstiness)

    def times_ns(self, n: int, seed: int = 0) -> TimesNs:
        rng = np.random.default_rng(seed)
        scale_s = 1.0 / (self.rate * self.burstiness)
        times_s = np.cumsum(rng.gamma(self.burstiness, scale_s, _checked_count(n)))
        # all gaps may underflow to 0 at a tiny burstiness; such times cannot be stretched
        if self.rescale and n > 0 and times_s[-1] > 0:
            times_s *= n / self.rate / times_s[-1]
        return _rounded_ns(times_s)


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Independent exponential gaps of mean 1/rate: gamma with burstiness 1."""

    rate: float = 1.0
    rescale: bool = False

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    def times_ns(self, n: int, seed: int = 0) -> TimesNs:
        return Gamma(rate=self.rate, rescale=self.rescale).times_ns(n, seed)


@dataclass(frozen=True, kw_only=True)
class RecordedArrivals:
    """The first n recorded arrivals from time 0 on, at their own or another rate.

    The source is a `path` (layouts: traces/serving/recorded_times.py) or `times_s` in seconds. Mode
    "stretch" scales time so that the n - 1 gaps have mean 1/rate: burstiness stays, durations
    change. Mode "thin" keeps each recorded arrival with probability rate / recorded rate, drawn by
    seed: the clock stays, and the rate cannot rise.
    """

    path: str | None = None
    times_s: tuple[float, ...] = ()
    rate: float | None = None
    mode: str = "stretch"

    def __post_init__(self) -> None:
        if (self.path is None) == (len(self.times_s) == 0):
            raise ValueError("recorded arrivals: give either path or times_s")
        if not all(math.isfinite(time_s) for time_s in self.times_s):
            raise ValueError("recorded arrivals: times_s holds a number that is not finite")
        if self.mode not in ("stretch", "thin"):
            raise ValueError(f"recorded arrivals: mode is {self.mode!r}; use 'stretch' or 'thin'")
        if self.rate is not None:
            _check_positive("rate", self.rate)

    def times_ns(self, n: int, seed: int = 0) -> TimesNs:
        _checked_count(n)
        times = self._recorded_ns()
        if self.rate is not None and self.mode == "thin" and len(times) > 1:
            times = _thinned(times, self.rate, seed)
        if len(times) < n:
            left = "left after thinning" if self.mode == "thin" else "recorded"
            raise ValueError(f"{n} arrivals asked for, {len(times)} {left}; take fewer requests")
        times = times[:n] - times[:1]
        if self.rate is not None and self.mode == "stretch":
            times = stretched(times, self.rate)
        return times

    def _recorded_ns(self) -> TimesNs:
        if self.path is not None:
            return read_times_ns(self.path)
        times = _rounded_ns(np.asarray(self.times_s, dtype=np.float64))
        return in_order("times_s", times)


def num_arrivals(requests: Sequence[Request]) -> int:
    """The number of times that `assign` needs: one per independent request, one per session."""
    return sum(request.turn == 0 for request in requests)


def assign(requests: Sequence[Request], times_ns: Sequence[int] | TimesNs) -> list[Request]:
    """The requests with arrival times, given out in order to independent requests and turns 0.

    A later turn of a session takes the time of turn 0 as its lower bound; the answer before it and
    its think time release it.
    """
    if len(times_ns) != num_arrivals(requests):
        raise ValueError(f"{len(times_ns)} times for {num_arrivals(requests)} arrivals")
    times = iter(times_ns)
    session_ns: dict[int | None, int] = {}
    assigned = []
    for request in requests:
        if request.turn == 0:
            arrival_ns = session_ns[request.session] = int(next(times))
        elif request.session in session_ns:
            arrival_ns = session_ns[request.session]
        else:
            raise ValueError(f"request {request.request_id}: its session has no turn 0 before it")
        assigned.append(request.arriving(arrival_ns))
    return assigned


def _thinned(times: TimesNs, rate: float, seed: int) -> TimesNs:
    span_s = float(times[-1] - times[0]) / NS_PER_S
    share = rate * span_s / max(len(times) - 1, 1)
    if share > 1:
        recorded = (len(times) - 1) / span_s
        raise ValueError(
            f"thinning cannot raise the recorded {recorded:.3g} requests/s to {rate:g}; "
            "use mode=stretch"
        )
    kept: TimesNs = times[np.random.default_rng(seed).random(len(times)) < share]
    return kept


def stretched(times: TimesNs, rate: float) -> TimesNs:
    """Times from 0, scaled so that their n - 1 gaps have mean 1/rate.

    Raises:
        ValueError: all times are 0, so that there is no gap to scale.
    """
    if len(times) < 2:
        return times
    if times[-1] == 0:
        raise ValueError(
            f"rate={rate}: all {len(times)} arrivals are at one time, so there is no rate to "
            "stretch; draw times instead: arrival.rate=... without trace.rate"
        )
    span_ns = (len(times) - 1) / rate * NS_PER_S
    return _rounded(times * (span_ns / float(times[-1])))


def _rounded_ns(times_s: npt.NDArray[np.float64]) -> TimesNs:
    return _rounded(times_s * NS_PER_S)


def _rounded(times_ns: npt.NDArray[np.floating[Any]]) -> TimesNs:
    if not times_ns.max(initial=0) < MAX_NS:
        raise ValueError("arrivals reach beyond 146 years (2^62 ns): raise the rate")
    rounded: TimesNs = np.rint(times_ns).astype(np.int64)
    return rounded


def _checked_count(n: int) -> int:
    if n < 0:
        raise ValueError(f"{n} arrivals asked for; the count must be at least 0")
    return n


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"arrival.{name}={value}: it must be a positive number")
