"""Distributions and parity: frames to draw, and one function to draw each."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log10
from typing import Any

import numpy as np
import pandas as pd

from analysis.causes import matched_steps
from analysis.figures.style import (
    BLACK,
    MEASUREMENT_S,
    PREDICTION_S,
    RUNS,
    axes,
    group_color,
    line,
    opacity,
)
from analysis.metric_names import MEASUREMENT
from analysis.metrics import samples
from analysis.run import Run
from analysis.units import axis_scale, wide_scale

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end-to-end latency",
    "norm_latency": "normalised latency",
}
DENSE = 1500  # a scatter of more points is drawn as pixels rather than as paths
GRID = 201  # quantiles of a distribution function
TICKS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,))  # of a decade, from a narrow range to a wide one
MOST_TICKS = 6  # labels that an axis has room for
NARROW = 4  # of an axis among four
WIDE = 8  # ratio of largest to smallest from which an axis is logarithmic


def ecdf_data(runs: Mapping[str, Run], metric: str) -> pd.DataFrame:
    """Quantiles on an even grid: columns metric, run, share, seconds."""
    share = np.linspace(0, 1, GRID)
    parts = []
    for name, run in runs.items():
        values = samples(run)[metric]
        if len(values):
            seconds = np.quantile(values, share, method="linear")
            parts.append(pd.DataFrame({"run": name, "share": share, "seconds": seconds}))
    empty = pd.DataFrame(columns=["run", "share", "seconds"])
    return (pd.concat(parts) if parts else empty).assign(metric=metric)


def plot_ecdf(data: pd.DataFrame, ax: Any = None) -> Any:
    """Distribution function of one latency, a curve per run."""
    ax, scale = axes(ax), wide_scale(data["seconds"], "s")
    for name, part in data.groupby("run", sort=False):
        ax.plot(scale.of(part["seconds"]), part["share"], label=name, **line(str(name)))
    if len(data):
        low, high = (scale.of(float(end)) for end in (data["seconds"].min(), data["seconds"].max()))
        if low > 0 and high / low > WIDE:
            ax.set_xscale("log")
            plain_ticks(ax.xaxis, low, high, NARROW)
        ax.set_title(NAMES[str(data["metric"].iloc[0])])
        ax.legend(loc="lower right")
    ax.set(xlabel=f"latency, {scale.unit}", ylabel="share at or below", ylim=(0, 1.02))
    return ax


def parity_data(requests: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Columns metric, request_id, prediction_s, measurement_s, of comparison.requests."""
    columns = {f"{metric}_s_{run}": f"{run}_s" for run in RUNS}
    rows = requests[list(columns)].rename(columns=columns).dropna()
    return rows.rename_axis("request_id").reset_index().assign(metric=metric)


def plot_parity(data: pd.DataFrame, ax: Any = None) -> Any:
    """Predicted against measured with y = x and bands of 10 and 20 %; coloured by `group`.

    Both axes are logarithmic: equal relative errors lie equally far from the line.
    """
    ax = axes(ax)
    rows = data[(data[PREDICTION_S] > 0) & (data[MEASUREMENT_S] > 0)]
    if rows.empty:
        return ax
    kept = rows[[PREDICTION_S, MEASUREMENT_S]].to_numpy(float)
    scale = wide_scale(kept.flat, "s")
    values = scale.of(kept)
    low, high = float(values.min()) * 0.8, float(values.max()) * 1.2
    ends = np.geomspace(low, high, 50)
    for band, shade in ((0.2, 0.10), (0.1, 0.16)):
        ax.fill_between(ends, ends * (1 - band), ends * (1 + band), color=BLACK, alpha=shade, lw=0)
    ax.plot(ends, ends, color=BLACK, linewidth=0.8)
    groups = rows["group"] if "group" in rows else pd.Series("", index=rows.index)
    for name, part in rows.groupby(groups):
        color = group_color(str(name)) if name else RUNS[MEASUREMENT]["color"]
        style = {"s": 10, "linewidths": 0, "rasterized": len(rows) > DENSE}
        at = scale.of(part[MEASUREMENT_S]), scale.of(part[PREDICTION_S])
        ax.scatter(*at, color=color, label=name or None, alpha=opacity(len(part)), **style)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        plain_ticks(axis, low, high)
    ax.set(xlabel=f"measured, {scale.unit}", ylabel=f"predicted, {scale.unit}")
    ax.set_box_aspect(1)
    return ax


def step_data(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Durations of operations of plans that both runs have in common."""
    rows = matched_steps(prediction, measurement)
    columns = {f"duration_s_{run}": f"{run}_s" for run in RUNS} | {"index": "plan"}
    rows = rows.rename(columns=columns).assign(at_s=rows["start_ns_measurement"] / 1e9)
    return rows[["plan", "lane", "group", "at_s", PREDICTION_S, MEASUREMENT_S]]


def plot_step_time(data: pd.DataFrame, ax: Any = None) -> Any:
    """Signed error of each operation over the measured time: drift shows as a slope."""
    ax = axes(ax)
    rows = data[data[MEASUREMENT_S] > 0]
    error = 100 * (rows[PREDICTION_S] - rows[MEASUREMENT_S]) / rows[MEASUREMENT_S]
    scale = axis_scale(rows["at_s"], "s")
    for name, part in rows.groupby("group"):
        style: dict[str, Any] = {"s": 8, "linewidths": 0, "rasterized": len(rows) > DENSE}
        style |= {"color": group_color(str(name)), "alpha": opacity(len(part))}
        ax.scatter(scale.of(part["at_s"]), error[part.index], **style)
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(xlabel=f"measured time, {scale.unit}", ylabel="error of the prediction, %")
    if len(error):
        limit = max(10.0, float(np.percentile(np.abs(error), 99)) * 1.3)
        ax.set_ylim(-limit, limit)
    return ax


def plain_ticks(axis: Any, low: float, high: float, most: int = MOST_TICKS) -> None:
    """Sets ticks of a logarithmic axis as plain numbers: 0.02 rather than a power of ten."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    axis.set_major_locator(FixedLocator(round_values(low, high, most)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def round_values(low: float, high: float, most: int = MOST_TICKS) -> list[float]:
    """At most so many round numbers from low to high, evenly apart on a logarithmic axis.

    Matplotlib's own locator has no upper limit on narrow ranges, so its labels overlap.
    """
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    found: list[float] = []
    for steps in TICKS:
        values = [float(f"{step}e{power}") for power in decades for step in steps]
        found = [value for value in values if low <= value <= high]
        if len(found) <= most:
            break
    return found[:: ceil(len(found) / most)]
