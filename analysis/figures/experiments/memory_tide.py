"""PatrickStar's memory tide: bytes left to chunks as activations and workspace rise and fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures.experiments.lines import finished, scaled
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import BLACK, GREEN, GREY, KINDS
from analysis.run import Run, load
from analysis.usage import pools

STATES = ("weight", "gradient", "optimizer")  # what chunks hold
OTHERS = ("activation", "buffer")
BINS = 600  # columns of a figure; the fullest row of each is kept
TEXT = (
    "The memory tide",
    "States on the device, stacked from below, and activations with workspace, hanging from "
    "above; black: the bytes left to chunks. In the first step, which warms up, chunks get a "
    "fixed share; then they follow the bytes left, or, under a static partition, never do. "
    "Dotted: the ends of steps.",
)


def memory_tide_data(run: Run, name: str) -> pd.DataFrame:
    """Columns run, at_s, step (of the job), a column of bytes per kind of STATES, states, others,
    available (the capacity less others), capacity. The fullest row of each of BINS."""
    rows = pools(run)["gpu:0"].reset_index(drop=True)
    if len(rows) > BINS:
        bins = pd.cut(rows["at_ns"], BINS, labels=False)
        rows = rows.loc[rows.groupby(bins)["used_bytes"].idxmax()]
    out = pd.DataFrame({"run": name, "at_s": rows["at_ns"] / 1e9})
    ends = np.sort(run.training["end_ns"].to_numpy(float))
    out["step"] = np.searchsorted(ends, rows["at_ns"].to_numpy(float), side="left")
    for kind in STATES:
        out[kind] = rows[f"{kind}_bytes"]
    out["states"] = out[list(STATES)].sum(axis=1)
    out["others"] = rows[[f"{kind}_bytes" for kind in OTHERS]].sum(axis=1)
    out["available"] = rows["capacity_bytes"] - out["others"]
    return out.assign(capacity=rows["capacity_bytes"]).reset_index(drop=True)


def plot_memory_tide(data: pd.DataFrame, ax: Any) -> Any:
    """One run, with its step time in the title."""
    unit, prefix = scaled(data["capacity"])
    at, below = data["at_s"], np.zeros(len(data))
    for kind in STATES:
        top = below + data[kind].to_numpy(float) / unit
        style = {"color": KINDS[kind], "linewidth": 0, "step": "post", "label": kind}
        ax.fill_between(at, below, top, **style)
        below = top
    left, most = data["available"] / unit, float(data["capacity"].iloc[0]) / unit
    shade = {"color": GREEN, "alpha": 0.45, "linewidth": 0, "step": "post"}
    ax.fill_between(at, left, most, label="activations", **shade)
    ax.plot(at, left, color=BLACK, linewidth=0.9, drawstyle="steps-post", label="left to chunks")
    for _, part in data.groupby("step"):
        ax.axvline(float(part["at_s"].max()), color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xlabel="seconds", ylabel=f"device memory, {prefix}B", title=str(data["run"].iloc[0]))
    ax.set_ylim(0, most * 1.02)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure: a row of axes per run."""
    parts = [
        memory_tide_data(load(root / str(row["run"])), _name(row))
        for row in finished(runs).sort_values("overrides").to_dict("records")
    ]
    size, grid = (11, 2.8 * len(parts)), (len(parts), 1)
    return panel("memory_tide", parts, plot_memory_tide, size, folder, grid, text=TEXT)


def _name(row: dict[Any, Any]) -> str:
    """A run by its policy and partition, with its step time."""
    is_static = str(row.get("config.memory.static_partition")) == "True"  # absent elsewhere
    kind = "static partition" if is_static else "tide"
    return f"{row['policy']}, {kind}: {row['mean_train_step_s']:.3g} s a settled step"
