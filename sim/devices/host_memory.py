"""The host's memory as one resource that copies of all devices and updates on the host share."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from engine.contract.plan import Lane


class HostMemory:
    """Slows launches that start while other lanes use the host's memory.

    A launch demands its bytes over its duration alone. If the demands of all running launches
    exceed the memory's rate, a starting launch is slowed by demand over rate. Its duration is fixed
    at its start; launches in flight keep theirs. Lanes that stay busy therefore move the memory's
    rate together. The first launch beside a lane that was busy alone exceeds it until that lane's
    next launch. Without a rate no launch is slowed.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        """A memory without traffic; `bytes_per_s` is its rate, None for an unlimited one."""
        self._bytes_per_ns = None if bytes_per_s is None else bytes_per_s / 1e9
        self._runs: dict[Lane, _Runs] = defaultdict(_Runs)

    def duration_ns(self, lane: Lane, start_ns: int, alone_ns: int, nbytes: int) -> int:
        """Duration of a launch, which counts as traffic until it ends.

        Args:
            lane: the launch's lane.
            start_ns: its start.
            alone_ns: its duration without other traffic.
            nbytes: bytes that it reads and writes in the host's memory.

        Returns:
            Nanoseconds, at least `alone_ns`.
        """
        if self._bytes_per_ns is None or not nbytes or not alone_ns:
            return alone_ns
        rate = nbytes / alone_ns
        demand = rate + sum([runs.rate_at(start_ns) for runs in self._runs.values()])
        took_ns = round(alone_ns * max(1.0, demand / self._bytes_per_ns))
        self._runs[lane].add(start_ns, start_ns + took_ns, rate)
        return took_ns

    def forget(self, now_ns: int) -> None:
        """Drops launches that have ended: none will start before `now_ns`."""
        for runs in self._runs.values():
            runs.forget(now_ns)


class _Runs:
    """The launches of one lane, one after another: bytes per ns from a start to an end."""

    __slots__ = ("_ends", "_rates", "_starts")

    def __init__(self) -> None:
        self._starts, self._ends = list[int](), list[int]()
        self._rates = list[float]()

    def add(self, start_ns: int, end_ns: int, rate: float) -> None:
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        self._rates.append(rate)

    def rate_at(self, moment_ns: int) -> float:
        index = bisect_right(self._starts, moment_ns) - 1
        return self._rates[index] if index >= 0 and self._ends[index] > moment_ns else 0.0

    def forget(self, now_ns: int) -> None:
        gone = bisect_right(self._ends, now_ns)
        del self._starts[:gone], self._ends[:gone], self._rates[:gone]
