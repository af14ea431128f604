"""Measured times in files of other projects: read and checked, with the row of a wrong one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


def read_times(path: Path, columns: Sequence[str], times: Sequence[str]) -> Any:
    """A frame of a .csv, .csv.gz or .parquet file.

    Args:
        path: the file.
        columns: columns that it must have.
        times: columns that must hold times as well.

    Returns:
        The frame, in the file's units.

    Raises:
        ValueError: the file is damaged, lacks a column, or a cell of `times` is no time.
    """
    try:
        frame: Any = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged ({reason}); take its original") from error
    if not isinstance(frame.index, pd.RangeIndex):
        raise ValueError(f"{path} is damaged (rows are longer than its head); take its original")
    if missing := {*columns, *times} - {*frame.columns}:
        raise ValueError(f"{path} lacks column {', '.join(sorted(missing))}; take its original")
    for name in times:
        check_measured(frame[name], f"{path}, column {name}")
    return frame


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
