"""A store in real time: places go when the launches that were issued on them have ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from threading import RLock

from engine.executor import Store
from engine.plan import Place, Tier


@dataclass(slots=True, eq=False)
class Stay:
    """A place from the plan that takes it to the plan that gives it back."""

    place: Place
    open: int = 0  # launches on it that have not ended
    is_freed: bool = False
    grown_bytes: int | None = None  # asked for, and the store has not been told


class LaneStore:
    """Told by the engine's thread in issue order; told of ends by the threads of lanes.

    What a plan frees and a later one takes again is another stay: it begins when the one before is
    over. Whoever takes it waits for that (the ledger says so), so nobody ever finds it missing.
    What is taken in a tier of `late` begins when a launch opens it: a plan says long before what
    it will take, of bytes that others use till then.
    """

    def __init__(self, store: Store, late: Collection[Tier] = ()) -> None:
        self._store, self._late, self._lock = store, late, RLock()
        self._stays: dict[Place, deque[Stay]] = defaultdict(deque)

    def grow(self, place: Place, nbytes: int) -> None:
        """See Store."""
        with self._lock:
            stay = self._newest(place)
            stay.grown_bytes = (stay.grown_bytes or 0) + nbytes
            if place.tier not in self._late:
                self._tell(stay)

    def free(self, place: Place) -> None:
        """See Store."""
        with self._lock:
            self._newest(place).is_freed = True
            self._advance(place)

    def begin(self, places: Iterable[Place]) -> tuple[Stay, ...]:
        """A launch on these places is issued; what to `end` with it."""
        with self._lock:
            stays = tuple(self._newest(place) for place in places)
            for stay in stays:
                stay.open += 1
        return stays

    def open(self, stays: Sequence[Stay]) -> bool:
        """Begins what a launch's places took late; whether they all are there. If one still waits
        for the stay before to be over, nothing begins."""
        with self._lock:
            if not all(stay is self._stays[stay.place][0] for stay in stays):
                return False
            for stay in stays:
                self._tell(stay)
        return True

    def end(self, stays: Sequence[Stay]) -> None:
        """It has ended."""
        with self._lock:
            for stay in stays:
                stay.open -= 1
                self._advance(stay.place)

    def _newest(self, place: Place) -> Stay:
        stays = self._stays[place]
        if not stays or stays[-1].is_freed:
            stays.append(Stay(place))
        return stays[-1]

    def _tell(self, stay: Stay) -> None:
        """Grows what was asked for, if its time has come."""
        if stay.grown_bytes is not None and stay is self._stays[stay.place][0]:
            self._store.grow(stay.place, stay.grown_bytes)
            stay.grown_bytes = None

    def _advance(self, place: Place) -> None:
        stays = self._stays[place]
        while stays and stays[0].is_freed and not stays[0].open:
            self._tell(stays[0])  # it has never been opened: it comes and goes
            self._store.free(place)
            stays.popleft()
            if stays and place.tier not in self._late:
                self._tell(stays[0])
        if not stays:
            del self._stays[place]
