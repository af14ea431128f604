"""A piecewise linear table whose inner axes may differ from row to row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sim.table import Nodes, hats


@dataclass(frozen=True, slots=True)
class Ragged:
    """Nodes of the first axis, and for each a value or the table of the axes after it."""

    nodes: Nodes
    parts: tuple[float | Ragged, ...]

    def value(self, point: Sequence[float]) -> float:
        """Straight between nodes and beyond the last; before the first, its value."""
        total, rest = 0.0, point[1:]
        for index, weight in hats(self.nodes, max(point[0], self.nodes[0])):
            if weight:
                part = self.parts[index]
                total += weight * (part.value(rest) if isinstance(part, Ragged) else part)
        return total

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Ragged:
        """From rows of coordinates with the value last; the last of equal ones counts."""
        groups: dict[int, list[Sequence[float]]] = {}
        for row in rows:
            groups.setdefault(int(row[0]), []).append(row[1:])
        nodes = tuple(sorted(groups))
        parts = [groups[node] for node in nodes]
        return cls(nodes, tuple(p[-1][0] if len(p[0]) == 1 else cls.of(p) for p in parts))
