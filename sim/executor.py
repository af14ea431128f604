"""The virtual executor: durations from a cost model, lanes by arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import simpy

from engine.contract.executor import Lanes, Launch, Repeater, ServedLaunches, Span
from engine.contract.plan import HOST_LANE, NET_LANE, Collective, Compute, Copy, Lane, Op
from engine.contract.regions import Pool
from sim.cost.contract import LaunchCost
from sim.devices.host_memory import HostMemory


class SimExecutor(Repeater):
    """The Executor of simulations: gives each launch a span behind its lane and its waits.

    A copy is contended if the other direction of its link is busy at its start, or a collective of
    its device where these pass the link too; a copy in flight keeps its duration. Contention for
    the host's memory follows that rule too, see HostMemory.
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

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Predicted host time of a plan.

        Args:
            launches: all launches of the plan.

        Returns:
            Nanoseconds.
        """
        self._host_memory.forget(int(self._env.now))
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
            self._busy_until[lane] = end_ns = start_ns + self.cost.collective_ns(launch)
            self._lanes.hold(lane, Span(launch.op, start_ns, end_ns), done)
            return
        if not is_copy and lane[1] != HOST_LANE:
            self._lanes.place(launch, self.cost.compute_ns(launch), done)
            return
        start_ns = self._lanes.start_ns(lane, launch.waits)
        if is_copy:
            is_contended = self._busy_until[opposite(lane)] > start_ns
            exchanges = self._busy_until[lane[0], NET_LANE] > start_ns
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
