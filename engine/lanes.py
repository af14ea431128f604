"""First-in-first-out lanes on a virtual clock, by arithmetic: no process, no resource."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import simpy

from engine.executor import Launch, Span
from engine.plan import Lane, Op


class Lanes:
    """Places each launch behind its lane and its waits; shared by every virtual-time executor."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_ns: dict[Lane, int] = defaultdict(int)
        self._end_ns: dict[Op, int] = {}

    def start_ns(self, lane: Lane, waits: Iterable[Op]) -> int:
        """When a launch on a lane can start, if it is placed now."""
        start_ns, ends_ns = max(int(self._env.now), self._free_ns[lane]), self._end_ns
        for op in waits:
            end_ns = ends_ns.get(op, 0)
            if end_ns > start_ns:
                start_ns = end_ns
        return start_ns

    def ends_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end."""
        return [self._end_ns[op] for op in ops]

    def place(
        self,
        launch: Launch,
        duration_ns: int,
        done: Callable[[Span], None],
        peak_bytes: int | None = None,
        ended: tuple[int, ...] = (),
    ) -> None:
        """Gives the launch its span and calls `done` at its end."""
        op = launch.op
        lane = op.lane
        start = self.start_ns(lane, launch.waits)
        self.hold(lane, Span(op, start, start + duration_ns, peak_bytes, ended), done)

    def hold(self, lane: Lane, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies a lane until a span's end and calls `done` then."""
        op = span.op
        self._free_ns[lane] = self._end_ns[op] = span.end_ns

        def settle(_: simpy.Event) -> None:
            del self._end_ns[op]  # nobody waits for what has settled
            done(span)

        self._env.timeout(span.end_ns - int(self._env.now)).callbacks.append(settle)
