"""The virtual executor of devices with two compute lanes, whose launches slow each other down.

What a real device makes of two launches at once depends on their kernels, and no figure of it is
measured here: the slowdown is one assumed number. FlexLLM's cells speak for one half: samples of
3,675 tokens take 651 ms under temporal sharing, with one step of serving each, and 669 ms under
spatial sharing, with two (Llama-3.1-8B, one request per second). So both lanes together took about
as long as in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

import simpy

from engine.contract.executor import Launch, Span, end_event
from engine.contract.plan import COMPUTE_LANES, NET_LANE, Collective, Copy, Lane, Op
from sim.cost.contract import LaunchCost
from sim.executor import SimExecutor, opposite

Done = Callable[[Span], None]


class _Waiting:
    """A launch that is issued and has not started."""

    __slots__ = ("behind", "done", "launch")

    def __init__(self, launch: Launch, done: Done, behind: set[Op]) -> None:
        self.launch, self.done, self.behind = launch, done, behind


class _Running:
    """A launch in progress: the time that it would still take alone, since a moment, at a rate."""

    __slots__ = ("done", "left_ns", "op", "rate", "since_ns", "start_ns", "turn")

    def __init__(self, op: Op, done: Done, start_ns: int, left_ns: float) -> None:
        self.op, self.done, self.start_ns, self.left_ns = op, done, start_ns, left_ns
        self.since_ns, self.rate, self.turn = start_ns, 1.0, 0

    def goes_on(self, now_ns: int, rate: float) -> int:
        """Goes on at another rate from now on; returns the time up to its end."""
        self.left_ns = max(0.0, self.left_ns - (now_ns - self.since_ns) * self.rate)
        self.since_ns, self.rate, self.turn = now_ns, rate, self.turn + 1
        return ceil(self.left_ns / rate)


class TwoLaneExecutor(SimExecutor):
    """A simulation in which a launch starts when its lane is free and its waits have ended.

    While both compute lanes of a device are busy, each launch goes on at `lane_share` of the rate
    that it has alone: at 0.5 two launches take as long together as one after the other. Copies are
    timed as by SimExecutor. Ends are known only when they come, so no steps are issued at once.

    Args:
        env: the simulation's clock, in integer nanoseconds.
        cost: the durations of launches alone.
        lane_share: of a device's rate, while the other lane is busy; above 0, at most 1.

    Raises:
        ValueError: `lane_share` is not in (0, 1].
    """

    def __init__(self, env: simpy.Environment, cost: LaunchCost, lane_share: float = 0.5) -> None:
        super().__init__(env, cost)
        if not 0 < lane_share <= 1:
            raise ValueError(f"lane_share={lane_share}: it must be above 0, and at most 1")
        self._share = lane_share
        self._queues: dict[Lane, deque[_Waiting]] = {}  # in the order of their first launches
        self._running: dict[Lane, _Running] = {}
        self._open: set[Op] = set()  # issued and not ended

    def run(self, launch: Launch, done: Done) -> None:
        """Queues a launch on its lane. See SimExecutor."""
        behind = {op for op in launch.waits if op in self._open}
        self._open.add(launch.op)
        lane = launch.op.lane
        self._queues.setdefault(lane, deque()).append(_Waiting(launch, done, behind))
        self._advance(lane)

    def repeat(self, launch: Launch, count: int) -> tuple[Sequence[int], int] | None:
        """None: durations depend on the other lane. See Repeater."""
        return None

    def end_times_ns(self, ops: Sequence[Op]) -> list[int]:
        """Now for each: their ends are not known. Only steps issued at once need them."""
        return [int(self._env.now)] * len(ops)

    def _advance(self, lane: Lane) -> None:
        """Starts the next launch of a lane, if it may start."""
        queue = self._queues[lane]
        if lane in self._running or not queue or queue[0].behind:
            return
        first, now_ns = queue.popleft(), int(self._env.now)
        alone_ns = self._alone_ns(first.launch, now_ns)
        self._running[lane] = _Running(first.launch.op, first.done, now_ns, alone_ns)
        self._retime(lane)

    def _alone_ns(self, launch: Launch, now_ns: int) -> int:
        """The duration of a launch that starts now, but for what the other compute lane takes."""
        op, lane = launch.op, launch.op.lane
        if isinstance(op, Collective):
            return self.cost.collective_ns(launch)
        if isinstance(op, Copy):
            exchanges = (lane[0], NET_LANE) in self._running
            alone_ns = self._copy_ns(launch, opposite(lane) in self._running, exchanges)
        else:
            alone_ns = self.cost.compute_ns(launch)
        if lane[1] in COMPUTE_LANES:
            return alone_ns
        traffic = self.cost.host_traffic(launch)
        return self._host_memory.duration_ns(lane, now_ns, alone_ns, traffic)

    def _retime(self, changed: Lane) -> None:
        """A lane has become busy or free: launches of its device may go on at another rate."""
        device, name = changed
        if name not in COMPUTE_LANES:
            if changed in self._running:
                self._end_behind(changed, self._running[changed], 1.0)
            return
        lanes = [(device, other) for other in COMPUTE_LANES]
        busy = [lane for lane in lanes if lane in self._running]
        for lane in busy:
            self._end_behind(lane, self._running[lane], self._share if len(busy) > 1 else 1.0)

    def _end_behind(self, lane: Lane, running: _Running, rate: float) -> None:
        """Has a launch end when it is through at a rate, unless that changes before."""
        delay_ns = running.goes_on(int(self._env.now), rate)
        turn = running.turn

        def end(_: simpy.Event) -> None:
            if running.turn == turn:
                self._end(lane, running)

        end_event(self._env, delay_ns).callbacks.append(end)

    def _end(self, lane: Lane, running: _Running) -> None:
        op = running.op
        running.turn = -1
        del self._running[lane]
        self._open.discard(op)
        self._retime(lane)
        for queue in self._queues.values():
            for waiting in queue:
                waiting.behind.discard(op)
        for other in self._queues:
            self._advance(other)
        running.done(Span(op, running.start_ns, int(self._env.now)))
