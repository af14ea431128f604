"""What a repeated plan takes, step by step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from engine.plan import Grow, GrowCycle, PageSize, Plan

Due = tuple[int, Grow]  # with its step
_step = itemgetter(0)


class Growth:
    """All that is still to grow: by step, within a step in the plan's order. Never changed."""

    def __init__(
        self,
        cycle: GrowCycle | None,
        queue: list[tuple[int, int, Grow]],
        at: int = 0,
        gone: frozenset[int] = frozenset(),
    ) -> None:
        self._cycle = cycle
        self._queue = queue  # a heap: each operation with its next step and where it is in the plan
        self._at = at  # the next step
        self._gone = gone  # owners who have left the cycle

    @classmethod
    def of(cls, plan: Plan) -> Growth:
        """All that a repeated plan takes."""
        cycle = plan.ops[0] if plan.ops and isinstance(plan.ops[0], GrowCycle) else None
        ops = plan.ops[0 if cycle is None else 1 :]
        queue = [(op.first, i, op) for i, op in enumerate(ops) if isinstance(op, Grow)]
        heapify(queue)
        return cls(cycle, queue)

    def before(self, step: int) -> tuple[list[Due], Growth]:
        """What grows before that step, and what is left then."""
        due, queue = self._in_turn(step), self._queue
        if queue and queue[0][0] < step:
            queue = queue.copy()
            while queue and queue[0][0] < step:
                at, i, op = queue[0]
                due.append((at, op))
                if op.every:
                    heapreplace(queue, (at + op.every, i, op))
                else:
                    heappop(queue)
            due.sort(key=_step)  # stable: within a step the cycle comes first
        return due, Growth(self._cycle, queue, max(step, self._at), self._gone)

    def next_ops(self) -> Sequence[Grow]:
        """What grows at the next step."""
        queue, cycle = self._queue, self._cycle
        if self._gone or (queue and queue[0][0] <= self._at):
            return [op for _, op in self.before(self._at + 1)[0]]
        return () if cycle is None else cycle.by_step[self._at % len(cycle.by_step)]

    def _in_turn(self, step: int) -> list[Due]:
        """What the cycle grows before that step."""
        cycle, gone = self._cycle, self._gone
        if cycle is None:
            return []
        by_step, n = cycle.by_step, len(cycle.by_step)
        due = [(at, op) for at in range(self._at, step) for op in by_step[at % n]]
        return [d for d in due if d[1].place.region.owner not in gone] if gone else due

    def without(self, owners: Collection[int]) -> Growth:
        """The same for all others."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        return Growth(self._cycle, queue, self._at, self._gone.union(owners))

    def as_cycle(self, page: PageSize, prompt: int | None) -> GrowCycle | None:
        """From the next step on, but for the owner who is in its prompt; None if it is no cycle."""
        turns = self._turns(page)
        for at, _, op in sorted(self._queue):
            owner, turn = op.place.region.owner, at - self._at
            if owner == prompt:
                continue
            if (op.every, op.nbytes) != page or turn >= page.tokens:
                return None
            turns[turn] += (op,)
        return GrowCycle(tuple(turns))

    def _turns(self, page: PageSize) -> list[tuple[Grow, ...]]:
        """What grows at each of the next steps, as many as a page has tokens, by the cycle."""
        if self._cycle is None:
            return [()] * page.tokens
        by_step, gone = self._cycle.by_step, self._gone
        now = self._at % page.tokens
        turns = [*by_step[now:], *by_step[:now]]
        if not gone:
            return turns
        return [tuple([op for op in ops if op.place.region.owner not in gone]) for ops in turns]
