"""ProTrain's knobs: the step and the memory of the device over chunks that persist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, bytes_axis, finished, plot_lines
from analysis.figures.run_figures import Shown, panel

TEXT = (
    "ProTrain's knobs",
    "Settled step (left) and peak of the device (right) over the chunks of layers that persist; a "
    "line for each number of layers that compute their activations again.",
)


def knob_surface_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, checkpoints, persistent, step_s, peak_bytes."""
    rows = finished(runs)
    out = pd.DataFrame({"policy": rows["policy"]})
    out["checkpoints"] = rows["config.planner.checkpoints"].astype(int)
    out["persistent"] = rows["config.planner.persistent"].astype(int)
    out["step_s"] = rows["mean_train_step_s"]
    out["peak_bytes"] = rows["peak_gpu0_used_bytes"]
    return out.sort_values(["checkpoints", "persistent"]).reset_index(drop=True)


def plot_knob_surface(data: pd.DataFrame, ax: Any) -> Any:
    """On the first of two axes the step time, on the second the peak of the device."""
    x = FigureAxis("persistent", "chunks that persist")
    y = bytes_axis(data, "peak_bytes", "peak of the device")
    if ax.get_subplotspec().is_first_col():
        y = FigureAxis("step_s", "step, ms", 1e-3)
    return plot_lines(data, ax, x, y, "checkpoints")


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    data = knob_surface_data(runs)
    parts, size = [data, data], (10.5, 3.4)
    return panel("knob_surface", parts, plot_knob_surface, size, folder, text=TEXT)
