"""Whether time stamps without a unit count milliseconds or seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traces.cells import MAX_NS, number_in

UNITS_NS = {"ms": 1_000_000, "s": 1_000_000_000}
# Mean gap of 10 units: at most 100 requests/s if they are ms, at least one in 10 s if they are s.
# A trace between these two rates is told right whichever it is.
MS_GAP = 10


def unit_of(stamps: Sequence[Any]) -> tuple[str, str]:
    """Name of the unit and how it was told, from the mean gap. Mooncake's own files hold ms."""
    known = [s for s in map(number_in, stamps) if s is not None and abs(s) < MAX_NS]
    if len(known) < 2 or max(known) == min(known):
        return "ms", "too few stamps to tell"
    gap = (max(known) - min(known)) / (len(known) - 1)
    return "ms" if gap >= MS_GAP else "s", f"mean gap of {gap:.4g} units"
