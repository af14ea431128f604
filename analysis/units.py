"""One unit for numbers that are read together, by their size: a column, a row, an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Of each unit that numbers are kept in, those that they are shown in, from large to small.
UNITS = {
    "s": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)),
    "bytes": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)),
}
UNKNOWN = "n/a"


@dataclass(frozen=True)
class Scale:
    """The unit that numbers are shown in, and how large it is in the unit that they are kept in."""

    unit: str
    size: float = 1.0

    def of(self, values: Any) -> Any:
        """A number, an array or a column in this unit."""
        return values / self.size

    def text(self, value: float) -> str:
        """A number with its unit, to four digits."""
        if math.isnan(value):
            return UNKNOWN
        shown = value / self.size
        return f"{shown:,.0f} {self.unit}" if abs(shown) >= 1000 else f"{shown:.4g} {self.unit}"


def scale_of(values: Iterable[float], unit: str, least: float = 1.0) -> Scale:
    """The largest unit in which the middle one of these sizes is at least `least`.

    Args:
        values: numbers in `unit`; those that are 0 or unknown do not count.
        unit: s or bytes; any other unit stays as it is.
        least: below 1 where short labels of a wide range matter more than digits, as on an axis.

    Returns:
        The scale; without any number that of the unit itself, or of the smallest.
    """
    if unit not in UNITS:
        return Scale(unit)
    sizes = np.abs(np.asarray([*values], float))
    sizes = sizes[sizes > 0]  # neither zeros nor NaN
    if not len(sizes):
        return Scale(*UNITS[unit][0 if unit == "s" else -1])
    middle = float(np.median(sizes))
    found = next((one for one in UNITS[unit] if middle >= least * one[1]), UNITS[unit][-1])
    return Scale(*found)


def wide_scale(values: Iterable[float], unit: str) -> Scale:
    """The scale of an axis over a wide range: 0.5 to 50 ms rather than 500 to 50000 us."""
    return scale_of(values, unit, 0.3)


def axis_scale(values: Iterable[float], unit: str) -> Scale:
    """The scale of an axis that begins at zero: by its largest value."""
    known = [abs(float(value)) for value in values if value == value]
    return scale_of([max(known, default=0.0)], unit)


def amount(value: float, unit: str) -> str:
    """A number with a unit that suits its size."""
    return scale_of([value], unit).text(value)


def amounts(values: Sequence[float], unit: str) -> list[str]:
    """Numbers that are read together, in one unit."""
    scale = scale_of(values, unit)
    return [scale.text(value) for value in values]
