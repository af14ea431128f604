"""The virtual executor: durations from a cost model, lanes by arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

import simpy

from engine.contract.executor import Lanes, Launch, Span
from engine.contract.plan import HOST_LANE, Collective, Compute, Copy, Lane, Op
from engine.contract.regions import Pool
from sim.cost.contract import LaunchCost
from sim.devices.host_memory import HostMemory


class SimExecutor:
    """Runs nothing: places each launch behind its lane and its waits for as long as it costs.

    A copy is contended when the other direction of its link is busy at its start. The copy
    already under way keeps its time. So it is with the memory of the host, see HostMemory.
    """

    def __init__(self, env: simpy.Environment, cost: LaunchCost) -> None:
        self.cost = cost
        self._repeat_ns = getattr(cost, "repeat_ns", None)
        self._host_memory = HostMemory(getattr(cost, "host_bandwidth_bytes_per_s", None))
        self._traffic = getattr(cost, "host_traffic", lambda launch: 0)
        self._env, self._lanes = env, Lanes(env)
        self._busy_until: dict[Lane, int] = defaultdict(int)

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Predicted host time of the plan."""
        self._host_memory.forget(int(self._env.now))
        return self.cost.host_ns(launches)

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """Gives the launch its span; nothing else happens."""
        lane, is_copy = launch.op.lane, isinstance(launch.op, Copy)
        if isinstance(launch.op, Collective):
            self._lanes.place(launch, self.cost.collective_ns(launch), done)
            return
        if not is_copy and lane[1] != HOST_LANE:
            self._lanes.place(launch, self.cost.compute_ns(launch), done)
            return
        start_ns = self._lanes.start_ns(lane, launch.waits)
        if is_copy:
            is_contended = self._busy_until[_opposite(lane)] > start_ns
            alone_ns = self.cost.copy_ns(launch, is_contended)
        else:
            alone_ns = self.cost.compute_ns(launch)
        traffic = self._traffic(launch)
        end_ns = start_ns + self._host_memory.duration_ns(lane, start_ns, alone_ns, traffic)
        self._busy_until[lane] = end_ns
        self._lanes.hold(lane, Span(launch.op, start_ns, end_ns), done)

    def repeat(self, launch: Launch, count: int) -> tuple[Sequence[int], int] | None:
        """Durations (ns) of a launch that is repeated, and the host's time of each.

        None where the cost does not say them beforehand: noise may not be drawn twice.
        """
        if self._repeat_ns is None:
            return None
        durations = self._repeat_ns(launch, count)
        if not isinstance(durations, list):
            durations = durations.tolist()
        return durations, self.cost.host_ns((launch,))

    def peak_bytes(self, launch: Launch) -> int | None:
        """Predicted workspace; spans say none, since it is wanted only where rows are written."""
        return self.cost.peak_bytes(launch) if isinstance(launch.op, Compute) else None

    def ends_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end."""
        return self._lanes.ends_ns(ops)

    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Takes a lane for a span that is known already."""
        self._lanes.hold(launch.op.lane, span, done)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """Nothing is held here."""


@lru_cache(maxsize=1 << 10)
def _opposite(lane: Lane) -> Lane:
    device, name = lane
    return (device, "->".join(reversed(name.split("->"))))
