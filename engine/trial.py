"""The dry run of a plan on the pages of a pool: who would hold them, which would be taken."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import filterfalse, islice

from engine.contract import ContractError, Rule
from engine.job import Job
from engine.pages import PagePool
from engine.plan import Place
from engine.prefix import PrefixCache

UNKNOWN = -1  # a page that this plan takes: it holds nothing that could be found


class Trial:
    """Changes nothing. Pages are taken oldest first, so what a plan takes may be what a job of
    the same plan would have started on: ask in the order of the plan.
    """

    def __init__(
        self, pool: PagePool, tables: Mapping[Place, Sequence[int]], cache: PrefixCache
    ) -> None:
        self._pool, self._tables, self._cache = pool, tables, cache
        self._holders: dict[int, int] = {}  # where the plan has changed them
        self._shared: dict[Place, Sequence[int]] = {}
        self._grown: dict[Place, int] = defaultdict(int)
        self._freed: set[Place] = set()
        self._oldest: Iterator[int] | None = None
        self._tail: deque[int] = deque()  # freed by the plan
        self._due = 0  # pages taken that are not in `gone` yet
        self._gone: set[int] = set()

    def found(self, job: Job) -> tuple[int, ...]:
        """Pages that a job would start on now."""
        self._walk()
        return tuple(self._cache.find(job, self._gone))

    def idle(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody holds: to share them takes room."""
        if self._holders.keys().isdisjoint(pages):
            return self._pool.num_idle(pages)
        return self._holders_of(pages).count(0)

    def take(self, place: Place, count: int) -> None:
        """A place grows by so many pages."""
        self._due += count
        self._grown[place] += count

    def share(self, place: Place, pages: Sequence[int]) -> None:
        """A place begins with pages that are there."""
        self._walk()
        if not self._gone.isdisjoint(pages):
            raise ContractError(Rule.SHARE, "a page is shared that the plan has taken")
        for page in set(pages).intersection(self._tail):
            self._tail.remove(page)
        more = [holders + 1 for holders in self._holders_of(pages)]
        self._holders.update(zip(pages, more, strict=True))
        self._shared[place] = pages

    def free(self, place: Place) -> int:
        """A place is given back, its last page first; returns how many pages nobody holds now."""
        fresh = self._grown.pop(place, 0)
        self._tail.extend([UNKNOWN] * fresh)
        had = () if place in self._freed else self._tables.get(place, ())
        pages = self._shared.pop(place, had)
        self._freed.add(place)
        last_first = pages[::-1]
        left = [holders - 1 for holders in self._holders_of(last_first)]
        self._holders.update(zip(last_first, left, strict=True))
        back = [page for page, holders in zip(last_first, left, strict=True) if not holders]
        self._tail.extend(back)
        return fresh + len(back)

    def _holders_of(self, pages: Sequence[int]) -> list[int]:
        found = self._pool.holders(pages)
        if self._holders.keys().isdisjoint(pages):
            return found
        changed = self._holders.get
        return [changed(page, holders) for page, holders in zip(pages, found, strict=True)]

    def _walk(self) -> None:
        """Finds out which pages are gone."""
        if self._oldest is None:
            self._oldest = filterfalse(self._holders.__contains__, self._pool.oldest())
        taken = [*islice(self._oldest, self._due)]
        while self._tail and len(taken) < self._due:  # if not, such a plan will not be booked
            taken.append(self._tail.popleft())
        self._gone.update(taken)
        self._due -= len(taken)
