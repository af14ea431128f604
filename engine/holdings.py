"""What each place holds: of KV its pages, counted once in their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from engine.plan import Place


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
