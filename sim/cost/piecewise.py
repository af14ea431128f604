"""Piecewise linear tables over integers, and look-ups that remember their answers."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import isfinite
from typing import Any

import numpy as np

Nodes = tuple[int, ...]
log = logging.getLogger(__name__)


def hats(nodes: Nodes, x: float) -> list[tuple[int, float]]:
    """Linear interpolation on one axis, extended beyond both ends.

    Args:
        nodes: rising coordinates.
        x: the point.

    Returns:
        (index of node, weight) pairs; weights sum to one.
    """
    if len(nodes) == 1:
        return [(0, 1.0)]
    high = min(max(bisect_right(nodes, x), 1), len(nodes) - 1)
    part = (x - nodes[high - 1]) / (nodes[high] - nodes[high - 1])
    return [(high - 1, 1.0 - part), (high, part)]


def check_finite(values: Iterable[float]) -> None:
    """Checks that values are finite numbers.

    Args:
        values: costs, in any unit.

    Raises:
        ValueError: a value is not; the message names its row, from 1 on.
    """
    for row, value in enumerate(values, 1):
        if not isfinite(value):
            raise ValueError(
                f"row {row}: a cost is {value}, no finite number; measure it again or leave it out"
            )


def check_times(values: Iterable[float]) -> None:
    """Checks that measured times are finite and not below zero.

    Args:
        values: times, in any unit.

    Raises:
        ValueError: a value is not; the message names its row, from 1 on.
    """
    times = list(values)
    check_finite(times)
    for row, time in enumerate(times, 1):
        if time < 0:
            raise ValueError(
                f"row {row}: a cost is {time}, below zero; measure it again or leave it out"
            )


def check_nodes(axes: Iterable[Nodes]) -> None:
    """Checks that the nodes of each axis rise from 0 or above.

    Args:
        axes: the nodes of each axis.

    Raises:
        ValueError: an axis is empty, does not rise, or begins below zero.
    """
    for number, nodes in enumerate(axes, 1):
        if not nodes or min(nodes) < 0 or any(a >= b for a, b in pairwise(nodes)):
            raise ValueError(f"axis {number} does not rise from 0 or above; run tandem calibrate")


def warn_beyond(table: str, first: object) -> None:
    """Warns in the log of the first look-up outside a table, with a remedy.

    Args:
        table: the table's name.
        first: the point that was asked for.
    """
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
    """A piecewise linear function: values at the product of the axes' nodes.

    axes    rising nodes per axis
    values  nanoseconds per node, the last axis fastest

    Raises:
        ValueError: a value is no finite number: predictions would be none either.
    """

    axes: tuple[Nodes, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        check_finite(self.values)

    def times(self, factor: float) -> Table:
        """This table with all values multiplied.

        Args:
            factor: the multiplier.

        Returns:
            A new table on the same nodes.
        """
        return Table(self.axes, tuple([value * factor for value in self.values]))

    def weights(self, point: Sequence[float]) -> list[tuple[int, float]]:
        """Multilinear interpolation at a point.

        Args:
            point: one coordinate per axis.

        Returns:
            (index of value, weight) pairs; weights sum to one.
        """
        sides = [hats(nodes, x) for nodes, x in zip(self.axes, point, strict=True)]
        found = []
        for corner in product(*sides):
            index, weight = 0, 1.0
            for nodes, (node, part) in zip(self.axes, corner, strict=True):
                index, weight = index * len(nodes) + node, weight * part
            found.append((index, weight))
        return found

    def value(self, point: Sequence[float]) -> float:
        """The function's value.

        Args:
            point: one coordinate per axis; outside the nodes the table extrapolates.

        Returns:
            Nanoseconds, never below zero.
        """
        return max(0.0, sum([self.values[i] * weight for i, weight in self.weights(point)]))

    def covers(self, point: Sequence[float]) -> bool:
        """Whether a point lies between the first and the last node of each axis.

        Args:
            point: one coordinate per axis.

        Returns:
            False where `value` would extrapolate.
        """
        return all(n[0] <= x <= n[-1] for n, x in zip(self.axes, point, strict=True))


class Lookup(dict[int | tuple[int, int], float]):
    """Values of a table in nanoseconds by integer point, computed on first use.

    Outside the grid it extrapolates, counts each point once and warns once in the log.
    """

    def __init__(self, name: str, table: Table, units: Sequence[str] = ()) -> None:
        """An empty memory of a table.

        Args:
            name: the table's name in the log.
            table: the table.
            units: unit of each axis in the log.
        """
        super().__init__()
        self.name, self.table, self.units = name, table, units
        self.outside = 0  # distinct points asked for that the grid does not cover
        self._known: Any = np.full(0, np.nan)  # values by point, for `values_of`

    def __missing__(self, key: int | tuple[int, int]) -> float:
        point = key if isinstance(key, tuple) else (key,)
        if not self.table.covers(point):
            if not self.outside:
                warn_beyond(self.name, self._told(point))
            self.outside += 1
        value = self[key] = self.table.value(point)
        return value

    def values_of(self, points: Any) -> Any:
        """Values at many points of a table of one axis.

        Args:
            points: array of whole coordinates from 0 on, of any shape.

        Returns:
            Array of nanoseconds of that shape: what each look-up gives.
        """
        if (more := int(points.max(initial=0)) + 1 - len(self._known)) > 0:
            self._known = np.pad(self._known, (0, more + len(self._known)), constant_values=np.nan)
        found = self._known[points]
        unknown = np.isnan(found)
        if unknown.any():
            for point in np.unique(points[unknown]).tolist():
                self._known[point] = self[point]
            found = self._known[points]
        return found

    def _told(self, point: Sequence[int]) -> str:
        """The point, and where the grid ends."""
        units = self.units or ("",) * len(point)
        shown = [f"{x} {unit}".strip() for x, unit in zip(point, units, strict=True)]
        ends = [f"{nodes[0]} to {nodes[-1]}" for nodes in self.table.axes]
        return f"{', '.join(shown)} (it was fitted to {', '.join(ends)})"


@dataclass(frozen=True)
class Ragged:
    """A piecewise linear function whose inner axes have nodes of their own at each outer node.

    nodes  rising nodes of the first axis
    parts  for each node a value, or the function of the remaining axes
    """

    nodes: Nodes
    parts: tuple[float | Ragged, ...]
    _arrays: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def value(self, point: Sequence[float]) -> float:
        """The function's value: straight between nodes and beyond the last, flat before the first.

        Args:
            point: one coordinate per axis.

        Returns:
            The value in the unit of the parts.
        """
        return sum([weight * part for part, weight in self._cut(point) if isinstance(part, float)])

    def values(self, points: Any) -> Any:
        """Values of a function of one axis.

        Args:
            points: array of coordinates, shape (n,).

        Returns:
            Array of values, shape (n,), equal to the bit to `value` at each.
        """
        return sum([weights * values for weights, values in self._around(points)])

    def _around(self, points: Any) -> list[tuple[Any, Any]]:
        """(weights, values) of the node below each point of the only axis, then of that above."""
        if not self._arrays:
            self._arrays.extend((np.asarray(self.nodes), np.asarray(self.parts, float)))
        nodes, parts = self._arrays
        if len(nodes) == 1:
            return [(1.0, np.full(len(points), parts[0]))]
        points = np.maximum(points, nodes[0])
        high = np.searchsorted(nodes, points, side="right")
        high = np.minimum(np.maximum(high, 1), len(nodes) - 1)
        share = (points - nodes[high - 1]) / (nodes[high] - nodes[high - 1])
        return [(1.0 - share, parts[high - 1]), (share, parts[high])]

    def values_at(self, point: Sequence[float], last: Any) -> Any:
        """Values along the last axis of a function of several.

        Args:
            point: one coordinate per axis but the last.
            last: array of coordinates on that one, shape (n,).

        Returns:
            Array of values, shape (n,), equal to the bit to `value` at each.
        """
        terms = ((w * share, v) for row, w in self.rows(point) for share, v in row._around(last))
        return sum([weights * values for weights, values in terms])

    def rows(self, point: Sequence[float]) -> list[tuple[Ragged, float]]:
        """The functions of the last axis that remain when all other axes are fixed.

        Args:
            point: one coordinate per axis but the last.

        Returns:
            (function, weight) pairs; the weighted sum of their values is `value`.
        """
        return [(part, weight) for part, weight in self._cut(point) if isinstance(part, Ragged)]

    def last_nodes(self) -> tuple[int, ...]:
        """The last node of each axis, over all parts.

        Returns:
            One coordinate per axis.
        """
        inner = zip(
            *(part.last_nodes() for part in self.parts if isinstance(part, Ragged)), strict=True
        )
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
        """Builds the function from measured rows.

        Args:
            rows: coordinates with the value last; of rows at one point the last counts.

        Returns:
            The function, in the unit of the values.

        Raises:
            ValueError: a value is no finite time.
        """
        groups: dict[int, list[Sequence[float]]] = {}
        for row in rows:
            groups.setdefault(int(row[0]), []).append(row[1:])
        nodes = tuple(sorted(groups))
        parts = [groups[node] for node in nodes]
        check_times(part[-1][0] for part in parts if len(part[0]) == 1)
        return cls(nodes, tuple(p[-1][0] if len(p[0]) == 1 else cls.of(p) for p in parts))


class Watch:
    """Counts, per axis, look-ups beyond a table's last node, and warns once in the log."""

    def __init__(self, name: str, table: Ragged, axes: Sequence[str]) -> None:
        """A watch without look-ups.

        Args:
            name: the table's name in the log.
            table: the table.
            axes: name of each axis.
        """
        self.outside: dict[str, int] = {}
        ends = zip(axes, table.last_nodes(), strict=True)
        self._ends = [(f"{name} by {axis}", end) for axis, end in ends]

    def look(self, point: Sequence[float]) -> None:
        """Counts a look-up.

        Args:
            point: one coordinate per axis.
        """
        for (name, end), x in zip(self._ends, point, strict=True):
            if x > end:
                if name not in self.outside:
                    warn_beyond(name, x)
                self.outside[name] = self.outside.get(name, 0) + 1

    def look_along(self, point: Sequence[float], last: Any) -> None:
        """Counts look-ups at points in a row.

        Args:
            point: their common coordinates, one per axis but the last.
            last: array of their rising coordinates on that one.
        """
        ends = zip((*point, last[-1]), self._ends, strict=True)
        if any([x > end for x, (_, end) in ends]):
            for x in last.tolist():
                self.look((*point, x))
