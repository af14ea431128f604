"""The host's memory as one resource: copies of all devices and updates on the host share it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from engine.contract.plan import Lane


class HostMemory:
    """Slows what starts while others use the host's memory, as copies on a link are contended.

    Each wants bytes per ns: those that it moves over the time that it takes alone. Where all that
    run want more than there is, the one that starts gets the same part of what it wants as the sum
    does of all. It is decided once, at its start: those under way keep their time. So lanes that
    are busy for long move together what there is, and not more; where the first launch beside a
    lane that was busy alone begins, more is given out until that lane's next. Without a rate nobody
    is slowed.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_ns = None if bytes_per_s is None else bytes_per_s / 1e9
        self._runs: dict[Lane, _Runs] = defaultdict(_Runs)

    def duration_ns(self, lane: Lane, start_ns: int, alone_ns: int, nbytes: int) -> int:
        """How long a launch on a lane takes that moves so many bytes; it is counted from now on."""
        if self._bytes_per_ns is None or not nbytes or not alone_ns:
            return alone_ns
        rate = nbytes / alone_ns
        wanted = rate + sum([runs.rate_at(start_ns) for runs in self._runs.values()])
        took_ns = round(alone_ns * max(1.0, wanted / self._bytes_per_ns))
        self._runs[lane].add(start_ns, start_ns + took_ns, rate)
        return took_ns

    def forget(self, now_ns: int) -> None:
        """Nothing starts before this moment: what has ended by then is of no interest."""
        for runs in self._runs.values():
            runs.forget(now_ns)


class _Runs:
    """What runs on one lane, one after the other: bytes per ns that are wanted from a start to an
    end."""

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
