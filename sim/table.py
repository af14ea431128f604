"""A piecewise linear table over one or two axes of integers, and its memory of answers."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import isfinite

Nodes = tuple[int, ...]
log = logging.getLogger(__name__)


def hats(nodes: Nodes, x: float) -> list[tuple[int, float]]:
    """The (node, weight) pairs of a point: straight between nodes, extended beyond both ends.

    Weights sum to one.
    """
    if len(nodes) == 1:
        return [(0, 1.0)]
    high = min(max(bisect_right(nodes, x), 1), len(nodes) - 1)
    part = (x - nodes[high - 1]) / (nodes[high] - nodes[high - 1])
    return [(high - 1, 1.0 - part), (high, part)]


def check_finite(values: Iterable[float]) -> None:
    """ValueError, with its row from 1 on, for a value that is no finite number."""
    for row, value in enumerate(values, 1):
        if not isfinite(value):
            raise ValueError(
                f"row {row}: a cost is {value}, no finite number; measure it again or leave it out"
            )


def check_times(values: Iterable[float]) -> None:
    """ValueError, with its row, for a measured time that is no finite number, or below zero."""
    times = list(values)
    check_finite(times)
    for row, time in enumerate(times, 1):
        if time < 0:
            raise ValueError(
                f"row {row}: a cost is {time}, below zero; measure it again or leave it out"
            )


def check_nodes(axes: Iterable[Nodes]) -> None:
    """ValueError for an axis whose nodes do not rise, or begin below zero."""
    for number, nodes in enumerate(axes, 1):
        if not nodes or min(nodes) < 0 or any(a >= b for a, b in pairwise(nodes)):
            raise ValueError(f"axis {number} does not rise from 0 or above; run tandem calibrate")


def warn_beyond(table: str, first: object) -> None:
    """Says in the log, for the first look-up outside a table, what that means and what helps."""
    log.warning(
        "cost table %s is extrapolated, first at %s: there predictions are guesses "
        "(provenance.json counts them, cost_extrapolated); where they matter, take a profile that "
        "reaches as far, or ask for less: shorter requests (`tandem trace import "
        "--max-total-tokens`), or units of training as large as the profile's",
        table,
        first,
    )


@dataclass(frozen=True, slots=True)
class Table:
    """Values (ns) at the product of the axes' nodes, the last axis fastest.

    ValueError for a value that is no finite number: predictions would be none either.
    """

    axes: tuple[Nodes, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        check_finite(self.values)

    def times(self, factor: float) -> Table:
        """The same with all values times a factor."""
        return Table(self.axes, tuple([value * factor for value in self.values]))

    def weights(self, point: Sequence[float]) -> list[tuple[int, float]]:
        """The (index of value, weight) pairs of a point."""
        sides = [hats(nodes, x) for nodes, x in zip(self.axes, point, strict=True)]
        found = []
        for corner in product(*sides):
            index, weight = 0, 1.0
            for nodes, (node, part) in zip(self.axes, corner, strict=True):
                index, weight = index * len(nodes) + node, weight * part
            found.append((index, weight))
        return found

    def value(self, point: Sequence[float]) -> float:
        """Nanoseconds at a point; never below zero, also far outside."""
        return max(0.0, sum([self.values[i] * weight for i, weight in self.weights(point)]))

    def covers(self, point: Sequence[float]) -> bool:
        """Whether the point lies between the first and the last node of each axis."""
        return all(n[0] <= x <= n[-1] for n, x in zip(self.axes, point, strict=True))


class Lookup(dict[int | tuple[int, int], float]):
    """Answers of a table by whole numbers, computed on first use.

    Outside the grid it extrapolates, counts the point once and says so once in the log.
    """

    def __init__(self, name: str, table: Table, units: Sequence[str] = ()) -> None:
        """`units`: what each axis counts, for the log."""
        super().__init__()
        self.name, self.table, self.units = name, table, units
        self.outside = 0  # distinct points asked for that the grid does not cover

    def __missing__(self, key: int | tuple[int, int]) -> float:
        point = key if isinstance(key, tuple) else (key,)
        if not self.table.covers(point):
            if not self.outside:
                warn_beyond(self.name, self._told(point))
            self.outside += 1
        value = self[key] = self.table.value(point)
        return value

    def _told(self, point: Sequence[int]) -> str:
        """The point, and where the grid ends."""
        units = self.units or ("",) * len(point)
        shown = [f"{x} {unit}".strip() for x, unit in zip(point, units, strict=True)]
        ends = [f"{nodes[0]} to {nodes[-1]}" for nodes in self.table.axes]
        return f"{', '.join(shown)} (it was fitted to {', '.join(ends)})"
