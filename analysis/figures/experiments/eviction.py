"""Eviction orders over the memory of the device: Belady's OPT, LRU and FIFO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, bytes_axis, finished, plot_lines
from analysis.figures.run_figures import Shown, panel

TEXT = (
    "Eviction",
    "Bytes copied between host and device in a settled step (left), and its duration (right), "
    "over the device's memory as a share of all model states. OPT knows the future.",
)


def eviction_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, order, device_bytes, share (percent of the states), copied_bytes, step_s."""
    rows = finished(runs)
    out = pd.DataFrame({"policy": rows["policy"], "order": rows["config.memory.order"]})
    out["device_bytes"] = rows["config.budget.device_bytes"].astype(float)
    out["share"] = 100 * out["device_bytes"] / rows["made.state_bytes"]
    out["copied_bytes"] = rows["train_step_copied_bytes"]
    out["step_s"] = rows["mean_train_step_s"]
    return out.sort_values(["order", "device_bytes"]).reset_index(drop=True)


def plot_eviction(data: pd.DataFrame, ax: Any) -> Any:
    """On the first of two axes copies, on the second the step time."""
    x = FigureAxis("share", "device memory, % of the model states")
    y = FigureAxis("step_s", "step, s")
    if ax.get_subplotspec().is_first_col():
        y = bytes_axis(data, "copied_bytes", "copied in a step")
    return plot_lines(data, ax, x, y, "policy")


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    data = eviction_data(runs)
    return panel("eviction", [data, data], plot_eviction, (10.5, 3.4), folder, text=TEXT)
