"""What a repeated plan takes beside its cycle, step by step."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from engine.plan import Grow, Plan

Due = tuple[int, Grow]  # with its step
FAR = 1 << 62
_step = itemgetter(0)


class Growth:
    """All that is still to grow: by step, within a step in the plan's order. Never changed."""

    def __init__(self, queue: list[tuple[int, int, Grow]]) -> None:
        self._queue = queue  # a heap: each operation with its next step and where it is in the plan

    @property
    def first(self) -> int:
        """The next step at which something grows; far away where nothing does."""
        return self._queue[0][0] if self._queue else FAR

    @classmethod
    def of(cls, plan: Plan) -> Growth:
        """All that a repeated plan takes."""
        queue = [(op.first, i, op) for i, op in enumerate(plan.ops) if isinstance(op, Grow)]
        heapify(queue)
        return cls(queue)

    def before(self, step: int) -> tuple[list[Due], Growth]:
        """What grows before that step, and what is left then."""
        queue, due = self._queue.copy(), list[Due]()
        while queue and queue[0][0] < step:
            at, i, op = queue[0]
            due.append((at, op))
            if op.every:
                heapreplace(queue, (at + op.every, i, op))
            else:
                heappop(queue)
        due.sort(key=_step)
        return due, Growth(queue)

    def without(self, owners: Collection[int]) -> Growth:
        """The same for all others."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        return Growth(queue)
