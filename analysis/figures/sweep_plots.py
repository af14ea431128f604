"""The figures of a sweep: metrics against rate, latency for throughput, and a heatmap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.plots import WIDE, plain_ticks
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import BLACK, axes, legend, policy_color, policy_marker
from analysis.figures.sweep_points import by_rate, frontier

NAMES = {
    "goodput": "goodput, requests/s",
    "request_throughput": "throughput, requests/s",
    "output_throughput": "output tokens/s",
    "slo_attainment": "share within the SLO",
    "p50_ttft_s": "p50 TTFT, s",
    "p99_ttft_s": "p99 TTFT, s",
    "p99_tpot_s": "p99 TPOT, s",
}
LINES = ("-", "--", ":", "-.")
TEXTS = {
    "goodput": (
        "Goodput against rate",
        "Requests per second that met every limit of the SLO, over the requests per second that "
        "arrived; black: all of them. Where runs have no SLO, finished requests. Bands: smallest "
        "to largest over seeds.",
    ),
    "attainment": (
        "SLO attainment against rate",
        "Share of all requests that met every limit; refused and unfinished ones did not. Dotted: "
        "90 and 99 %.",
    ),
    "latency": ("Latency against rate", "p99 over requests. Dotted: the limit of the SLO."),
    "frontier": (
        "Latency for throughput",
        "One point per series and rate, means over seeds. Ringed: no other point has more "
        "throughput and less latency.",
    ),
    "heatmap": ("Policies by rate", "Means over seeds; empty: no finished run there."),
}


def drawn(points: pd.DataFrame, folder: Path) -> list[Shown]:
    """Draws and saves every figure for which the points have data."""
    useful = "goodput" if "goodput" in points else "request_throughput"
    found = []
    if points["rate"].notna().any():
        wide = [by_rate(points, useful)]
        found.append(_shown("goodput", wide, plot_rate, (8.5, 3.4), folder))
        if "slo_attainment" in points:
            met = [by_rate(points, "slo_attainment")]
            found.append(_shown("attainment", met, plot_rate, (8.5, 3.4), folder))
        slow = [_limited(points, metric) for metric in ("p99_ttft_s", "p99_tpot_s")]
        found.append(_shown("latency", slow, plot_rate, (11, 3.4), folder))
    apart = [frontier(points, "output_throughput", m) for m in ("p99_ttft_s", "p99_tpot_s")]
    found.append(_shown("frontier", apart, plot_frontier, (11, 3.6), folder))
    maps = [by_rate(points, metric) for metric in (useful, "p99_ttft_s")]
    tall = 1.1 + 0.32 * max(1, points["series"].nunique())
    return [*found, _shown("heatmap", maps, plot_heatmap, (11, tall), folder)]


def plot_rate(data: pd.DataFrame, ax: Any = None) -> Any:
    """One metric against the rate, a line per series, a band over replicates."""
    ax = axes(ax)
    if not len(data):
        return ax
    metric = str(data["metric"].iloc[0])
    if metric in ("goodput", "request_throughput"):
        ends = [0, float(data["rate"].max())]
        ax.plot(ends, ends, color=BLACK, linewidth=0.8)
    for number, (series, part) in enumerate(data.groupby("series")):
        style = _style(str(part["policy"].iloc[0])) | {"linestyle": _line(data, str(series))}
        ax.plot(part["rate"], part["mean"], label=series, zorder=3 + number / 100, **style)
        ax.fill_between(part["rate"], part["low"], part["high"], color=style["color"], alpha=0.15)
    _limits(data, metric, ax)
    ax.set(xlabel="arrivals, requests/s", ylabel=NAMES.get(metric, metric))
    _legend_beside(ax)
    return ax


def plot_frontier(data: pd.DataFrame, ax: Any = None) -> Any:
    """Latency over throughput; points of the Pareto frontier are ringed."""
    ax = axes(ax)
    if not len(data):
        return ax
    for series, part in data.groupby("series"):
        style = _style(str(part["policy"].iloc[0])) | {"linestyle": "none"}
        ax.plot(part["gain"], part["price"], label=series, **style)
    best = data[data["is_best"]].sort_values("gain")
    ax.plot(
        best["gain"],
        best["price"],
        color=BLACK,
        linewidth=0.8,
        marker="o",
        fillstyle="none",
        markersize=9,
        zorder=1,
    )
    metric = str(data["price_metric"].iloc[0])
    ax.set(xlabel="output tokens/s", ylabel=NAMES.get(metric, metric))
    _log_scale(ax, data["price"])
    _legend_beside(ax)
    return ax


def _legend_beside(ax: Any) -> None:
    """One legend for a row of plots, right of the last."""
    if ax.get_subplotspec() is None or ax.get_subplotspec().is_last_col():
        legend(ax, loc="upper left", bbox_to_anchor=(1, 1))


def plot_heatmap(data: pd.DataFrame, ax: Any = None) -> Any:
    """Series by rate, the value written into each cell."""
    ax = axes(ax)
    if not len(data):
        return ax
    metric = str(data["metric"].iloc[0])
    grid = data.assign(rate=data["rate"].fillna(0)).pivot(
        index="series", columns="rate", values="mean"
    )
    better = "viridis_r" if metric.endswith("_s") else "viridis"
    image = ax.imshow(grid.to_numpy(float), cmap=better, aspect="auto")
    for (row, column), value in _cells(grid):
        shade = image.norm(value)
        dark = shade > 0.5 if metric.endswith("_s") else shade <= 0.5
        ink = "white" if dark else "black"
        ax.text(column, row, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=7.5)
    rates = [f"{rate:g}" for rate in grid.columns] if data["rate"].notna().any() else ["all"]
    ax.set_xticks(range(len(rates)), rates)
    ax.set_yticks(range(len(grid)), grid.index)
    ax.grid(visible=False)
    ax.set(title=NAMES.get(metric, metric), xlabel="arrivals, requests/s")
    return ax


def _cells(grid: pd.DataFrame) -> list[tuple[tuple[int, int], float]]:
    values = grid.to_numpy(float)
    rows, columns = values.shape
    cells = [((r, c), float(values[r, c])) for r in range(rows) for c in range(columns)]
    return [(at, value) for at, value in cells if value == value]


def _limited(points: pd.DataFrame, metric: str) -> pd.DataFrame:
    """By rate, with the SLO's limit if all runs have one and that one in common."""
    rows = by_rate(points, metric)
    column = f"config.slo.{metric.split('_')[1]}_s"
    limits = sorted(set(points[column].dropna())) if column in points else []
    return rows.assign(limit=float(limits[0]) if len(limits) == 1 else float("nan"))


