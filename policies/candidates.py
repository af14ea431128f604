"""What may leave a device when room is needed, the lowest rank first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from engine.plan import Place
from policies.eviction import Rank


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
