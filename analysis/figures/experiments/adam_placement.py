"""Placement of Adam: on the host, on the device, or on the device as far as the margin goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, bytes_axis, finished, plot_lines
from analysis.figures.run_figures import Shown, panel

TEXT = (
    "Adam placement",
    "Settled step (left) and the share of updates that ran on the device (right) over the "
    "device's memory, with updates on the host, on the device, or by PatrickStar's margin: on "
    "the device as far as states have room beside the peak of activations.",
)


def adam_placement_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, updates (as configured), device_bytes, device_share (of updates, in percent),
    copied_bytes, step_s."""
    rows = finished(runs)
    out = pd.DataFrame({"policy": rows["policy"], "updates": rows["config.memory.updates"]})
    out["device_bytes"] = rows["config.budget.device_bytes"].astype(float)
    out["device_share"] = 100 * rows["device_update_share"]
    out["copied_bytes"] = rows["train_step_copied_bytes"]
    out["step_s"] = rows["mean_train_step_s"]
    return out.sort_values(["updates", "device_bytes"]).reset_index(drop=True)


def plot_adam_placement(data: pd.DataFrame, ax: Any) -> Any:
    """On the first of two axes the step time, on the second the share of updates."""
    x = bytes_axis(data, "device_bytes", "device memory")
    y = FigureAxis("device_share", "updates on the device, %")
    if ax.get_subplotspec().is_first_col():
        y = FigureAxis("step_s", "step, s")
    return plot_lines(data, ax, x, y, "updates")


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    data = adam_placement_data(runs)
    parts, size = [data, data], (10.5, 3.4)
    return panel("adam_placement", parts, plot_adam_placement, size, folder, text=TEXT)
