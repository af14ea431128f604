"""The order in which places are evicted from the device when room is needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from engine.contract.regions import Place
from engine.contract.view import View

Rank = tuple[int, int]  # the lowest is evicted first; the second number, a chunk, breaks ties
NOW = 1 << 62  # stamps of planned launches lie behind all stamps of issued ones


class Order(Protocol):
    """An order of eviction: the place with the lowest rank is evicted first."""

    def rank_at_start(self, place: Place, index: int) -> Rank:
        """The rank of a place that is on the device when a plan begins.

        Args:
            place: of states or activations on the device.
            index: how many places were booked before it.

        Returns:
            Its rank.
        """

    def rank_after_use(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        """The rank of a place behind a launch of the plan that uses it.

        Args:
            place: of states or activations on the device.
            clock: launches of the plan before this one.
            rank: that of the place so far; None where it has just come.
            index: how many places were booked before it.

        Returns:
            Its rank from that launch on.
        """


@dataclass(frozen=True)
class LeastRecent:
    """LRU: the least recently used place is evicted first.

    Args:
        view: its stamps say when each place was used.
    """

    view: View

    def rank_at_start(self, place: Place, index: int) -> Rank:
        return self.view.used[place], 0

    def rank_after_use(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        return NOW + clock, 0


class FirstIn:
    """FIFO: the place that was booked first is evicted first."""

    def rank_at_start(self, place: Place, index: int) -> Rank:
        return index, 0

    def rank_after_use(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        return (index, 0) if rank is None else rank


class LastIn:
    """LIFO: the place that was booked last is evicted first.

    Where places come in the order of their use, the last one is also used last.
    """

    def rank_at_start(self, place: Place, index: int) -> Rank:
        return -index, 0

    def rank_after_use(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        return (-index, 0) if rank is None else rank


class Future(NamedTuple):
    """When launches of a job's step use each place, as far as is known, and which one is next."""

    uses: Mapping[Place, Sequence[int]]  # numbers of launches, ascending
    length: int  # launches in a step
    moment: int  # number of the next one

    def distance(self, place: Place, behind: int) -> int:
        """Launches from now to the first use of a place behind a moment.

        The use lies in this step or in the next one. A place without a known use comes after all
        others.

        Args:
            place: a place of model states.
            behind: the number of a launch of the step.

        Returns:
            The number of launches; twice the step where no use is known.
        """
        moments = self.uses.get(place, ())
        if not moments:
            return 2 * self.length
        at = bisect_right(moments, behind)
        found = moments[at] if at < len(moments) else self.length + moments[0]
        return found - self.moment


@dataclass(frozen=True)
class FarthestUse:
    """Belady's OPT over a cyclic future: the place whose next use is farthest is evicted first.

    Of places with equal distances, that of the smaller chunk goes first.

    Args:
        futures: per job, when its places are used.
    """

    futures: Mapping[int, Future] = field(default_factory=dict)

    def rank_at_start(self, place: Place, index: int) -> Rank:
        future = self.futures[place.region.owner]
        return -future.distance(place, future.moment - 1), place.region.part

    def rank_after_use(self, place: Place, clock: int, rank: Rank | None, index: int) -> Rank:
        future = self.futures[place.region.owner]
        return -future.distance(place, future.moment + clock), place.region.part


class Entry(NamedTuple):
    """A place as it was ranked last. Of equal ranks, the place that came first is evicted first."""

    rank: Rank
    number: int
    place: Place


class Candidates:
    """The places that may be evicted, by rank.

    `count`: how many places have come so far, those that have left included.
    """

    def __init__(self) -> None:
        self.count = 0
        self._entries: dict[Place, Entry] = {}
        self._heap: list[Entry] = []  # made at the first eviction; entries may be out of date

    def __iter__(self) -> Iterator[Place]:
        return iter(self._entries)

    def __contains__(self, place: object) -> bool:
        return place in self._entries

    def ranked(self) -> list[Place]:
        """All candidates, the one that is evicted first at the head.

        Returns:
            A new list.
        """
        return [entry.place for entry in sorted(self._entries.values())]

    def rank(self, place: Place) -> Rank | None:
        """The rank of a place.

        Args:
            place: a place of states or activations.

        Returns:
            None where the place is no candidate.
        """
        entry = self._entries.get(place)
        return None if entry is None else entry.rank

    def put(self, place: Place, rank: Rank) -> None:
        """Adds a place, or changes its rank.

        Args:
            place: a place of states or activations.
            rank: its rank from now on.
        """
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
        """Removes a place.

        Args:
            place: a place of states or activations.

        Returns:
            Whether it was a candidate.
        """
        return self._entries.pop(place, None) is not None

    def evict_first(self, pinned: Collection[Place], evict: Callable[[Place], bool]) -> bool:
        """Evicts the first place that is not pinned and that `evict` can take off the device.

        Args:
            pinned: places that stay.
            evict: takes a place off the device; False where it cannot.

        Returns:
            Whether there was such a place.
        """
        if not self._heap:
            self._heap = [*self._entries.values()]
            heapify(self._heap)
        heap, passed, found = self._heap, list[Entry](), False
        while heap and not found:
            entry = heappop(heap)
            if self._entries.get(entry.place) is entry:
                found = entry.place not in pinned and evict(entry.place)
                passed += [] if found else [entry]
        for entry in passed:
            heappush(heap, entry)
        return found
