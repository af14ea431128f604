"""Measured times in files of other projects: read and checked, with the row of a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read_times(path: Path, columns: Sequence[str], times: Sequence[str]) -> dict[str, Any]:
    """Columns of a .csv or .csv.gz file.

    Args:
        path: the file.
        columns: columns that it must have.
        times: columns that must hold times as well.

    Returns:
        An array for each of these columns, in the file's units.

    Raises:
        ValueError: the file is damaged, lacks a column, or a cell of `times` is no time.
    """
    import pyarrow as pa
    import pyarrow.csv

    try:
        table = pyarrow.csv.read_csv(path)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise _damaged(path, error) from error
    _check_columns(path, table.column_names, (*columns, *times))
    # by lists, as to_numpy imports pandas
    found = {n: np.array(table[n].to_pylist()) for n in dict.fromkeys((*columns, *times))}
    for name in times:
        check_measured(found[name], f"{path}, column {name}")
    return found


def read_frame(path: Path, times: Sequence[str]) -> Any:
    """A pandas frame of a .parquet file; otherwise as `read_times`."""
    import pandas as pd

    try:
        frame: Any = pd.read_parquet(path)
    except (ValueError, OSError, EOFError) as error:
        raise _damaged(path, error) from error
    _check_columns(path, frame.columns, times)
    for name in times:
        check_measured(frame[name], f"{path}, column {name}")
    return frame


def _check_columns(path: Path, there: Sequence[str], wanted: Sequence[str]) -> None:
    """ValueError where a wanted column is not there, or there twice."""
    names = list(there)
    if missing := {*wanted} - {*names}:
        raise ValueError(f"{path} lacks column {', '.join(sorted(missing))}; take its original")
    if doubled := sorted(name for name in {*wanted} if names.count(name) > 1):
        raise ValueError(f"{path} has column {doubled[0]} twice; take its original")


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{path} is damaged ({reason}); take its original")


def check_measured(values: Any, where: str) -> None:
    """Checks that all values are finite and not below zero.

    Args:
        values: an array of one or two axes.
        where: file and column, for the message.

    Raises:
        ValueError: a value is not; the message names its row from 1 on, by both axes of a table.
    """
    try:
        times = np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not all are numbers ({error}); take its original") from error
    wrong = np.argwhere(~(np.isfinite(times) & (times >= 0)))
    if len(wrong):
        time, row = float(times[tuple(wrong[0])]), ", ".join(str(i + 1) for i in wrong[0])
        why = "below zero" if np.isfinite(time) else "no finite number"
        raise ValueError(
            f"{where}, row {row}: a cost is {time}, {why}; measure it again or leave it out"
        )
