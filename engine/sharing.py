"""Pages of one pool that several jobs hold, and pages that are kept when nobody does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.pages import PagePool
from engine.plan import Compute, Copy, Op, Place, Tier
from engine.prefix import PrefixCache
from engine.returns import Owed, ReturnQueue
from engine.trial import Trial


class Sharing:
    """The ledger's part for a pool with prefix caching.

    A page that nobody holds is on its way back like any other, so its bytes count as free; whoever
    shares it takes page and bytes out of the middle of their queues.
    """

    def __init__(
        self,
        pool: PagePool,
        queue: ReturnQueue,
        cache: PrefixCache,
        tables: Mapping[Place, Sequence[int]],
        page_nbytes: int,
        device: int,
    ) -> None:
        self.cache, self._pool, self._queue, self._tables = cache, pool, queue, tables
        self._page_nbytes, self._device = page_nbytes, device
        self._owed: dict[int, Owed] = {}  # by page: its bytes on their way back
        self._passed_on: set[int] = set()  # pages that had several holders, or one after another
        self._landing: dict[Copy, Sequence[int]] = {}  # pages that copies write

    def trial(self) -> Trial:
        """A dry run over the state as it is now."""
        return Trial(self._pool, self._tables, self.cache)

    def lands(self, op: Copy, pages: Sequence[int]) -> None:
        """A copy writes these pages."""
        self._landing[op] = tuple(pages)

    def share(self, pages: Sequence[int], running: Collection[Op]) -> tuple[int, set[Op]]:
        """One more holder for pages: bytes that this takes, and who may be writing them still.

        A launch fills a page before it can be found; who reads it on another lane waits for all
        launches in flight.
        """
        idle = self._pool.share(pages)
        self._passed_on.update(pages)
        self._landing = {op: ids for op, ids in self._landing.items() if op in running}
        wanted = set(pages)
        writers: set[Op] = {op for op in running if isinstance(op, Compute) and self._touches(op)}
        writers.update(op for op, ids in self._landing.items() if not wanted.isdisjoint(ids))
        for page in idle:
            writers |= self._queue.reclaim(self._owed.pop(page), self._page_nbytes)
        return len(idle) * self._page_nbytes, writers

    def give(self, pages: Sequence[int], users: set[Op], running: Collection[Op]) -> int:
        """One holder less; returns the bytes that come back.

        Pages that were passed on may have users of whom their last holder knows nothing: they
        come back behind all that is in flight.
        """
        if not self._passed_on.isdisjoint(pages):
            users = set(filter(self._touches, running))
        back = self._pool.give(pages, users)
        self._passed_on.difference_update(back)
        nbytes = len(back) * self._page_nbytes
        if back:
            self._owed.update(dict.fromkeys(back, self._queue.give(nbytes, users)))
        return nbytes

    def _touches(self, op: Op) -> bool:
        if isinstance(op, Compute):
            return op.device == self._device
        if isinstance(op, Copy):
            return (Tier.GPU, self._device) in (op.src.pool, op.dst.pool)
        return False  # collectives move no pages
