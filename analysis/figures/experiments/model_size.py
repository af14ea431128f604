"""Throughput and copied bytes against model size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import (
    FigureAxis,
    bytes_axis,
    finished,
    numbers_axis,
    plot_lines,
)
from analysis.figures.run_figures import Shown, panel

PASSES = {"recompute": 8.0}  # operations per parameter and token; else 6: forward, backward
TEXT = (
    "Throughput against model size",
    "Left: operations per second, counted as PatrickStar counts them (8 per parameter and token "
    "where activations are recomputed, else 6). Right: bytes copied between host and device in a "
    "settled step. Lines end where a larger model does not fit.",
)


def model_size_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, parameters, tokens_per_s, flops_per_s, step_s, copied_bytes of a step."""
    rows = finished(runs)
    passes = rows["config.planner.modes"].map(PASSES).fillna(6.0)
    tokens_per_s = rows["train_tokens_per_s"].astype(float)
    out = pd.DataFrame({"policy": rows["policy"], "parameters": rows["made.parameters"]})
    out["tokens_per_s"] = tokens_per_s
    out["flops_per_s"] = passes * rows["made.parameters"] * tokens_per_s
    out["step_s"] = rows["mean_train_step_s"]
    out["copied_bytes"] = rows["train_step_copied_bytes"]
    return out.sort_values(["policy", "parameters"]).reset_index(drop=True)


def plot_model_size(data: pd.DataFrame, ax: Any) -> Any:
    """On the first of two axes throughput, on the second copies."""
    x = numbers_axis(data, "parameters", "parameters")
    if ax.get_subplotspec().is_first_col():
        y = FigureAxis("flops_per_s", "TFLOP/s", 1e12)
    else:
        y = bytes_axis(data, "copied_bytes", "copied in a step")
    return plot_lines(data, ax, x, y, "policy")


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    data = model_size_data(runs)
    return panel("model_size", [data, data], plot_model_size, (10.5, 3.6), folder, text=TEXT)
