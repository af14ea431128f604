"""What a repeated plan takes beside its cycle, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from operator import itemgetter

from engine.plan import Grow, Place, Plan

Due = tuple[int, Grow]  # with its step
FAR = 1 << 62
_step = itemgetter(0)


def hand_out(
    ids: Sequence[int], grows: Iterable[Grow], tables: Mapping[Place, list[int]], page_nbytes: int
) -> None:
    """Pages go to the tables of whoever grows, in order."""
    ops, left = [*grows], iter(ids)
    if len(ops) == len(ids):  # one each, as decodes take them: a step in C
        deque(map(list.append, map(tables.__getitem__, map(itemgetter(0), ops)), ids), maxlen=0)
        return
    for place, nbytes, _, _ in ops:
        tables[place].extend(islice(left, nbytes // page_nbytes))
    assert next(left, None) is None, "something grows by no whole pages"


class Growth:
    """All that is still to grow: by step, within a step in the plan's order. Never changed."""

    def __init__(self, queue: list[tuple[int, int, Grow]]) -> None:
        self._queue = queue  # a heap: each operation with its next step and where it is in the plan
        self._told: tuple[int, list[Due], Growth] | None = None  # the last answer of `before`

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

    def without(self, owners: Collection[int]) -> Growth:
        """The same for all others."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        return Growth(queue)
