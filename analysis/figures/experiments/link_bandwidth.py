"""The link bandwidth from which offloading activations is faster than recomputing them, and where
ProTrain chooses to."""

from __future__ import annotations

from math import exp, log, nan
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, bytes_axis, finished, plot_lines
from analysis.figures.plots import plain_ticks
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import GREY

GIGA = 1e9
TEXT = (
    "Link bandwidth",
    "Tokens per second over the bandwidth of the host link, each way, with activations kept, "
    "recomputed or offloaded. Dotted: from here on offloading is faster than recomputing.",
)
SWAPS_TEXT = (
    "Swaps over link bandwidth",
    "Tokens per second of ProTrain's choice over the bandwidth of the host link, each way: where "
    "blocks may offload their activations, and where none may. Right: what crosses the link in a "
    "step.",
)


def link_bandwidth_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, modes, link_bytes_per_s, tokens_per_s, step_s, crossover_bytes_per_s (one
    value in all rows; NaN without a crossover)."""
    rows = finished(runs)
    out = pd.DataFrame({"policy": rows["policy"], "modes": rows["config.planner.modes"]})
    out["link_bytes_per_s"] = rows["config.device.to_device_bytes_per_s"].astype(float)
    out["tokens_per_s"] = rows["train_tokens_per_s"]
    out["step_s"] = rows["mean_train_step_s"]
    out = out.sort_values(["modes", "link_bytes_per_s"]).reset_index(drop=True)
    return out.assign(crossover_bytes_per_s=crossover(out, "offload", "recompute"))


def crossover(data: pd.DataFrame, mode: str, other: str) -> float:
    """The bandwidth from which a mode's steps are at most as long as another's.

    It is interpolated between two measured bandwidths, linearly over the logarithm. NaN if the mode
    is slower at the largest bandwidth, or at none.
    """
    times = data.pivot_table(index="link_bytes_per_s", columns="modes", values="step_s")
    if mode not in times or other not in times:
        return nan
    excess_s = (times[mode] - times[other]).dropna().sort_index()
    slower = excess_s[excess_s > 0]
    if excess_s.empty or slower.empty or slower.index[-1] == excess_s.index[-1]:
        return nan
    low = float(slower.index[-1])
    high = float(excess_s.index[excess_s.index > low][0])
    part = float(excess_s[low]) / float(excess_s[low] - excess_s[high])
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


def swaps_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, swaps ("searched" or a number), link_bytes_per_s, tokens_per_s, step_s,
    copied_bytes (of a step)."""
    rows = finished(runs)
    given = rows["config.planner.swaps"]
    out = pd.DataFrame({"policy": rows["policy"]})
    out["swaps"] = ["searched" if pd.isna(one) else f"{float(one):.0f}" for one in given]
    out["link_bytes_per_s"] = rows["config.device.to_device_bytes_per_s"].astype(float)
    out["tokens_per_s"] = rows["train_tokens_per_s"]
    out["step_s"] = rows["mean_train_step_s"]
    out["copied_bytes"] = rows["copied_bytes"] / rows["train_steps"]
    return out.sort_values(["swaps", "link_bytes_per_s"]).reset_index(drop=True)


def plot_swaps(data: pd.DataFrame, ax: Any) -> Any:
    """On the first of two axes tokens per second, on the second what crosses the link."""
    x = FigureAxis("link_bytes_per_s", "link bandwidth each way, GB/s", GIGA, is_log=True)
    y = bytes_axis(data, "copied_bytes", "copied in a step")
    if ax.get_subplotspec().is_first_col():
        y = FigureAxis("tokens_per_s", "tokens/s")
    plot_lines(data, ax, x, y, "swaps")
    speeds = data["link_bytes_per_s"] / GIGA
    if speeds.min() < speeds.max():
        plain_ticks(ax.xaxis, float(speeds.min()), float(speeds.max()))
    return ax


def swaps_drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure of ProTrain's swaps."""
    data = swaps_data(runs)
    parts, size = [data, data], (10.5, 3.4)
    return panel("link_bandwidth_swaps", parts, plot_swaps, size, folder, text=SWAPS_TEXT)


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    parts = [link_bandwidth_data(runs)]
    return panel("link_bandwidth", parts, plot_link_bandwidth, (6.5, 3.6), folder, text=TEXT)
