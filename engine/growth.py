"""What a repeated plan takes, step by step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from engine.plan import Grow, GrowCycle, PageSize, Plan

Due = tuple[int, Grow]  # with its step
Turns = tuple[tuple[Grow, ...], ...]  # what grows in turn, step by step
_step = itemgetter(0)


class Growth:
    """All that is still to grow: by step, within a step in the plan's order. Never changed."""

    def __init__(self, turns: Turns, queue: list[tuple[int, int, Grow]], at: int = 0) -> None:
        self._turns = turns  # of the plan's cycle; empty: it has none
        self._queue = queue  # a heap: each operation with its next step and where it is in the plan
        self._at = at  # the next step

    @classmethod
    def of(cls, plan: Plan) -> Growth:
        """All that a repeated plan takes."""
        turns, ops = Turns(), plan.ops
        if ops and isinstance(ops[0], GrowCycle):
            turns, ops = ops[0].by_step, ops[1:]
        queue = [(op.first, i, op) for i, op in enumerate(ops) if isinstance(op, Grow)]
        heapify(queue)
        return cls(turns, queue)

    def before(self, step: int) -> tuple[list[Due], Growth]:
        """What grows before that step, and what is left then."""
        turns, queue = self._turns, self._queue
        n, steps = len(turns), range(self._at, step) if turns else ()
        due = [(at, op) for at in steps for op in turns[at % n]]
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
        return due, Growth(turns, queue, max(step, self._at))

    def next_ops(self) -> Sequence[Grow]:
        """What grows at the next step."""
        turns, queue = self._turns, self._queue
        if queue and queue[0][0] <= self._at:
            return [op for _, op in self.before(self._at + 1)[0]]
        return turns[self._at % len(turns)] if turns else ()

    def without(self, owners: Collection[int]) -> Growth:
        """The same for all others."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        turns = list(self._turns)
        for i, ops in enumerate(turns):
            for op in ops:
                if op.place.region.owner in owners:
                    turns[i] = tuple([op for op in ops if op.place.region.owner not in owners])
                    break
        return Growth(tuple(turns), queue, self._at)

    def as_cycle(self, page: PageSize, prompt: int | None) -> GrowCycle | None:
        """From the next step on, but for the owner who is in its prompt; None if it is no cycle."""
        now = self._at % page.tokens
        turns = [*self._turns[now:], *self._turns[:now]] or [()] * page.tokens
        for at, _, op in sorted(self._queue):
            owner, turn = op.place.region.owner, at - self._at
            if owner == prompt:
                continue
            if (op.every, op.nbytes) != page or turn >= page.tokens:
                return None
            turns[turn] += (op,)
        return GrowCycle(tuple(turns))
