"""ProTrain's configurations, foretold, simulated, measured: how far each step and peak is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, finished, plot_lines
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import GREY

KNOBS = ["checkpoints", "persistent"]
TEXT = (
    "Predicted against measured",
    "Error of the step that the planner foretells (left), of the simulated one (middle) and of the "
    "simulated peak of the device (right) over the chunks that persist; a line for each number of "
    "layers that compute again. Above 0 the prediction is too high.",
)
ERRORS = (
    ("planner_step_error", "step by the planner"),
    ("step_error", "simulated step"),
    ("peak_error", "simulated peak of the device"),
)


def estimator_error_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns checkpoints, persistent, predicted_s, measured_s, step_error, predicted_bytes,
    measured_bytes, peak_error, foretold_s, planner_step_error: a row for each configuration that
    was simulated and measured."""
    rows = finished(runs)
    out = pd.DataFrame({name: rows[f"config.planner.{name}"].astype(int) for name in KNOBS})
    out["s"], out["bytes"] = rows["mean_train_step_s"], rows["peak_gpu0_used_bytes"]
    is_predicted = rows["backend"].eq("sim")
    sides = [out[is_predicted], out[~is_predicted]]
    predicted, measured = [side.set_index(KNOBS) for side in sides]
    both = predicted.add_prefix("predicted_").join(measured.add_prefix("measured_"), how="inner")
    for name, unit in (("step", "s"), ("peak", "bytes")):
        both[f"{name}_error"] = both[f"predicted_{unit}"] / both[f"measured_{unit}"] - 1
    foretold = rows[is_predicted].set_index(pd.MultiIndex.from_frame(out[is_predicted][KNOBS]))
    both["foretold_s"] = foretold["made.foretold_step_s"]
    both["planner_step_error"] = both["foretold_s"] / both["measured_s"] - 1
    return both.sort_index().reset_index()


def plot_estimator_error(data: pd.DataFrame, ax: Any) -> Any:
    """On each of three axes one of ERRORS."""
    column, what = ERRORS[ax.get_subplotspec().colspan.start]
    x = FigureAxis("persistent", "chunks that persist")
    plot_lines(data, ax, x, FigureAxis(column, f"error of the {what}, %", 0.01), "checkpoints")
    ax.set_ylim(auto=True)
    ax.autoscale(axis="y")
    ax.axhline(0, color=GREY, linewidth=1)
    return ax


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    data = estimator_error_data(runs)
    parts = [data] * len(ERRORS)
    return panel("estimator_error", parts, plot_estimator_error, (13.5, 3.4), folder, text=TEXT)
