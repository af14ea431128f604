"""Recorded arrival times from the layouts in which traces are published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traces.cells import Unusable, at_ns, nanoseconds
from traces.tables import read_columns
from traces.units import UNITS_NS, unit_of

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


class Stamps(NamedTuple):
    """The column of a table that says when, and how one of its cells is read."""

    column: str
    cells: Sequence[Any]
    in_ns: Callable[[Any], int]  # raises Unusable


def stamps_in(cells: Mapping[str, Sequence[Any]]) -> Stamps | None:
    """The times among the columns of a table, None if there are none."""
    column = next((name for name in TIME_COLUMNS if name in cells), None)
    if column is None:
        return None
    if column == DATES:
        return Stamps(column, cells[column], at_ns)
    unit_ns = COLUMNS_NS[column] or UNITS_NS[unit_of(cells[column])[0]]
    return Stamps(column, cells[column], partial(nanoseconds, unit_ns=unit_ns))


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
