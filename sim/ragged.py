"""A piecewise linear table whose inner axes may differ from row to row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.table import Nodes, check_times, hats, warn_beyond


@dataclass(frozen=True)
class Ragged:
    """Nodes of the first axis, and for each a value or the table of the axes after it."""

    nodes: Nodes
    parts: tuple[float | Ragged, ...]
    _arrays: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def value(self, point: Sequence[float]) -> float:
        """Straight between nodes and beyond the last; before the first, its value."""
        return sum([weight * part for part, weight in self._cut(point) if isinstance(part, float)])

    def values(self, points: Any) -> Any:
        """The same of a table with one axis, at an array of points."""
        if not self._arrays:
            self._arrays.extend((np.asarray(self.nodes), np.asarray(self.parts, float)))
        nodes, parts = self._arrays
        if len(nodes) == 1:
            return np.full(len(points), parts[0])
        points = np.maximum(points, nodes[0])
        high = np.searchsorted(nodes, points, side="right")
        high = np.minimum(np.maximum(high, 1), len(nodes) - 1)
        share = (points - nodes[high - 1]) / (nodes[high] - nodes[high - 1])
        return (1.0 - share) * parts[high - 1] + share * parts[high]

    def rows(self, point: Sequence[float]) -> list[tuple[Ragged, float]]:
        """The tables that are left when all axes but the last are fixed, with their weights."""
        return [(part, weight) for part, weight in self._cut(point) if isinstance(part, Ragged)]

    def ends(self) -> tuple[int, ...]:
        """The last node of each axis, over all tables."""
        inner = zip(*(part.ends() for part in self.parts if isinstance(part, Ragged)), strict=True)
        return (self.nodes[-1], *map(max, inner))

    def _cut(self, point: Sequence[float]) -> list[tuple[float | Ragged, float]]:
        first, rest = point[0], point[1:]
        found: list[tuple[float | Ragged, float]] = []
        for index, weight in hats(self.nodes, max(first, self.nodes[0])):
            if not weight:
                continue
            part = self.parts[index]
            if rest and isinstance(part, Ragged):
                found += [(leaf, weight * inner) for leaf, inner in part._cut(rest)]
            else:
                found.append((part, weight))
        return found

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Ragged:
        """From rows of coordinates with the value last; the last of equal ones counts.

        ValueError for a value that is no time.
        """
        groups: dict[int, list[Sequence[float]]] = {}
        for row in rows:
            groups.setdefault(int(row[0]), []).append(row[1:])
        nodes = tuple(sorted(groups))
        parts = [groups[node] for node in nodes]
        check_times(part[-1][0] for part in parts if len(part[0]) == 1)
        return cls(nodes, tuple(p[-1][0] if len(p[0]) == 1 else cls.of(p) for p in parts))


class Watch:
    """Counts, per axis, the points beyond a table's last node, and says so once in the log."""

    def __init__(self, name: str, table: Ragged, axes: Sequence[str]) -> None:
        self.outside: dict[str, int] = {}
        ends = zip(axes, table.ends(), strict=True)
        self._ends = [(f"{name} by {axis}", end) for axis, end in ends]

    def look(self, point: Sequence[float]) -> None:
        """A point is asked for."""
        for (name, end), x in zip(self._ends, point, strict=True):
            if x > end:
                if name not in self.outside:
                    warn_beyond(name, x)
                self.outside[name] = self.outside.get(name, 0) + 1
