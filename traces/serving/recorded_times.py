"""Recorded arrival times: layouts, units, and stamps of coarse clocks drawn apart again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.records import MAX_NS, Unusable, at_ns, nanoseconds, number_in
from traces.tables import read_columns

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


TimesNs = npt.NDArray[np.int64]
REPEATED = 0.5  # share of stamps that equal the one before
IN_STEP = 0.95  # share of the distinct stamps' gaps that are multiples of the bucket ...
OFF_STEP = 0.01  # ... to this much of it: published stamps wander by milliseconds in 3 s


def bucket_ns(times_ns: TimesNs) -> int | None:
    """The width of the buckets that sorted times were rounded to; None where they were not.

    Rounded stamps repeat, and lie apart by multiples of one width: their median gap. Needs three
    distinct stamps, and at least half of all stamps repeated.
    """
    gaps = np.diff(np.unique(times_ns))
    if len(gaps) < 2 or np.mean(np.diff(times_ns) == 0) < REPEATED:
        return None
    width = float(np.median(gaps))
    multiples = gaps / width
    is_in_step = np.abs(multiples - np.rint(multiples)) <= OFF_STEP * np.rint(multiples)
    return round(width) if np.mean(is_in_step) >= IN_STEP else None


def spread_inside(times_ns: TimesNs, width_ns: int, seed: int) -> TimesNs:
    """Sorted times, each stamp's requests uniformly inside [stamp, stamp + width), in their order.

    A stamp is taken for the start of its bucket; nothing passes the next stamp.
    """
    stamps, counts = np.unique(times_ns, return_counts=True)
    ends = np.minimum(stamps + width_ns, np.append(stamps[1:], stamps[-1] + width_ns))
    start, room = (np.repeat(values, counts) for values in (stamps, ends - stamps))
    drawn: TimesNs = start + (np.random.default_rng(seed).random(len(times_ns)) * room).astype(
        np.int64
    )
    drawn.sort()  # moves nothing out of its bucket, because these do not overlap
    return drawn


# column or key -> nanoseconds per unit
COLUMNS_NS = {
    "arrival_ns": 1,
    "arrival_time_ns": 1,  # LLMServingSim
    "arrival_s": 1_000_000_000,
    "arrived_at": 1_000_000_000,  # Vidur
    "Timestamp": 1_000_000_000,  # BurstGPT
    "timestamp": None,  # Mooncake JSON lines: milliseconds, or seconds as some write them
}
DATES = "TIMESTAMP"  # Azure: date and time as text
TIME_COLUMNS = (*COLUMNS_NS, DATES)


class RecordedTimes(NamedTuple):
    """The column of a table that says when, and how one of its cells is read."""

    column: str
    cells: Sequence[Any]
    in_ns: Callable[[Any], int]  # raises Unusable


def stamps_in(cells: Mapping[str, Sequence[Any]]) -> RecordedTimes | None:
    """The times among the columns of a table, None if there are none."""
    column = next((name for name in TIME_COLUMNS if name in cells), None)
    if column is None:
        return None
    if column == DATES:
        return RecordedTimes(column, cells[column], at_ns)
    unit_ns = COLUMNS_NS[column] or UNITS_NS[unit_of(cells[column])[0]]
    return RecordedTimes(column, cells[column], partial(nanoseconds, unit_ns=unit_ns))


def read_times_ns(path: str | Path) -> npt.NDArray[np.int64]:
    """Arrival times in file order, integer nanoseconds. ValueError for a line without one.

    Reads .csv, .parquet and .jsonl with one of the columns above. Sources: Azure LLM inference
    traces (TIMESTAMP), BurstGPT (Timestamp), Mooncake (timestamp in ms or s), our own tables.
    """
    path = Path(path)
    table = read_columns(path, TIME_COLUMNS)
    if table.malformed:
        raise ValueError(f"{path}: line {table.malformed[0]} cannot be read; mend it")
    stamps = stamps_in(table.cells)
    if stamps is None:
        wanted = ", ".join(TIME_COLUMNS)
        raise ValueError(f"{path}: no column of arrival times; it needs one of {wanted}")
    times = []
    for line, cell in zip(table.lines, stamps.cells, strict=True):
        try:
            times.append(stamps.in_ns(cell))
        except Unusable as fault:
            raise ValueError(f"{path}: line {line}: {stamps.column}: {fault}") from fault
    return in_order(path, np.asarray(times, dtype=np.int64))


def in_order(where: str | Path, times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same times, if they never decrease."""
    if np.any(np.diff(times_ns) < 0):
        raise ValueError(f"{where}: arrivals go back in time; sort them first")
    return times_ns
