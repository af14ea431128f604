"""The lives of all bytes of a run, for checks afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.plan import Op, Place


@dataclass(slots=True, eq=False)
class Life:
    """Bytes from the moment they were booked to the moment they were given back.

    Of KV also which `pages`: those that were shared have several lives at a time.
    """

    place: Place
    nbytes: int
    taken_ns: int
    pages: Sequence[int] = ()
    is_shared: bool = False  # pages that held this before
    users: list[Op] = field(default_factory=list)
    freed_ns: int | None = None


class Journal:
    """Written by the ledger where a run is to be checked; costs memory, so it is off otherwise."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.lives: list[Life] = []
        self._now_ns = now_ns
        self._alive: dict[Place, list[Life]] = defaultdict(list)

    def took(
        self, place: Place, nbytes: int, pages: Sequence[int] = (), is_shared: bool = False
    ) -> None:
        life = Life(place, nbytes, self._now_ns(), pages, is_shared)
        self._alive[place].append(life)
        self.lives.append(life)

    def touched(self, op: Op, places: Iterable[Place]) -> None:
        for place in places:
            for life in self._alive[place]:
                life.users.append(op)

    def gave(self, place: Place) -> None:
        for life in self._alive.pop(place, ()):
            life.freed_ns = self._now_ns()
