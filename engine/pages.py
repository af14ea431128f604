"""The page pool: which KV pages of a pool are whose. The same ids in every backend."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.plan import Op


@dataclass(slots=True, eq=False)
class Returned:
    """Pages that nobody holds, and the operations that still use them."""

    ids: list[int]
    users: set[Op]


class PagePool:
    """Page ids with reference counts, handed out oldest first.

    Ids come back in issue order, beside the bytes of the ReturnQueue: an id taken again never has
    to wait longer than the bytes it stands for.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._held: set[int] = set()
        self._more: Counter[int] = Counter()  # holders of a shared page beside the first
        self._returned: deque[Returned] = deque()
        self._waiting: dict[Op, list[Returned]] = defaultdict(list)
        self._idle: list[Returned] = []
        self._next = 0  # ids from here on were never handed out

    @property
    def held_pages(self) -> int:
        """Pages with at least one holder; a shared page counts once."""
        return len(self._held)

    def take(self, count: int) -> tuple[list[int], set[Op]]:
        """Hands out pages, and the operations that must end before they are written."""
        fresh = min(count, self.num_pages - self._next)
        ids = list(range(self._next, self._next + fresh))
        self._next += fresh
        givers: set[Op] = set()
        while len(ids) < count:
            assert self._returned, f"{count} pages asked for, but the pool has no more"
            oldest, want = self._returned[0], count - len(ids)
            ids += oldest.ids[:want]
            del oldest.ids[:want]
            givers |= oldest.users
            if not oldest.ids:
                self._returned.popleft()
        self._held.update(ids)
        return ids, givers

    def share(self, ids: Iterable[int]) -> None:
        """One more holder for pages that are held already."""
        for page in ids:
            assert page in self._held, f"page {page} is held by nobody"
            self._more[page] += 1

    def give(self, ids: Iterable[int], users: Iterable[Op]) -> list[int]:
        """One holder less; returns the pages that nobody holds now."""
        back = list(ids)
        assert self._held.issuperset(back), "a page is held by nobody"
        if self._more:
            shared = [page for page in back if self._more[page]]
            self._more -= Counter(shared)  # drops those that have one holder again
            back = [page for page in back if page not in set(shared)]
        self._held.difference_update(back)
        if back:
            self._return(Returned(back.copy(), set(users)))
        return back

    def settle(self, op: Op) -> None:
        """An operation has ended: nobody has to wait for it any more."""
        for returned in self._waiting.pop(op, ()):
            returned.users.discard(op)
            if not returned.users:
                self._idle.append(returned)

    def drain_idle(self) -> list[int]:
        """Pages that have fallen out of all use since the last call and were not taken again."""
        ids = [page for returned in self._idle for page in returned.ids]
        self._idle.clear()
        return ids

    def _return(self, returned: Returned) -> None:
        self._returned.append(returned)
        for op in returned.users:
            self._waiting[op].append(returned)
        if not returned.users:
            self._idle.append(returned)
