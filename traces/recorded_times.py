"""Recorded arrival times from the layouts in which traces are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.tables import read_columns
from traces.units import MAX_NS, UNITS_NS, unit_of

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


def read_times_ns(path: str | Path) -> npt.NDArray[np.int64]:
    """Arrival times in file order, integer nanoseconds.

    Reads .parquet, .csv and .jsonl with one of the columns above. Sources: Azure LLM inference
    traces (TIMESTAMP), BurstGPT (Timestamp), Mooncake (timestamp in ms or s), our own tables.
    """
    path = Path(path)
    times = times_in(path, read_columns(path, TIME_COLUMNS))
    if times is None:
        wanted = ", ".join(TIME_COLUMNS)
        raise ValueError(f"{path}: no column of arrival times; it needs one of {wanted}")
    return times


def times_in(path: Path, columns: dict[str, list[Any]]) -> npt.NDArray[np.int64] | None:
    """The arrival times among columns already read from `path`, None if there are none."""
    for name, unit_ns in COLUMNS_NS.items():
        if name in columns:
            unit_ns = unit_ns or UNITS_NS[unit_of(columns[name])[0]]
            return in_order(path, _in_ns(path, name, columns[name], unit_ns))
    return in_order(path, _dates_ns(path, columns[DATES])) if DATES in columns else None


def in_order(where: str | Path, times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same times, if they never decrease."""
    if np.any(np.diff(times_ns) < 0):
        raise ValueError(f"{where}: arrivals go back in time; sort them first")
    return times_ns


def _in_ns(path: Path, name: str, values: list[Any], unit_ns: int) -> npt.NDArray[np.int64]:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value == value:
            raise ValueError(f"{path}: row {row}: {name} is {value!r}, not a number")
        if not abs(value) < MAX_NS / unit_ns:
            raise ValueError(f"{path}: row {row}: {name} is {value!r}, out of range")
    # integers stay integers: a float holds no more than 104 days of nanoseconds exactly
    return np.asarray([round(value * unit_ns) for value in values], dtype=np.int64)


def _dates_ns(path: Path, values: list[Any]) -> npt.NDArray[np.int64]:
    try:
        return np.asarray(values, dtype="datetime64[ns]").astype(np.int64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {DATES} is not all date and time ({error})") from error
