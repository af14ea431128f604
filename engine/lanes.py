"""First-in-first-out lanes on a virtual clock, by arithmetic: no process, no resource."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import simpy

from engine.executor import Launch, Span
from engine.plan import Lane, Op


class Lanes:
    """Places each launch behind its lane and its waits; shared by every virtual-time executor."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_ns: dict[Lane, int] = defaultdict(int)
        self._end_ns: dict[Op, int] = {}

    def start_ns(self, launch: Launch) -> int:
        """When the launch can start, if it is placed now."""
        start_ns = max(int(self._env.now), self._free_ns[launch.op.lane])
        for op in launch.waits:
            start_ns = max(start_ns, self._end_ns.get(op, 0))
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
        start = self.start_ns(launch)
        self.hold(launch, Span(launch.op, start, start + duration_ns, peak_bytes, ended), done)

    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies the launch's lane until a span's end and calls `done` then."""
        op = launch.op
        self._free_ns[op.lane] = self._end_ns[op] = span.end_ns

        def settle(_: simpy.Event) -> None:
            del self._end_ns[op]  # nobody waits for what has settled
            done(span)

        self._env.timeout(span.end_ns - int(self._env.now)).callbacks.append(settle)
