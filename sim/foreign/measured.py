"""Tables of measured times as others keep them: each time is one, or the row of it is named."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


def read_times(path: Path, columns: Sequence[str], times: Sequence[str]) -> Any:
    """A frame of a .csv, .csv.gz or .parquet file that has these columns.

    ValueError in one line with the file where it cannot be read, lacks a column, or has in a row
    no time where one of `times` should be.
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
    """ValueError for the first time that is missing, no finite number or below zero, by its row.

    Rows count from 1; those of a table over two axes are told by both.
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