def _limits(data: pd.DataFrame, metric: str, ax: Any) -> None:
    lines: tuple[float, ...] = (0.9, 0.99) if metric == "slo_attainment" else ()
    if "limit" in data:
        lines = tuple(float(limit) for limit in data["limit"].dropna().unique())
        _log_scale(ax, pd.concat([data["low"], data["high"], data["limit"].dropna()]))
    for level in lines:
        ax.axhline(level, color=BLACK, linewidth=0.9, linestyle=":")


def _log_scale(ax: Any, values: pd.Series) -> None:
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > WIDE:
        ax.set_yscale("log")
        ax.set_ylim(low * 0.9, high * 1.1)
        plain_ticks(ax.yaxis, low, high)


def _style(policy: str) -> dict[str, Any]:
    marker = policy_marker(policy)
    return {"color": policy_color(policy), "marker": marker, "markersize": 4.5, "linewidth": 1.6}


def _line(data: pd.DataFrame, series: str) -> str:
    """A line style per series of one policy: all of them share its colour."""
    policy = data.loc[data["series"].eq(series), "policy"].iloc[0]
    kin = sorted(data.loc[data["policy"].eq(policy), "series"].unique())
    return LINES[kin.index(series) % len(LINES)]


def _shown(
    name: str, parts: list[pd.DataFrame], plot: Any, size: tuple[float, float], folder: Path
) -> Shown:
    return panel(name, parts, plot, size, folder, text=TEXTS[name])
