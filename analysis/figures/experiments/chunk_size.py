"""Footprint, copies and step time over the size of chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, bytes_axis, finished, plot_lines
from analysis.figures.run_figures import Shown, panel

MEBI = 1 << 20
TEXT = (
    "Chunk size",
    "Left: all states as they are laid out, the unused ends of chunks among them. Middle: bytes "
    "copied between host and device in a settled step. Right: its duration. Missing sizes do not "
    "fit.",
)


def chunk_size_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, chunk_elements, chunks, parameters, state_bytes, copied_bytes, step_s."""
    rows = finished(runs)
    out = pd.DataFrame({"policy": rows["policy"]})
    out["chunk_elements"] = rows["config.planner.chunk_elements"].astype(int)
    for name in ("chunks", "parameters", "state_bytes"):
        out[name] = rows[f"made.{name}"].astype(int)
    out["copied_bytes"] = rows["train_step_copied_bytes"]
    out["step_s"] = rows["mean_train_step_s"]
    return out.sort_values(["policy", "chunk_elements"]).reset_index(drop=True)


def plot_chunk_size(data: pd.DataFrame, ax: Any) -> Any:
    """On the first of three axes the footprint, then copies, then the step time."""
    x = FigureAxis("chunk_elements", "numbers in a chunk, Mi", MEBI)
    shown = (
        bytes_axis(data, "state_bytes", "footprint of all states"),
        bytes_axis(data, "copied_bytes", "copied in a step"),
        FigureAxis("step_s", "step, s"),
    )
    return plot_lines(data, ax, x, shown[ax.get_subplotspec().colspan.start], "policy")


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    data = chunk_size_data(runs)
    return panel("chunk_size", [data] * 3, plot_chunk_size, (12.5, 3.2), folder, text=TEXT)
