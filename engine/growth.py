"""What a repeated plan takes beside its cycle, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from engine.plan import Grow, PageSize, Place, Plan

Due = tuple[int, Grow]  # with its step
FAR = 1 << 62
_step = itemgetter(0)


class Growth:
    """All that is still to grow: by step, within a step in the plan's order. Never changed."""

    def __init__(self, queue: list[tuple[int, int, Grow]]) -> None:
        self._queue = queue  # a heap: each operation with its next step and where it is in the plan
        self.first = queue[0][0] if queue else FAR  # the next step at which something grows
        self._told: tuple[int, list[Due], Growth] | None = None  # the last answer of `before`

    @classmethod
    def of(cls, plan: Plan) -> Growth:
        """All that a repeated plan takes."""
        queue = [(op.first, i, op) for i, op in enumerate(plan.ops) if isinstance(op, Grow)]
        heapify(queue)
        return cls(queue)

    def before(self, step: int) -> tuple[list[Due], Growth]:
        """What grows before that step, and what is left then."""
        if self._told is not None and self._told[0] == step:
            return self._told[1:]
        queue = self._queue.copy()
        due: list[Due] = []
        while queue and queue[0][0] < step:
            at, i, op = queue[0]
            due.append((at, op))
            if op.every:
                heapreplace(queue, (at + op.every, i, op))
            else:
                heappop(queue)
        due.sort(key=_step)
        self._told = (step, due, Growth(queue))
        return self._told[1:]

    def is_in_turn(self, steps: Mapping[Place, int], page: PageSize) -> bool:
        """Whether just these places grow, next at these steps, by a page whenever it is full."""
        a_page = (page.nbytes, page.tokens)
        found = {op.place: at for at, _, op in self._queue if (op.nbytes, op.every) == a_page}
        return len(self._queue) == len(steps) and found == steps

    def without(self, owners: Collection[int]) -> Growth:
        """The same for all others."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        return Growth(queue)
