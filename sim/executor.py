"""The virtual executor: durations from a cost model, lanes by arithmetic, one host's memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import simpy

from engine.contract.executor import Lanes, Launch, Repeater, ServedLaunches, Span
from engine.contract.plan import HOST_LANE, Collective, Compute, Copy, Lane, Op
from engine.contract.regions import Pool
from sim.cost.contract import LaunchCost


class SimExecutor(Repeater):
    """The Executor of simulations: gives each launch a span behind its lane and its waits.

    A copy is contended if the other direction of its link is busy at its start; a copy in flight
    keeps its duration. Contention for the host's memory follows that rule too, see HostMemory, and
    contention with collectives, where these pass the link of the copies.
    """

    def __init__(self, env: simpy.Environment, cost: LaunchCost) -> None:
        """An executor without launches.

        Args:
            env: the simulation's clock, in integer nanoseconds.
            cost: the durations.
        """
        self.cost = cost
        self._host_memory = HostMemory(cost.host_bandwidth_bytes_per_s)
        self._env, self._lanes = env, Lanes(env)
        self._busy_until: dict[Lane, int] = defaultdict(int)
        self._collectives: dict[int, _Runs] = defaultdict(_Runs)  # by device

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Predicted host time of a plan.

        Args:
            launches: all launches of the plan.

        Returns:
            Nanoseconds.
        """
        self._host_memory.forget(int(self._env.now))
        for runs in self._collectives.values():
            runs.forget(int(self._env.now))
        return self.cost.host_ns(launches)

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """Gives the launch its span on its lane.

        Args:
            launch: the launch, with the operations that it waits for.
            done: called at the span's end.

        Raises:
            ValueError: the cost has no price for the launch.
        """
        lane, is_copy = launch.op.lane, isinstance(launch.op, Copy)
        if isinstance(launch.op, Collective):
            start_ns = self._lanes.start_ns(lane, launch.waits)
            end_ns = start_ns + self.cost.collective_ns(launch)
            self._collectives[lane[0]].add(start_ns, end_ns, 1.0)
            self._lanes.hold(lane, Span(launch.op, start_ns, end_ns), done)
            return
        if not is_copy and lane[1] != HOST_LANE:
            self._lanes.place(launch, self.cost.compute_ns(launch), done)
            return
        start_ns = self._lanes.start_ns(lane, launch.waits)
        if is_copy:
            is_contended = self._busy_until[opposite(lane)] > start_ns
            exchanges = self._collectives[lane[0]].rate_at(start_ns) > 0
            alone_ns = self._copy_ns(launch, is_contended, exchanges)
        else:
            alone_ns = self.cost.compute_ns(launch)
        traffic = self.cost.host_traffic(launch)
        end_ns = start_ns + self._host_memory.duration_ns(lane, start_ns, alone_ns, traffic)
        self._busy_until[lane] = end_ns
        self._lanes.hold(lane, Span(launch.op, start_ns, end_ns), done)

    def _copy_ns(self, launch: Launch, is_contended: bool, exchanges: bool) -> int:
        """Duration of a copy, `exchanges` where a collective of its device is under way."""
        ns = self.cost.copy_ns(launch, is_contended)
        return round(ns / self.cost.copy_share) if exchanges else ns

    def repeat(self, launch: Launch, count: int) -> tuple[Sequence[int], int] | None:
        """Prices of a launch that is repeated.

        Args:
            launch: the first launch.
            count: number of launches.

        Returns:
            Durations in nanoseconds, and the host's nanoseconds per launch; None where the cost
            does not know them beforehand.
        """
        durations = self.cost.repeat_ns(launch, count)
        if durations is None:
            return None
        if not isinstance(durations, list):
            durations = durations.tolist()
        return durations, self.cost.host_ns((launch,))

    def peak_bytes(self, launch: Launch) -> int | None:
        """Predicted workspace.

        Args:
            launch: any launch.

        Returns:
            Bytes; None where they are unknown. Spans carry none: only the recorder asks for them.
        """
        return self.cost.peak_bytes(launch) if isinstance(launch.op, Compute) else None

    def served_peaks(self, launches: ServedLaunches) -> Any:
        """Predicted workspaces of many launches that only serve. See Executor."""
        is_own = type(self).peak_bytes is SimExecutor.peak_bytes
        return self.cost.served_peaks(launches) if is_own else None

    def end_times_ns(self, ops: Sequence[Op]) -> list[int]:
        """Ends of operations in flight, in nanoseconds of the clock."""
        return self._lanes.end_times_ns(ops)

    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies a lane for a known span; `done` is called at its end."""
        self._lanes.hold(launch.op.lane, span, done)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """A simulation holds no pages to release."""


@lru_cache(maxsize=1 << 10)
def opposite(lane: Lane) -> Lane:
    """The lane of the other direction of a link."""
    device, name = lane
    return (device, "->".join(reversed(name.split("->"))))


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
