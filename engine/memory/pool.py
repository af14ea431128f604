"""The memory pool: bytes on their way back, pages by holder, and what kept pages hold."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, islice
from typing import Any

from engine.contract.adapters import AdapterVersion
from engine.contract.job import Job
from engine.contract.plan import Op
from engine.contract.regions import Place
from engine.contract.rules import BrokenLaw, ContractError, Rule
from traces.serving.request import Request


class Chain:
    """The keys of a request's full pages: each stands for the tokens in it and all before them.

    A chain of hashes as in vLLM. A token is known by its id where the trace has ids, and by its
    named block and its offset there where the trace has blocks (Mooncake). Any other token, and
    every generated one, is known by its request and position. Keys of one adapter's version are
    other keys than those of another, since keys and values differ.
    """

    def __init__(
        self, request: Request, page_tokens: int, adapter: AdapterVersion | None = None
    ) -> None:
        self._request, self._page_tokens = request, page_tokens
        self._root = 0 if adapter is None else hash((adapter.number + 1, adapter.version))
        self._keys: list[int] = []
        has_names = request.prompt_ids is not None or request.prefix_ids
        self._named_pages = -(-request.prompt_tokens // page_tokens) if has_names else 0

    def through(self, adapter: AdapterVersion) -> Chain:
        """The keys of the request where it runs through this version of an adapter."""
        return Chain(self._request, self._page_tokens, adapter)

    def page_hashes(self, start: int, stop: int) -> list[int]:
        """The keys of pages `start` to `stop` of the request; hashed once, as far as needed."""
        keys, number = self._keys, self._request.request_id
        key = keys[-1] if keys else self._root
        for index in range(len(keys), min(stop, self._named_pages)):
            key = hash((key, self._content(index)))
            keys.append(key)
        for index in range(len(keys), stop):  # no other request has these tokens
            key = hash((key, number, index))
            keys.append(key)
        return keys[start:stop]

    def of_prompt(self) -> tuple[int, ...]:
        """The keys of the prompt's full pages."""
        return tuple(self.page_hashes(0, self._request.prompt_tokens // self._page_tokens))

    def _content(self, index: int) -> tuple[Any, ...]:
        request, start = self._request, index * self._page_tokens
        stop = start + self._page_tokens
        if request.prompt_ids is not None:
            named, content = request.prompt_tokens, request.prompt_ids[start:stop]
        else:
            blocks, size = request.prefix_ids or (), request.prefix_block_tokens
            named = min(len(blocks) * size, request.prompt_tokens)
            content = _cut(blocks, size, start, min(stop, named))
        return content if stop <= named else (content, request.request_id, start)


def _cut(blocks: Sequence[int], size: int, start: int, stop: int) -> tuple[Any, ...]:
    """The parts of named blocks between two positions: name, and from where to where in it."""
    return tuple(
        (blocks[i], max(start - i * size, 0), min(stop - i * size, size))
        for i in (range(start // size, -(-stop // size)) if start < stop else ())
    )


class PrefixCache:
    """The contents of a pool's full pages, by key.

    A page keeps its key until it is taken for other contents. Several pages may have one key, as
    when two jobs began alike at once; the oldest is found.
    """

    def __init__(self, chains: dict[int, Chain], page_tokens: int) -> None:
        self._chains, self._page_tokens = chains, page_tokens
        self._keys: dict[int, int] = {}  # by page
        self._pages: dict[int, dict[int, None]] = {}  # by key, oldest first

    def unknown(self, pages: Iterable[int]) -> list[int]:
        """The given pages that have no key: no job can find their contents."""
        return list(filterfalse(self._keys.__contains__, pages))

    def keep(self, job: Job, context_tokens: int, table: Sequence[int]) -> None:
        """Gives keys to the pages that a launch has filled.

        The job held `context_tokens` before the launch; `table` is its page table.
        """
        size, chain = self._page_tokens, self._chains[job.job_id]
        full = min(
            job.computed_tokens // size, len(table)
        )  # a table that is freed already is empty
        first = context_tokens // size
        for key, page in zip(chain.page_hashes(first, full), table[first:full], strict=True):
            self._keys[page] = key
            self._pages.setdefault(key, {})[page] = None

    def forget(self, pages: Iterable[int]) -> None:
        """These pages are taken for something else."""
        for page in self._keys.keys() & pages:
            key = self._keys.pop(page)
            alike = self._pages[key]
            del alike[page]
            if not alike:
                del self._pages[key]

    def find(self, job: Job, gone: Container[int] = ()) -> list[int]:
        """Pages with the longest beginning of a job that is known, without those that are gone.

        Ends before the last known token: that one must be computed to yield the next.
        """
        found: list[int] = []
        of_key, chain = self._pages, self._chains[job.job_id]
        for key in chain.page_hashes(0, (job.known_tokens - 1) // self._page_tokens):
            if key not in of_key:
                break
            for page in of_key[key]:
                if page not in gone:
                    found.append(page)
                    break
            else:
                break
        return found

    def wrong(self, job: Job, pages: Sequence[int]) -> list[int]:
        """The given pages that do not hold their part of a job's beginning."""
        keys = self._chains[job.job_id].page_hashes(0, len(pages))
        return [p for p, key in zip(pages, keys, strict=True) if self._keys.get(p) != key]


class Holdings(Mapping[Place, int]):
    """Bytes by place, to read: those of its pages, or what was booked of anything else."""

    def __init__(
        self, tables: Mapping[Place, Sequence[int]], booked: Mapping[Place, int], page_nbytes: int
    ) -> None:
        self._tables, self._booked, self._page_nbytes = tables, booked, page_nbytes

    def __getitem__(self, place: Place) -> int:
        table = self._tables.get(place)
        return self._booked[place] if table is None else len(table) * self._page_nbytes

    def get(self, place: Place, default: Any = None) -> Any:
        table = self._tables.get(place)
        return self._booked.get(place, default) if table is None else len(table) * self._page_nbytes

    def __contains__(self, place: object) -> bool:
        return place in self._tables or place in self._booked

    def __iter__(self) -> Iterator[Place]:
        return chain(self._tables, self._booked)

    def rows(self) -> tuple[tuple[Place, int], ...]:
        """All places with their bytes, in the order of `iter`."""
        size = self._page_nbytes
        return (*[(p, len(t) * size) for p, t in self._tables.items()], *self._booked.items())

    def __len__(self) -> int:
        return len(self._tables) + len(self._booked)


@dataclass(slots=True, eq=False)
class Owed:
    """Bytes on their way back, and the operations that still use them."""

    nbytes: int
    users: set[Op]


class FreeQueue:
    """The bytes of a pool that no place holds, oldest first.

    An entry may still be used by operations in flight. Bytes are taken from the head only, so which
    place takes which bytes depends on the order of issue and never on when a copy ends.
    `free_bytes` is the head, whose users have all ended; `coming_bytes` is the rest. Of the coming
    bytes `busy_bytes` are still used; the remaining ones wait for the entries before them.
    """

    def __init__(self, nbytes: int) -> None:
        self.free_bytes = nbytes
        self.coming_bytes = self.busy_bytes = 0
        self._entries: deque[Owed] = deque()
        self.waiting: dict[Op, list[Owed]] = defaultdict(list)  # by user

    @property
    def room_bytes(self) -> int:
        return self.free_bytes + self.coming_bytes

    def give(self, nbytes: int, users: Iterable[Op]) -> Owed:
        """Adds bytes that are free once their users have ended."""
        owed = Owed(nbytes, set(users))
        self._entries.append(owed)
        for op in owed.users:
            self.waiting[op].append(owed)
        self.coming_bytes += nbytes
        if owed.users:
            self.busy_bytes += nbytes
        else:
            self._advance()
        return owed

    def reclaim(self, owed: Owed, nbytes: int) -> set[Op]:
        """Takes bytes back together with their contents; returns the operations to wait for.

        Bytes of the entry itself wait for no operation. Where a part of it has been taken for
        something else, the rest comes from the head and waits as in `take`.
        """
        part = min(owed.nbytes, nbytes)
        owed.nbytes -= part
        self.coming_bytes -= part
        if owed.users:
            self.busy_bytes -= part
        return self.take(nbytes - part)

    def take(self, nbytes: int) -> set[Op]:
        """Removes bytes from the head; returns the operations that have to end first."""
        if nbytes <= self.free_bytes:
            self.free_bytes -= nbytes
            return set()
        if nbytes > self.room_bytes:
            raise BrokenLaw("law 3: more bytes are taken than the pool has: check before you take")
        now, self.free_bytes = self.free_bytes, 0
        givers: set[Op] = set()
        while now < nbytes:
            owed = self._entries[0]
            part = min(owed.nbytes, nbytes - now)
            owed.nbytes -= part
            if not owed.nbytes:
                self._entries.popleft()
            givers |= owed.users
            now += part
            self.coming_bytes -= part
            if owed.users:
                self.busy_bytes -= part
        self._advance()
        return givers

    def settle(self, op: Op) -> None:
        """An operation has ended: what waited only for it becomes free, in order."""
        for owed in self.waiting.pop(op, ()):
            owed.users.discard(op)
            if not owed.users:
                self.busy_bytes -= owed.nbytes
        self._advance()

    def _advance(self) -> None:
        while self._entries and not self._entries[0].users:
            owed = self._entries.popleft()
            self.coming_bytes -= owed.nbytes
            self.free_bytes += owed.nbytes
            owed.nbytes = 0  # free bytes belong to no entry


@dataclass(slots=True, eq=False)
class Returned:
    """Pages without a holder, and the operations that still use them."""

    ids: list[int]
    users: set[Op]


class PagePool:
    """Page ids with reference counts, handed out oldest first.

    Ids come back in issue order, beside the bytes of the FreeQueue: an id that is taken again waits
    no longer than the bytes it stands for. With a prefix cache a job's last page comes back first,
    so that its beginning is kept longest, and pages without a holder can be shared. Pages whose
    bytes are taken for anything but pages are lent then: their contents are lost. What is taken
    back is empty, so it is handed out before pages that keep something; it may wait for longer than
    its bytes.
    """

    def __init__(self, num_pages: int, cache: PrefixCache | None = None) -> None:
        self.num_pages, self._cache = num_pages, cache
        self.held_pages = 0  # with at least one holder; a shared page counts once
        self._more: Counter[int] = Counter()  # holders of a shared page beside the first
        self._returned: deque[Returned] = deque()
        self._empty: deque[Returned] = deque()  # lent before
        self.waiting: dict[Op, list[Returned]] = defaultdict(list)  # by user
        self.idle: list[Returned] = []  # idle after the last call of `drain_idle`
        self._next = 0  # ids from here on were never handed out
        self._where: dict[int, Returned] = {}  # with a cache: pages without a holder
        self.lent_pages = 0
        self._lent: deque[Returned] = deque()  # oldest first, with operations that used them before

    def take(self, count: int) -> tuple[list[int], set[Op]]:
        """Hands out pages, and the operations that must end before they are written."""
        ids: list[int] = []
        givers: set[Op] = set()
        if self._next < self.num_pages:
            end = min(self.num_pages, self._next + count)
            ids += range(self._next, end)
            self._next = end
        while len(ids) < count:
            queue = self._empty or self._returned
            if not queue:
                raise BrokenLaw(f"law 3: {count} pages asked for, but the pool has no more")
            oldest, want = queue[0], count - len(ids)
            ids += oldest.ids[:want]
            del oldest.ids[:want]
            givers |= oldest.users
            if not oldest.ids:
                queue.popleft()
        self.held_pages += count
        if self._cache is not None:
            self._cache.forget(ids)
            for page in self._where.keys() & ids:
                del self._where[page]
        return ids, givers

    def lend(self, count: int) -> set[Op]:
        """The bytes of the oldest pages hold something else now; returns what they wait for."""
        ids, givers = self.take(count)
        self.held_pages -= count
        self.lent_pages += count
        lent = Returned(ids, givers)
        self._lent.append(lent)
        self._await(lent)
        return givers

    def take_back(self, count: int, users: Iterable[Op]) -> None:
        """The bytes of lent pages come back when these operations have ended."""
        self.lent_pages -= count
        while count:
            oldest = self._lent[0]
            ids = oldest.ids[:count]
            del oldest.ids[:count]
            if not oldest.ids:
                self._lent.popleft()
            self._return(Returned(ids, oldest.users.union(users)), self._empty)
            count -= len(ids)

    @property
    def waits_for_users(self) -> bool:
        """Whether a page waits for its users: one that was lent may do so longer than its bytes."""
        return any([returned.users for returned in self._empty])

    def holders(self, pages: Iterable[int]) -> list[int]:
        """The number of holders of each of these pages (with a cache)."""
        end, where, more = self._next, self._where, self._more.get
        return [0 if page in where or page >= end else 1 + more(page, 0) for page in pages]

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages, all handed out before, have no holder (with a cache)."""
        return sum(map(self._where.__contains__, pages))

    def _is_held(self, page: int) -> bool:
        return page < self._next and page not in self._where

    def oldest(self) -> Iterator[int]:
        """Pages without a holder, in the order in which they will be handed out."""
        yield from range(self._next, self.num_pages)
        for returned in chain(self._empty, self._returned):
            yield from returned.ids

    def share(self, ids: Iterable[int]) -> list[int]:
        """Adds a holder to each of these pages; returns the pages that had none."""
        idle = []
        for page in ids:
            if self._is_held(page):
                self._more[page] += 1
            else:
                idle.append(page)
                self._withdraw(page)
        self.held_pages += len(idle)
        return idle

    def _withdraw(self, page: int) -> None:
        returned = self._where.pop(page)
        assert page in returned.ids, f"page {page} is shared twice by one job, or lost"
        returned.ids.remove(page)
        if not returned.ids:
            self._returned.remove(returned)

    def give(self, ids: Iterable[int], users: Iterable[Op]) -> list[int]:
        """Removes a holder from each of these pages; returns the pages without one now."""
        back = list(ids)
        # Only a pool with a cache can see this here; without one `check` counts the holders.
        assert not self._where or self._where.keys().isdisjoint(back), (
            "a page without a holder comes back"
        )
        if self._more and (shared := self._more.keys() & back):
            back = [page for page in back if page not in shared]
            self._more.subtract(shared)
            for page in shared:
                if not self._more[page]:
                    del self._more[page]  # one holder again
        self.held_pages -= len(back)
        if self._cache is not None:
            back.reverse()
        if back:
            self._return(Returned(back, set(users)), self._returned)
        return back

    def settle(self, op: Op) -> None:
        """An operation has ended: pages that it used last are idle now."""
        for returned in self.waiting.pop(op, ()):
            returned.users.discard(op)
            if not returned.users:
                self.idle.append(returned)

    def drain_idle(self) -> list[int]:
        """Pages that have become idle after the last call and were not taken again.

        Kept pages are not among them: a job may still find their contents.
        """
        ids = list(chain.from_iterable([returned.ids for returned in self.idle]))
        self.idle.clear()
        if self._cache is not None:
            ids = self._cache.unknown(ids)
        return ids

    def check(self, holders: Counter[int]) -> None:
        """Law 2: pages have exactly these holders, and every other page can be handed out."""
        queues = chain(self._returned, self._empty, self._lent)
        free = list(chain.from_iterable([returned.ids for returned in queues]))
        held = set(range(self._next)).difference(free)  # what was never handed out is free
        if len(free) + self.held_pages != self._next:
            raise BrokenLaw("law 2: a page is lost")
        if len(held) != self.held_pages:
            raise BrokenLaw("law 2: a page comes back twice")
        if dict(holders) != {page: 1 + self._more[page] for page in held}:
            raise BrokenLaw("law 2: the holders of pages do not add up")

    def _return(self, returned: Returned, queue: deque[Returned]) -> None:
        queue.append(returned)
        if self._cache is not None:
            self._where.update(dict.fromkeys(returned.ids, returned))
        self._await(returned)

    def _await(self, returned: Returned) -> None:
        """Pages are idle once their users have ended."""
        for op in returned.users:
            self.waiting[op].append(returned)
        if not returned.users:
            self.idle.append(returned)


UNKNOWN = -1  # a page that this plan takes: it holds nothing that could be found


class PageDryRun:
    """KeptPages over a page pool. It changes nothing.

    Pages are taken oldest first, so what a plan takes may be what a later job of the plan would
    have started on: ask in the order of the plan.
    """

    def __init__(
        self,
        pool: PagePool,
        tables: Mapping[Place, Sequence[int]],
        cache: PrefixCache,
        page_nbytes: int,
    ) -> None:
        self._pool, self._tables, self._cache = pool, tables, cache
        self._page_nbytes = page_nbytes
        self._lent, self._unheld = pool.lent_pages, pool.num_pages - pool.held_pages
        self._holders: dict[int, int] = {}  # of pages whose holders the plan changes
        self._shared: dict[Place, Sequence[int]] = {}
        self._grown: dict[Place, int] = defaultdict(int)
        self._freed: set[Place] = set()
        self._oldest: Iterator[int] | None = None
        self._tail: deque[int] = deque()  # freed by the plan
        self._empty = 0  # lent pages that the plan has taken back: taken first
        self._due = 0  # pages taken that are not in `gone` yet
        self._gone: set[int] = set()

    def found(self, job: Job) -> tuple[int, ...]:
        """Pages that a job would start on now."""
        self._walk()
        return tuple(self._cache.find(job, self._gone))

    def idle(self, pages: Sequence[int], beside: Collection[Place] = ()) -> int:
        """How many of these pages none but the given places holds: sharing them takes room."""
        if not beside or not pages:
            if self._holders.keys().isdisjoint(pages):
                return self._pool.num_idle(pages)
            return self._holders_of(pages).count(0)
        own = Counter(chain.from_iterable(map(self._table, beside)))
        return sum([n <= own[p] for p, n in zip(pages, self._holders_of(pages), strict=True)])

    def _table(self, place: Place) -> Sequence[int]:
        """The pages of a place that the plan has not grown."""
        return () if place in self._freed else self._tables.get(place, ())

    def take(self, place: Place, count: int) -> None:
        """A place grows by so many pages."""
        self._take(count)
        self._grown[place] += count
        self._unheld -= count

    def _take(self, count: int) -> None:
        empty = min(self._empty, count)
        self._empty -= empty
        self._due += count - empty

    def lend(self, room_bytes: int) -> None:
        """The pool has so much room left, as other bytes than pages were taken or given back."""
        lent = max(0, self._unheld - room_bytes // self._page_nbytes)
        self._take(max(0, lent - self._lent))
        self._empty += max(0, self._lent - lent)
        self._lent = lent

    def share(self, place: Place, pages: Sequence[int]) -> None:
        """A place begins with pages that are there."""
        self._walk()
        if not self._gone.isdisjoint(pages):
            raise ContractError(Rule.SHARE, "a page is shared that the plan has taken")
        for page in set(pages).intersection(self._tail):
            self._tail.remove(page)
        more = [holders + 1 for holders in self._holders_of(pages)]
        self._unheld -= more.count(1)
        self._holders.update(zip(pages, more, strict=True))
        self._shared[place] = pages

    def free(self, place: Place) -> int:
        """Gives a place back, its last page first; returns how many pages have no holder now."""
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
        self._unheld += fresh + len(back)
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
        while self._tail and len(taken) < self._due:  # a plan that takes more will not be booked
            taken.append(self._tail.popleft())
        self._gone.update(taken)
        self._due -= len(taken)
