"""Which place leaves the device first when room is needed: replaceable orders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from engine.contract.regions import Place
from engine.contract.view import View

Rank = tuple[int, int]  # the lowest goes first; behind it the chunk, for ties
NOW = 1 << 62  # stamps of what is drafted: behind all that were issued


class Order(Protocol):
    """Ranks places as they stand when a plan begins, and as its launches use them.

    `index`: how many were booked before a place; `clock`: launches drafted before the one that
    uses it; `rank`: so far, None where the place has just come.
    """

    def standing(self, place: Place, index: int) -> Rank: ...

    def used(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank: ...


@dataclass(frozen=True)
class LeastRecent:
    """LRU."""

    view: View

    def standing(self, place: Place, index: int) -> Rank:
        return self.view.used[place], 0

    def used(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        return NOW + clock, 0


class FirstIn:
    """FIFO: in the order in which places were booked."""

    def standing(self, place: Place, index: int) -> Rank:
        return index, 0

    def used(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        return (index, 0) if rank is None else rank


class LastIn:
    """What came last is wanted last, where everything comes in the order of its use."""

    def standing(self, place: Place, index: int) -> Rank:
        return -index, 0

    def used(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        return (-index, 0) if rank is None else rank


class Future(NamedTuple):
    """When launches of a job's step use each place, as far as is known, and where the job is."""

    uses: Mapping[Place, Sequence[int]]  # numbers of launches, ascending
    length: int  # launches in a step
    moment: int  # number of the next one

    def distance(self, place: Place, behind: int) -> int:
        """Launches from now to the first use behind a moment: in this step, in the next, or, where
        none is known, later than any."""
        moments = self.uses.get(place, ())
        if not moments:
            return 2 * self.length
        at = bisect_right(moments, behind)
        found = moments[at] if at < len(moments) else self.length + moments[0]
        return found - self.moment


@dataclass(frozen=True)
class FarthestUse:
    """Belady's OPT over a cyclic future; ties by the smaller chunk."""

    futures: Mapping[int, Future] = field(default_factory=dict)  # by job

    def standing(self, place: Place, index: int) -> Rank:
        future = self.futures[place.region.owner]
        return -future.distance(place, future.moment - 1), place.region.part

    def used(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        future = self.futures[place.region.owner]
        return -future.distance(place, future.moment + clock), place.region.part


class Entry(NamedTuple):
    """A place as it was ranked last. Of equal ranks, who came first goes first."""

    rank: Rank
    number: int
    place: Place


class Candidates:
    """Places by rank. `count`: how many have come so far, those that have left included."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: dict[Place, Entry] = {}
        self._heap: list[Entry] = []  # made when first asked for; entries may be out of date

    def __iter__(self) -> Iterator[Place]:
        return iter(self._entries)

    def __contains__(self, place: object) -> bool:
        return place in self._entries

    def rank(self, place: Place) -> Rank | None:
        """As it was put last; None where it is no candidate."""
        entry = self._entries.get(place)
        return None if entry is None else entry.rank

    def put(self, place: Place, rank: Rank) -> None:
        """Enters a place, or ranks it anew."""
        old = self._entries.get(place)
        if old is None:
            self.count += 1
        elif old.rank == rank:
            return
        entry = Entry(rank, self.count if old is None else old.number, place)
        self._entries[place] = entry
        if self._heap:
            heappush(self._heap, entry)

    def drop(self, place: Place) -> bool:
        """Takes a place off; whether it was there."""
        return self._entries.pop(place, None) is not None

    def send_first(self, pinned: Collection[Place], send: Callable[[Place], bool]) -> bool:
        """Has the first that is not pinned and can be sent away leave; whether one was found."""
        if not self._heap:
            self._heap = [*self._entries.values()]
            heapify(self._heap)
        heap, passed, found = self._heap, list[Entry](), False
        while heap and not found:
            entry = heappop(heap)
            if self._entries.get(entry.place) is entry:
                found = entry.place not in pinned and send(entry.place)
                passed += [] if found else [entry]
        for entry in passed:
            heappush(heap, entry)
        return found
