"""Recorded arrival times: layouts, units, and stamps that a coarse clock put into buckets."""

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
# A mean gap of 10 units is 100 requests/s in ms, and one request in 10 s in s. The unit of a trace
# between these two rates is found correctly.
MS_GAP = 10
TimesNs = npt.NDArray[np.int64]
MIN_REPEATED = 0.5  # share of stamps that equal the stamp before
MIN_IN_STEP = 0.95  # share of gaps of distinct stamps that are multiples of the bucket,
OFF_STEP = 0.01  # within this share of it: published stamps deviate by milliseconds in 3 s
# nanoseconds per unit of each column or key
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


def unit_of(stamps: Sequence[Any]) -> tuple[str, str]:
    """The unit of time stamps and the reason for it, by the mean gap; ms where it cannot tell."""
    known = [s for s in map(number_in, stamps) if s is not None and abs(s) < MAX_NS]
    if len(known) < 2 or max(known) == min(known):
        return "ms", "too few stamps to tell"
    gap = (max(known) - min(known)) / (len(known) - 1)
    return "ms" if gap >= MS_GAP else "s", f"mean gap of {gap:.4g} units"


def bucket_ns(times_ns: TimesNs) -> int | None:
    """The width of the buckets that sorted times were rounded to, in ns; None where there are none.

    Rounded stamps repeat, and their gaps are multiples of one width, the median gap. Buckets need
    three distinct stamps, and at least half of all stamps repeated.
    """
    gaps = np.diff(np.unique(times_ns))
    if len(gaps) < 2 or np.mean(np.diff(times_ns) == 0) < MIN_REPEATED:
        return None
    width = float(np.median(gaps))
    multiples = gaps / width
    is_in_step = np.abs(multiples - np.rint(multiples)) <= OFF_STEP * np.rint(multiples)
    return round(width) if np.mean(is_in_step) >= MIN_IN_STEP else None


def spread_inside(times_ns: TimesNs, width_ns: int, seed: int) -> TimesNs:
    """Sorted times, drawn uniformly inside [stamp, stamp + width) for the requests of each stamp.

    A stamp is the start of its bucket, and no time passes the next stamp.
    """
    stamps, counts = np.unique(times_ns, return_counts=True)
    ends = np.minimum(stamps + width_ns, np.append(stamps[1:], stamps[-1] + width_ns))
    start, room = (np.repeat(values, counts) for values in (stamps, ends - stamps))
    drawn: TimesNs = start + (np.random.default_rng(seed).random(len(times_ns)) * room).astype(
        np.int64
    )
    drawn.sort()  # buckets do not overlap, so no time leaves its own
    return drawn


class RecordedTimes(NamedTuple):
    """The column of arrival times of a table, and the reader of its cells."""

    column: str
    cells: Sequence[Any]
    in_ns: Callable[[Any], int]  # raises Unusable


def stamps_in(cells: Mapping[str, Sequence[Any]]) -> RecordedTimes | None:
    """The arrival times among the columns of a table; None where no column has any."""
    column = next((name for name in TIME_COLUMNS if name in cells), None)
    if column is None:
        return None
    if column == DATES:
        return RecordedTimes(column, cells[column], at_ns)
    unit_ns = COLUMNS_NS[column] or UNITS_NS[unit_of(cells[column])[0]]
    return RecordedTimes(column, cells[column], partial(nanoseconds, unit_ns=unit_ns))


def read_times_ns(path: str | Path) -> npt.NDArray[np.int64]:
    """Arrival times of a .csv, .parquet or .jsonl in file order, in integer nanoseconds.

    The column is one of TIME_COLUMNS. Raises ValueError for a line without a time, and for times
    that decrease.
    """
    path = Path(path)
    table = read_columns(path, TIME_COLUMNS)
    if table.malformed:
        raise ValueError(f"{path}: line {table.malformed[0]} cannot be read; repair it")
    stamps = stamps_in(table.cells)
    if stamps is None:
        known = ", ".join(TIME_COLUMNS)
        raise ValueError(f"{path}: no column of arrival times; it needs one of {known}")
    times = []
    for line, cell in zip(table.lines, stamps.cells, strict=True):
        try:
            times.append(stamps.in_ns(cell))
        except Unusable as fault:
            raise ValueError(f"{path}: line {line}: {stamps.column}: {fault}") from fault
    return in_order(path, np.asarray(times, dtype=np.int64))


def in_order(where: str | Path, times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The times, checked: raises ValueError where they decrease."""
    if np.any(np.diff(times_ns) < 0):
        raise ValueError(f"{where}: arrivals go back in time; sort them first")
    return times_ns
