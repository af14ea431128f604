"""Recorded arrival times from the layouts in which traces are published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# column or key -> nanoseconds per unit
UNITS_NS = {
    "arrival_ns": 1,
    "arrival_time_ns": 1,  # LLMServingSim
    "arrival_s": 1_000_000_000,
    "arrived_at": 1_000_000_000,  # Vidur
    "Timestamp": 1_000_000_000,  # BurstGPT
    "timestamp": 1_000_000,  # Mooncake JSON lines: milliseconds
}
DATES = "TIMESTAMP"  # Azure: date and time as text


def read_times_ns(path: str | Path) -> npt.NDArray[np.int64]:
    """Arrival times in file order, integer nanoseconds.

    Reads .parquet, .csv and .jsonl with one of the columns above. Sources: Azure LLM inference
    traces (TIMESTAMP), BurstGPT (Timestamp), Mooncake (timestamp in ms), our own tables.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file of recorded arrivals")
    columns = _columns(path)
    for name, unit_ns in UNITS_NS.items():
        if name in columns:
            return _in_ns(path, name, columns[name], unit_ns)
    if DATES in columns:
        return _dates_ns(path, columns[DATES])
    wanted = ", ".join([*UNITS_NS, DATES])
    raise ValueError(f"{path}: no column of arrival times; it needs one of {wanted}")


def _columns(path: Path) -> dict[str, list[Any]]:
    if path.suffix == ".jsonl":
        return _json_columns(path)
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{path}: recorded arrivals are read from .parquet, .csv or .jsonl")
    from traces.tables import read_table

    table = read_table(path)
    names = [name for name in (*UNITS_NS, DATES) if name in table.column_names]
    return {name: table.column(name).to_pylist() for name in names[:1]}


def _json_columns(path: Path) -> dict[str, list[Any]]:
    rows = list(_json_rows(path))
    known = [name for name in UNITS_NS if rows and name in rows[0]]
    return {name: [row.get(name) for row in rows] for name in known[:1]}


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: line {number} is not JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} is not an object")
            yield row


def _in_ns(path: Path, name: str, values: list[Any], unit_ns: int) -> npt.NDArray[np.int64]:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value == value:
            raise ValueError(f"{path}: row {row}: {name} is {value!r}, not a number")
    # integers stay integers: a float holds no more than 104 days of nanoseconds exactly
    return np.asarray([round(value * unit_ns) for value in values], dtype=np.int64)


def _dates_ns(path: Path, values: list[Any]) -> npt.NDArray[np.int64]:
    try:
        return np.asarray(values, dtype="datetime64[ns]").astype(np.int64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {DATES} is not all date and time ({error})") from error
