"""Books plans in issue order, whole or not at all; the scoreboard says what operations wait for."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.plan import Collective, Compute, Copy, Free, Grow, Op, Plan, Share
from engine.contract.plan_check import Books
from engine.contract.regions import SHARED_OWNER, Kind, PageSize, Place, Pool, Tier
from engine.contract.rules import BrokenLaw
from engine.memory.dry_run import DryRun
from engine.memory.pool import (
    Chain,
    FreeQueue,
    Holdings,
    Owed,
    PageDryRun,
    PagePool,
    PrefixCache,
)
from engine.memory.scoreboard import Journal, Scoreboard
from engine.results.schema import Figures

NO_STATES = (
    Kind.KV,
    Kind.ACTIVATION,
    Kind.BUFFER,
    Kind.ADAPTER,
)  # memory that no training policy may move


class Beside(NamedTuple):
    """What a device held beside model states when a launch was issued; of that, KV."""

    other_bytes: int = 0
    kv_bytes: int = 0


NOTHING = Beside()


class Booking(NamedTuple):
    """What booking an operation derived.

    `copied`: the bytes and both page tables of a Copy, or the bytes of a Collective. `beside`: what
    its device held beside model states, of a launch that trains.
    """

    waits: tuple[Op, ...]
    copied: tuple[int, Sequence[int], Sequence[int]] = (0, (), ())
    beside: Beside = NOTHING


class Sharing:
    """The ledger's part for a pool with prefix caching.

    The bytes of a page without a holder count as free or coming, like those of any other page.
    Sharing such a page takes the page and its bytes out of the middle of their queues. Where other
    bytes than pages take so much room that not all pages have some, the oldest are lent for them:
    what they kept is forgotten, so that a device never holds more than its capacity.
    """

    def __init__(
        self,
        pool: PagePool,
        queue: FreeQueue,
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
        self.lend()  # for what is on the device from the start

    def dry_run(self) -> PageDryRun:
        """A dry run over the state as it is now."""
        return PageDryRun(self._pool, self._tables, self.cache, self._page_nbytes)

    @property
    def lent(self) -> int:
        """Pages without a holder whose bytes are taken for something else."""
        pool = self._pool
        unheld = pool.num_pages - pool.held_pages
        return max(0, unheld - self._queue.room_bytes // self._page_nbytes)

    def lend(self, users: Collection[Op] = ()) -> set[Op]:
        """Other bytes were taken, or come back from `users`; returns what pages wait for."""
        more = self.lent - self._pool.lent_pages
        if more > 0:
            return self._pool.lend(more)
        self._pool.take_back(-more, users)
        return set()

    def lands(self, op: Copy, pages: Sequence[int]) -> None:
        """A copy writes these pages."""
        self._landing[op] = tuple(pages)

    def share(self, pages: Sequence[int], running: Collection[Op]) -> tuple[int, set[Op]]:
        """Adds a holder to pages; returns the bytes this takes, and operations to wait for.

        A page can be found as soon as the launch that fills it is issued. A reader on another lane
        therefore waits for all launches in flight.
        """
        idle = self._pool.share(pages)
        self._passed_on.update(pages)
        self._landing = {op: ids for op, ids in self._landing.items() if op in running}
        shared = set(pages)
        writers: set[Op] = {op for op in running if isinstance(op, Compute) and self._touches(op)}
        writers.update(op for op, ids in self._landing.items() if not shared.isdisjoint(ids))
        for page in idle:
            writers |= self._queue.reclaim(self._owed.pop(page), self._page_nbytes)
        return len(idle) * self._page_nbytes, writers

    def give(self, pages: Sequence[int], users: set[Op], running: Collection[Op]) -> int:
        """Removes a holder from pages; returns the bytes that come back.

        Pages that were shared may be used by operations of earlier holders, too: they come back
        behind all operations in flight on the device.
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
        if isinstance(op, Copy):
            return (Tier.GPU, self._device) in (op.src.pool, op.dst.pool)
        return op.device == self._device and not _only_trains(op)


def _is_no_kv(place: Place) -> bool:
    return place.region.kind is not Kind.KV


