"""Losses and step times of training, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.figures.style import axes, legend, line
from analysis.run import Run
from analysis.training import training_steps
from analysis.units import Scale, scale_of

SHOWN = {"loss": "loss", "step_s": "duration of a step"}
TEXT = (
    "Training",
    "Loss and duration of each step. A step lasts from the end of the one before it; the first "
    "warms up. A simulation computes no losses.",
)


def training_data(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Columns run, job_id, step, tokens, loss (NaN in a simulation), step_s."""
    parts = [training_steps(run).assign(run=name) for name, run in runs.items()]
    columns = ["run", "job_id", "step", "tokens", "loss", "step_s"]
    return pd.concat(parts, ignore_index=True)[columns]


def shown(data: pd.DataFrame) -> list[str]:
    """The columns of `training_data` with any value to draw."""
    return [name for name in SHOWN if data[name].notna().any()]


def plot_training(data: pd.DataFrame, ax: Any = None, column: str = "loss") -> Any:
    """One column over steps, a curve per run and job."""
    ax, is_time = axes(ax), column.endswith("_s")
    scale = scale_of(data[column], "s") if is_time else Scale("")
    for (run, job_id), part in data.groupby(["run", "job_id"], sort=False):
        rows = part.dropna(subset=[column])
        if rows.empty:
            continue
        name = str(run) if data["job_id"].nunique() == 1 else f"{run}, job {job_id}"
        ax.plot(rows["step"], scale.of(rows[column]), label=name, **line(str(run)))
    ax.set(xlabel="step", ylabel=f"{SHOWN[column]}, {scale.unit}" if is_time else SHOWN[column])
    ax.xaxis.get_major_locator().set_params(integer=True)
    if is_time:
        ax.set_ylim(0, 1.1 * ax.dataLim.y1 if data[column].notna().any() else None)
    legend(ax, loc="lower right" if is_time else "upper right")
    return ax
