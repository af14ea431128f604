"""Shared parts of experiments' figures: finished runs, units, lines in policies' colours."""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from analysis.figures.style import BLACK, BLUE, COLORS, GREEN, ORANGE, PINK, RED, SKY, axes, legend

OTHERS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK)
STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
COUNTS = {"G": ", billions", "M": ", millions", "k": ", thousands", "": ""}
FIRST = "train_steps"  # a metric of every run with training


class FigureAxis(NamedTuple):
    """A column of a frame with its label, the size of its unit, and whether its scale is a log."""

    column: str
    label: str
    unit: float = 1.0
    is_log: bool = False


def finished(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that trained to the end."""
    return runs[runs["status"].eq("ok") & runs[FIRST].notna()]


def scaled(values: pd.Series) -> tuple[float, str]:
    """A unit that suits the largest value, and its prefix: 1e9 is G."""
    largest = float(values.max()) if len(values) else 0.0
    return next((step for step in STEPS if largest >= step[0]), STEPS[-1])


def bytes_axis(data: pd.DataFrame, column: str, label: str, is_log: bool = False) -> FigureAxis:
    """A column of bytes, in GB, MB or kB."""
    unit, prefix = scaled(data[column])
    return FigureAxis(column, f"{label}, {prefix}B", unit, is_log)


def numbers_axis(data: pd.DataFrame, column: str, label: str) -> FigureAxis:
    """A column of counts, in billions or millions."""
    unit, prefix = scaled(data[column])
    return FigureAxis(column, f"{label}{COUNTS[prefix]}", unit)


def plot_lines(data: pd.DataFrame, ax: Any, x: FigureAxis, y: FigureAxis, by: str) -> Any:
    """A line per value of the column `by`, in the policy's colour if the value is a policy."""
    ax = axes(ax)
    for number, (name, part) in enumerate(data.groupby(by, sort=True)):
        rows = part.dropna(subset=[x.column, y.column]).sort_values(x.column)
        color = COLORS.get(str(name), OTHERS[number % len(OTHERS)])
        style = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.6}
        ax.plot(rows[x.column] / x.unit, rows[y.column] / y.unit, label=str(name), **style)
    for axis, name in ((x, "x"), (y, "y")):
        if axis.is_log:
            ax.set(**{f"{name}scale": "log"})
    ax.set(xlabel=x.label, ylabel=y.label)
    if not y.is_log:
        ax.set_ylim(bottom=0)
    if ax.get_subplotspec() is None or ax.get_subplotspec().is_last_col():
        legend(ax, loc="upper left", bbox_to_anchor=(1, 1))
    return ax