def num_pages(
    capacity_bytes: Mapping[Pool, int], resident: Mapping[Place, int], page: PageSize
) -> dict[Pool, int]:
    """How many KV pages each pool can hold at once.

    Places that no job owns are never given back. States of a job come back with its end, and pages
    may take their bytes then.

    Args:
        capacity_bytes: bytes of each pool.
        resident: bytes of places that are held from the start.
        page: the page size of KV.

    Returns:
        Pages by pool.
    """
    left = dict(capacity_bytes)
    for place, nbytes in resident.items():
        if place.region.owner == SHARED_OWNER:
            left[place.pool] -= nbytes
    return {pool: nbytes // page.nbytes for pool, nbytes in left.items()}


def _only_trains(op: Op) -> bool:
    """Whether a launch serves no request, so that it touches no shared page."""
    return isinstance(op, Compute) and all([s.job.training is not None for s in op.slices])


class Ledger(Books):
    """The *predicted* memory: bytes per place, pages per KV place, what comes back and when.

    Args:
        capacity_bytes: bytes of each pool.
        page: the page size of KV.
        resident: bytes of places that are held from the start, such as weights.
        journal: gets every life of a place, where a run is to be checked.
        chains: page keys of serving jobs by number; they turn prefix caching on, for the KV pages
            of devices.

    Raises:
        Shortage: `resident` does not fit.
    """

    def __init__(
        self,
        capacity_bytes: Mapping[Pool, int],
        page: PageSize,
        resident: Mapping[Place, int] | None = None,
        journal: Journal | None = None,
        chains: dict[int, Chain] | None = None,
    ) -> None:
        self.capacity_bytes = dict(capacity_bytes)
        self.page = page
        self.pages: dict[Place, list[int]] = {}  # a table only grows; a freed one is dropped
        self._booked: dict[Place, int] = {}  # bytes that are no pages
        self.held_bytes = Holdings(self.pages, self._booked, page.nbytes)
        self._board = Scoreboard(journal)
        self.marks = self._board.marks
        self.written, self.used, self.open = self._board.written, self._board.used, self._board.open
        self.places_of: dict[int, dict[Place, None]] = defaultdict(dict)  # by owner
        self.ended: set[int] = set()  # owners that have ended: a plan may free their states
        self.kind_bytes = {pool: dict.fromkeys(Kind, 0) for pool in capacity_bytes}
        self._free_queues = {pool: FreeQueue(n) for pool, n in capacity_bytes.items()}
        self._pools: dict[Pool, PagePool] = {}
        self.sharing: dict[Pool, Sharing] = {}  # pools with prefix caching
        self._journal = journal
        self._expected: Plan | None = None
        for place, nbytes in (resident or {}).items():
            DryRun(self.room_bytes(), self.held_bytes, page_nbytes=page.nbytes).apply(
                Grow(place, nbytes)
            )
            self._take(place, nbytes)
        counts = num_pages(self.capacity_bytes, resident or {}, page)
        for pool, queue in self._free_queues.items():
            keeps = chains is not None and pool[0] is Tier.GPU
            cache = PrefixCache(chains, page.tokens) if chains is not None and keeps else None
            pages = self._pools[pool] = PagePool(counts[pool], cache)
            if cache is not None:
                self.sharing[pool] = Sharing(pages, queue, cache, self.pages, page.nbytes, pool[1])
        self._settling: tuple[FreeQueue | PagePool, ...]  # settled with each operation
        self._settling = (*self._free_queues.values(), *self._pools.values())
        self._by_pool = [
            (pool, nbytes, self._free_queues[pool], self.kind_bytes[pool], self._pools[pool])
            for pool, nbytes in self.capacity_bytes.items()
        ]

    # ---- figures
    def free_bytes(self) -> dict[Pool, int]:
        """Per pool, what can be taken without a wait."""
        return {pool: queue.free_bytes for pool, queue in self._free_queues.items()}

    def coming_bytes(self) -> dict[Pool, int]:
        """Per pool, what comes back when operations in flight have ended."""
        return {pool: queue.coming_bytes for pool, queue in self._free_queues.items()}

    def room_of(self, pool: Pool) -> int:
        """Free and coming bytes of a pool."""
        return self._free_queues[pool].room_bytes

    def keeps_pages(self, pool: Pool) -> bool:
        """Whether full pages of a pool are kept (prefix caching)."""
        return pool in self.sharing

    def wrong_pages(self, pool: Pool, job: Job, pages: Sequence[int]) -> list[int]:
        """The kept pages of those given that do not hold their part of a job's beginning."""
        return self.sharing[pool].cache.wrong(job, pages)

    def room_bytes(self) -> dict[Pool, int]:
        """Free and coming bytes of every pool."""
        return {pool: queue.room_bytes for pool, queue in self._free_queues.items()}

    def held_pages(self, pool: Pool) -> int:
        """KV pages of a pool with at least one holder."""
        return self._pools[pool].held_pages

    def num_pages(self, pool: Pool) -> int:
        """KV pages that a pool has room for beside what no job owns."""
        return self._pools[pool].num_pages

    def drain_idle(self) -> list[tuple[Pool, list[int]]]:
        """Per pool, the pages that have become idle after the last call."""
        found: list[tuple[Pool, list[int]]] = []
        for pool, pages in self._pools.items():
            if pages.idle and (ids := pages.drain_idle()):
                found.append((pool, ids))
        return found

    @property
    def is_calm(self) -> bool:
        """Whether no bytes are on their way back, and nothing runs but launches of one lane."""
        for queue in self._free_queues.values():
            if queue.coming_bytes:
                return False
        for pool in self.sharing:
            if self._pools[pool].waits_for_users:
                return False
        return self._board.has_one_lane

    def figures(
        self, pool: Pool | None = None, early_bytes: int = 0, device: int | None = None
    ) -> tuple[Figures, ...]:
        """What every pool holds now, or every pool of a device.

        `early_bytes` of KV in `pool` are booked for later steps and are not counted yet.
        """
        rows: list[tuple[object, ...]] = []
        for p, n, q, kinds, pages in self._by_pool:
            if device is None or device == p[1]:
                busy, kv = q.busy_bytes, pages.held_pages
                free = q.free_bytes + q.coming_bytes - busy
                rows.append((p, n, free, busy, tuple(kinds.values()), kv))
        found = tuple(map(tuple.__new__, repeat(Figures), rows))  # without Python's own call
        if early_bytes:
            less = (early_bytes, early_bytes // self.page.nbytes)
            found = tuple([f.less(*less) if f.pool == pool else f for f in found])
        return found

    # ---- booking
    def hold(self, places: Iterable[Place]) -> None:
        """Begins the places of KV that are not held yet, with no pages."""
        for place in places:
            if place not in self.pages:
                self._enter(place)
                self.pages[place] = []

    def grow(self, pool: Pool, pages: int, takers: Iterable[list[int]]) -> None:
        """Books pages of KV, each for one of `self.pages`; the caller has seen that they fit."""
        nbytes = pages * self.page.nbytes
        givers, (ids, users) = self._free_queues[pool].take(nbytes), self._pools[pool].take(pages)
        assert not givers and not users, "a run starts where nothing is on its way back"
        self.kind_bytes[pool][Kind.KV] += nbytes
        deque(map(list.append, takers, ids), maxlen=0)  # a loop in C

    def touch_again(self, op: Compute, steps: int, is_open: bool) -> None:
        """Books a launch that stands for `steps` equal ones; if open, it will settle."""
        self._board.touch_again(op, op.writes, steps, is_open)

    def expect(self, plan: Plan) -> None:
        """The next plan to be booked is known to fit: it needs no dry run."""
        self._expected = plan

    def expects(self, plan: Plan) -> bool:
        """Whether it is that plan."""
        return plan is self._expected

    def book(self, plan: Plan, lead: int = 0) -> dict[Op, Booking]:
        """Books a plan and returns what each operation waits for, in issue order.

        The first `lead` places that its launch writes are known to be held.

        Raises:
            Shortage: the plan does not fit; nothing is changed.
            ContractError: an operation cannot be booked; nothing is changed.
        """
        if not self.expects(plan):
            self.dry_run(plan, lead)
        self._expected = None
        booked: dict[Op, Booking] = {}
        for op in plan.ops:
            if isinstance(op, Grow):
                self._take(op.place, op.nbytes)
            elif isinstance(op, Free):
                self.give(op.place)
            elif isinstance(op, Share):
                self._share(op)
            else:
                booked[op] = self._run(op)
        return booked

    def dry_run(self, plan: Plan, lead: int = 0) -> None:
        """Raises Shortage or ContractError where a plan cannot be booked; changes nothing."""
        page_runs = {pool: sharing.dry_run() for pool, sharing in self.sharing.items()}
        run = DryRun(self.room_bytes(), self.held_bytes, page_runs, self.page.nbytes)
        run.run(plan, lead)

    def _run(self, op: Op) -> Booking:
        if isinstance(op, Compute):
            waits = self._board.touch(op, op.reads + op.after, op.writes)
            if not op.reads:  # serving names only what it writes
                return Booking(waits)
            held = self.kind_bytes[Tier.GPU, op.device]
            others = sum([held[kind] for kind in NO_STATES])
            return Booking(waits, beside=Beside(others, held[Kind.KV]))
        if isinstance(op, Collective):
            return Booking(self._board.touch(op, op.reads, op.writes), (op.nbytes, (), ()))
        nbytes = self.held_bytes[op.src]
        if op.dst not in self.held_bytes:
            self._take(op.dst, nbytes)
        tables = self.pages.get(op.src, ()), self.pages.get(op.dst, ())
        if op.dst.pool in self.sharing:
            self.sharing[op.dst.pool].lands(op, tables[1])
        return Booking(self._board.touch(op, (op.src,), (op.dst,)), (nbytes, *tables))

    def _take(self, place: Place, nbytes: int) -> None:
        region, tier, device = place
        pool, kind = (tier, device), region.kind
        pages: list[int] = []
        givers = self._free_queues[pool].take(nbytes)
        if kind is Kind.KV:
            self._enter(place)
            pages, waits = self._pools[pool].take(nbytes // self.page.nbytes)
            self.pages.setdefault(place, []).extend(pages)
            givers |= waits
        elif place in self._booked:
            self._booked[place] += nbytes
        else:
            self._enter(place)
            self._booked[place] = nbytes
        if kind is not Kind.KV and pool in self.sharing:
            givers |= self.sharing[pool].lend()
        self.kind_bytes[pool][kind] += nbytes
        if givers:
            self._board.rest(place, givers)
        if self._journal:
            self._journal.took(place, nbytes, pages)

    def _share(self, op: Share) -> None:
        place, pool = op.place, op.place.pool
        nbytes, writers = self.sharing[pool].share(op.pages, self.open)
        self._enter(place)
        self.pages[place] = list(op.pages)
        self.kind_bytes[pool][Kind.KV] += nbytes
        if writers:
            self._board.rest(place, writers)
        if self._journal:
            self._journal.took(place, self.held_bytes[place], op.pages, is_shared=True)

    def _enter(self, place: Place) -> None:
        if place not in self._booked and place not in self.pages:
            self._board.enter(place)
            self.places_of[place.region.owner][place] = None

    # ---- giving back
    def give(self, place: Place, has_ended: bool = False) -> None:
        """Gives a place back: its bytes return, in issue order, when its users have ended.

        `has_ended`: they will have ended before the next plan is issued.
        """
        (owner, kind, _, _), tier, device = place
        pool = (tier, device)
        users = self._board.leave(place)
        if has_ended:
            users = set()
        owned = self.places_of[owner]
        del owned[place]
        if not owned:
            del self.places_of[owner]
        pages = self.pages.pop(place, None)
        if pages is None:
            nbytes = self._booked.pop(place)
            self._free_queues[pool].give(nbytes, users)
            if pool in self.sharing:
                self.sharing[pool].lend(users)
        else:
            nbytes = self._give_pages(pool, pages, users)
        self.kind_bytes[pool][kind] -= nbytes
        if self._journal:
            self._journal.gave(place)

    def give_all(self, owner: int, has_ended: bool = False) -> Sequence[Place]:
        """Gives back all that an owner holds; returns where that was. See `give`."""
        places = tuple(sorted(self.places_of.get(owner, ()), key=_is_no_kv))  # as `held_bytes` has
        for place in places:
            self.give(place, has_ended)
        return places

    def _give_pages(self, pool: Pool, pages: Sequence[int], users: set[Op]) -> int:
        """Returns the bytes that come back: a page that still has a holder is not among them."""
        if pool in self.sharing:
            return self.sharing[pool].give(pages, users, self.open)
        nbytes = len(pages) * self.page.nbytes
        self._free_queues[pool].give(nbytes, users)
        self._pools[pool].give(pages, users)
        return nbytes

    def settle(self, op: Op) -> None:
        """An operation has ended: bytes that waited for it come back."""
        self._board.settle(op)
        for queue in self._settling:
            if op in queue.waiting:
                queue.settle(op)

    def conserved(self) -> None:
        """Law 2: held, free and coming add up to the capacity of every pool; pages count once."""
        held: dict[Pool, int] = defaultdict(int)
        holders: dict[Pool, Counter[int]] = defaultdict(Counter)
        for place, nbytes in self.held_bytes.items():
            held[place.pool] += nbytes
        for place, ids in self.pages.items():
            holders[place.pool].update(ids)
        for pool, capacity in self.capacity_bytes.items():
            queue, counts = self._free_queues[pool], holders[pool]
            twice = (counts.total() - len(counts)) * self.page.nbytes
            if held[pool] - twice + queue.room_bytes != capacity:
                raise BrokenLaw(f"law 2: {pool} does not add up")
            if queue.free_bytes < 0 or not 0 <= queue.busy_bytes <= queue.coming_bytes:
                raise BrokenLaw(f"law 2: {pool} is overdrawn")
            self._pools[pool].check(counts)
            if pool in self.sharing and self.sharing[pool].lent != self._pools[pool].lent_pages:
                raise BrokenLaw(f"law 2: kept pages of {pool} have no bytes")
