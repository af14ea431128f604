"""From which link bandwidth on it pays to send activations out rather than compute them again."""

from __future__ import annotations

from math import exp, log, nan
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, finished, plot_lines
from analysis.figures.plots import plain_ticks
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import GREY

GIGA = 1e9
TEXT = (
    "Link bandwidth",
    "Tokens per second over the bandwidth of the host link, each way, with activations kept, "
    "recomputed or offloaded. Dotted: from here on offloading is faster than recomputing.",
)


def link_bandwidth_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, modes, link_bytes_per_s, tokens_per_s, step_s, crossover_bytes_per_s (the
    same in all rows; NaN where there is none)."""
    rows = finished(runs)
    out = pd.DataFrame({"policy": rows["policy"], "modes": rows["config.planner.modes"]})
    out["link_bytes_per_s"] = rows["config.device.to_device_bytes_per_s"].astype(float)
    out["tokens_per_s"] = rows["train_tokens_per_s"]
    out["step_s"] = rows["mean_train_step_s"]
    out = out.sort_values(["modes", "link_bytes_per_s"]).reset_index(drop=True)
    return out.assign(crossover_bytes_per_s=crossover(out, "offload", "recompute"))


def crossover(data: pd.DataFrame, mode: str, other: str) -> float:
    """The bandwidth from which on a mode's steps are no longer than another's, at all larger ones.

    Between two that were tried it is read off straight lines over the logarithm. NaN where the
    mode is slower at the largest, or never was.
    """
    times = data.pivot_table(index="link_bytes_per_s", columns="modes", values="step_s")
    if mode not in times or other not in times:
        return nan
    late = (times[mode] - times[other]).dropna().sort_index()
    slower = late[late > 0]
    if late.empty or slower.empty or slower.index[-1] == late.index[-1]:
        return nan
    low = float(slower.index[-1])
    high = float(late.index[late.index > low][0])
    part = float(late[low]) / float(late[low] - late[high])
    return exp(log(low) + part * (log(high) - log(low)))


def plot_link_bandwidth(data: pd.DataFrame, ax: Any = None) -> Any:
    """A line per mode, and where two of them cross."""
    x = FigureAxis("link_bytes_per_s", "link bandwidth each way, GB/s", GIGA, is_log=True)
    ax = plot_lines(data, ax, x, FigureAxis("tokens_per_s", "tokens/s"), "modes")
    speeds = data["link_bytes_per_s"] / GIGA
    if speeds.min() < speeds.max():
        plain_ticks(ax.xaxis, float(speeds.min()), float(speeds.max()))
    at = float(data["crossover_bytes_per_s"].iloc[0]) / GIGA
    if at == at:
        ax.axvline(at, color=GREY, linewidth=1, linestyle=":")
        ax.annotate(f" {at:.3g} GB/s", (at, 0), fontsize=8, va="bottom")
    return ax


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves it."""
    parts = [link_bandwidth_data(runs)]
    return panel("link_bandwidth", parts, plot_link_bandwidth, (6.5, 3.6), folder, text=TEXT)
