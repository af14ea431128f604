"""Measured over predicted durations at equal decisions, by kind of operation and by its size.

A simulation whose durations are scaled by these ratios (`duration_ratios` of a configuration) says
how much of a difference comes from durations, with all that they do to decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.causes import HOST, SIZES, matched_steps
from analysis.run import Run

LEAST = 10  # operations that a ratio rests on, where there are as many
MOST = {
    "slices": 16,
    "load": 8,
    "context": 4,
}  # ratios by each part of the size, within the ones before

Ratio = dict[str, Any]


def duration_ratios(replay: Run, measurement: Run) -> list[Ratio]:
    """Ratios of the durations of a replay of the measured plans, for its configuration.

    Rows are those of sim.cost.scaled.DurationRatio: group, ratio of sums (so that long operations
    weigh more), the least size that it is for, and what is added where nothing was predicted.
    """
    rows = matched_steps(replay, measurement)
    kinds = {str(name): part for name, part in rows.groupby("group")}
    found = [row for name, part in kinds.items() for row in _of_group({"group": name}, part)]
    host_s = [rows[f"host_s_{run}"] for run in ("prediction", "measurement")]
    is_plan = (host_s[0] > 0) | (host_s[1] > 0)
    return [*found, *_of_sums({"group": HOST}, *(part[is_plan] for part in host_s))]


def _of_group(where: Ratio, rows: pd.DataFrame, parts: Sequence[str] = SIZES) -> Iterator[Ratio]:
    """The ratios of operations by slices, within them by load, and within that by context."""
    if not parts:
        yield from _of_sums(where, rows["duration_s_prediction"], rows["duration_s_measurement"])
        return
    part, *others = parts
    for least, members in _buckets(rows[part].to_numpy(float), MOST[part]):
        yield from _of_group({**where, f"{part}_from": least}, rows[members], others)


def _buckets(values: NDArray[Any], most: int) -> Iterator[tuple[float, NDArray[Any]]]:
    """Least values of equally full buckets, the first from 0 on, and the members of each."""
    count = max(1, min(most, len(values) // LEAST))
    inner = np.quantile(values, np.arange(1, count) / count, method="higher")
    starts = np.unique([0.0, *inner])
    places = np.searchsorted(starts, values, side="right") - 1
    for number, start in enumerate(starts):
        members = places == number
        if members.any():
            yield float(start), members


def _of_sums(where: Ratio, predicted_s: pd.Series, measured_s: pd.Series) -> Iterator[Ratio]:
    """The ratio of two sums; where nothing was predicted, the mean that was measured is added."""
    if not len(measured_s):
        return
    total_s = float(predicted_s.sum())
    if total_s > 0:
        yield {**where, "ratio": float(measured_s.sum()) / total_s}
    elif measured_s.sum() > 0:
        yield {**where, "ratio": 1.0, "added_ns": float(measured_s.mean()) * 1e9}
