"""The virtual executor: durations from a cost model, lanes by arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import simpy

from engine.executor import Launch, Span
from engine.lanes import Lanes
from engine.plan import Copy, Lane, Op, Pool
from sim.cost import LaunchCost


class SimExecutor:
    """Runs nothing: places each launch behind its lane and its waits for as long as it costs.

    A copy is contended when the other direction of its link is busy at its start. The copy
    already under way keeps its time.
    """

    def __init__(self, env: simpy.Environment, cost: LaunchCost) -> None:
        self.cost = cost
        self._repeat_ns = getattr(cost, "repeat_ns", None)
        self._lanes = Lanes(env)
        self._busy_until: dict[Lane, int] = defaultdict(int)

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Predicted host time of the plan."""
        return self.cost.host_ns(launches)

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """Gives the launch its span; nothing else happens."""
        if not isinstance(launch.op, Copy):
            self._lanes.place(launch, self.cost.compute_ns(launch), done)
            return
        lane, start_ns = launch.op.lane, self._lanes.start_ns(launch)
        duration_ns = self.cost.copy_ns(launch, self._busy_until[_opposite(lane)] > start_ns)
        self._busy_until[lane] = start_ns + duration_ns
        self._lanes.place(launch, duration_ns, done)

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
        return None if isinstance(launch.op, Copy) else self.cost.peak_bytes(launch)

    def ends_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end."""
        return self._lanes.ends_ns(ops)

    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Takes a lane for a span that is known already."""
        self._lanes.hold(launch, span, done)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """Nothing is held here."""


def _opposite(lane: Lane) -> Lane:
    device, name = lane
    return (device, "->".join(reversed(name.split("->"))))
