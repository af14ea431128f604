"""The figures of a sweep: metrics over its setting, latency for throughput, and a heatmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.plots import MOST_TICKS, WIDE, plain_ticks
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import BLACK, OTHERS, axes, legend, policy_color
from analysis.figures.sweep_points import axis_in, by_x, frontier
from analysis.swept import METRICS

SIZES = {"%": 0.01, "GiB": 2.0**30}  # of units that the metrics are not in
LINES = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
SHARES = (0.9, 0.99)  # of requests within the SLO
TEXTS = {
    "goodput": (
        "Goodput over {x}",
        "Requests per second that met every limit of the SLO; where runs have no SLO, finished "
        "requests. Bands: smallest to largest over seeds.",
    ),
    "attainment": (
        "SLO attainment over {x}",
        "Share of all requests that met every limit; refused and unfinished ones did not. Dotted: "
        "90 and 99 %.",
    ),
    "latency": ("Latency over {x}", "p99 over requests. Dotted: the limit of the SLO."),
    "training": (
        "Training over {x}",
        "Steps after the first, which warms up; the most bytes that the device held.",
    ),
    "frontier": (
        "Latency for throughput",
        "Each point is a mean over seeds. Ringed: no other point has more throughput and less "
        "latency.",
    ),
    "heatmap": ("Series by {x}", "Means over seeds; empty: no finished run there."),
}
ASKED = " Black line: the rate asked for; the trace may arrive somewhat slower or faster."
TRAINING = ("train_tokens_per_s", "mean_train_step_s", "peak_gpu0_used_bytes")
LEAST_SPAN = 0.01  # of the largest value of a heatmap: values closer than this have one colour
Looks = Mapping[str, Mapping[str, Any]]  # colour, marker and line of each series


def drawn(points: pd.DataFrame, folder: Path) -> list[Shown]:
    """Draws and saves every figure of serving for which the points have data."""
    useful = "goodput" if "goodput" in points else "request_throughput"
    looks, axis = looks_of(points), axis_in(points)
    lines = partial(plot_over_x, looks=looks)
    found = []
    if axis is not None:
        wide = [by_x(points, useful)]
        found.append(_shown("goodput", wide, lines, (8.5, 3.4), folder))
        if "slo_attainment" in points:
            met = [by_x(points, "slo_attainment")]
            found.append(_shown("attainment", met, lines, (8.5, 3.4), folder))
        known = ["p99_ttft_s", "p99_tpot_s"]
        if len(e2e := _limited(points, "p99_e2e_s")) and e2e["limit"].notna().any():
            known.append("p99_e2e_s")
        slow = [_limited(points, metric) for metric in known]
        found.append(_shown("latency", slow, lines, (4 * len(known) + 3, 3.4), folder))
    apart = [frontier(points, "output_throughput", m) for m in ("p99_ttft_s", "p99_tpot_s")]
    over = partial(plot_frontier, looks=looks)
    found.append(_shown("frontier", apart, over, (11, 3.6), folder))
    if axis is None:
        return found
    maps = [by_x(points, metric) for metric in (useful, "p99_ttft_s")]
    tall = 1.1 + 0.32 * max(1, points["series"].nunique())
    return [*found, _shown("heatmap", maps, plot_heatmap, (11, tall), folder)]


def drawn_training(points: pd.DataFrame, folder: Path) -> list[Shown]:
    """Draws and saves tokens/s, step time and peak memory over the setting; nothing without one."""
    if axis_in(points) is None:
        return []
    parts = [by_x(points, metric) for metric in TRAINING if metric in points]
    lines = partial(plot_over_x, looks=looks_of(points))
    return [_shown("training", parts, lines, (4 * len(parts) + 3, 3.4), folder)]


def looks_of(points: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each series, each of them another as far as they go.

    The first series of a policy has the policy's colour.
    """
    policies = points.groupby("series")["policy"].first().to_dict()
    used: set[str] = set()
    looks: dict[str, dict[str, Any]] = {}
    for number, (series, policy) in enumerate(policies.items()):
        color = policy_color(str(policy))
        if color in used:
            color = next((other for other in OTHERS if other not in used), color)
        used.add(color)
        looks[str(series)] = {
            "color": color,
            "marker": MARKS[number % len(MARKS)],
            "linestyle": LINES[number % len(LINES)],
            "markersize": 4.5,
            "linewidth": 1.6,
        }
    return looks


def plot_over_x(data: pd.DataFrame, ax: Any = None, looks: Looks | None = None) -> Any:
    """One metric over the setting, a line per series, a band over replicates."""
    ax = axes(ax)
    axis = axis_in(data)
    if axis is None:
        return ax
    metric = str(data["metric"].iloc[0])
    looks, size = looks or looks_of(data), _size(data["high"], metric)
    if axis.is_rate and metric in ("goodput", "request_throughput"):
        offered = sorted(set(data["x"]))
        ax.plot(offered, offered, color=BLACK, linewidth=0.8)
    for number, (series, part) in enumerate(data.groupby("series")):
        style, x = looks[str(series)], part["x"] / axis.size
        ax.plot(x, part["mean"] / size, label=series, zorder=3 + number / 100, **style)
        low, high = part["low"] / size, part["high"] / size
        ax.fill_between(x, low, high, color=style["color"], alpha=0.15)
    _limits(data, metric, size, ax)
    ax.set(xlabel=axis.label, ylabel=_name(metric, size))
    _values_along_x(ax, data["x"] / axis.size)
    _legend_beside(ax)
    return ax


def plot_frontier(data: pd.DataFrame, ax: Any = None, looks: Looks | None = None) -> Any:
    """Latency over throughput; points of the Pareto frontier are ringed."""
    ax = axes(ax)
    if not len(data):
        return ax
    metric = str(data["price_metric"].iloc[0])
    looks, size = looks or looks_of(data), _size(data["price"], metric)
    for series, part in data.groupby("series"):
        style = {**looks[str(series)], "linestyle": "none"}
        ax.plot(part["gain"], part["price"] / size, label=series, **style)
    best = data[data["is_best"]].sort_values("gain")
    ax.plot(
        best["gain"],
        best["price"] / size,
        color=BLACK,
        linewidth=0.8,
        marker="o",
        fillstyle="none",
        markersize=9,
        zorder=1,
    )
    ax.set(xlabel="output, tokens/s", ylabel=_name(metric, size))
    _log_scale(ax, data["price"] / size)
    _legend_beside(ax)
    return ax


def plot_heatmap(data: pd.DataFrame, ax: Any = None) -> Any:
    """Series by setting, the value written into each cell."""
    ax = axes(ax)
    axis = axis_in(data)
    if axis is None:
        return ax
    metric = str(data["metric"].iloc[0])
    size = _size(data["mean"], metric)
    grid = data.dropna(subset=["x"]).pivot(index="series", columns="x", values="mean") / size
    better = "viridis_r" if metric.endswith("_s") else "viridis"
    low, high = _colour_range(data["mean"] / size)
    image = ax.imshow(grid.to_numpy(float), cmap=better, aspect="auto", vmin=low, vmax=high)
    for (row, column), value in _cells(grid):
        shade = image.norm(value)
        dark = shade > 0.5 if metric.endswith("_s") else shade <= 0.5
        ink = "white" if dark else "black"
        ax.text(column, row, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=7.5)
    values = [f"{float(str(x)) / axis.size:.4g}" for x in grid.columns]
    ax.set_xticks(range(len(values)), values)
    ax.set_yticks(range(len(grid)), grid.index)
    ax.grid(visible=False)
    ax.set(title=_name(metric, size), xlabel=axis.label)
    if (spec := ax.get_subplotspec()) is not None and not spec.is_first_col():
        ax.tick_params(labelleft=False)
    return ax


def _legend_beside(ax: Any) -> None:
    """One legend for a row of plots, right of the last."""
    if ax.get_subplotspec() is None or ax.get_subplotspec().is_last_col():
        legend(ax, loc="upper left", bbox_to_anchor=(1, 1))


def _colour_range(values: pd.Series) -> tuple[float, float]:
    """The ends of the colour scale, far apart where differences are below LEAST_SPAN."""
    low, high = float(values.min()), float(values.max())
    largest = max(abs(low), abs(high))
    if high - low >= LEAST_SPAN * largest:
        return low, high
    return low - largest, high + 2 * largest  # all in one of the 256 colours, a third up the scale


def _cells(grid: pd.DataFrame) -> list[tuple[tuple[int, int], float]]:
    values = grid.to_numpy(float)
    rows, columns = values.shape
    cells = [((r, c), float(values[r, c])) for r in range(rows) for c in range(columns)]
    return [(at, value) for at, value in cells if value == value]


def _size(values: pd.Series, metric: str) -> float:
    """The size of the unit that a metric is drawn in: milliseconds where all are below a second."""
    unit = METRICS.get(metric, (metric, ""))[1]
    if unit == "s":
        return 1e-3 if float(values.max()) < 1 else 1.0
    return SIZES.get(unit, 1.0)


def _name(metric: str, size: float) -> str:
    name, unit = METRICS.get(metric, (metric, ""))
    unit = "ms" if unit == "s" and size < 1 else unit
    return f"{name}, {unit}" if unit else name


def _limited(points: pd.DataFrame, metric: str) -> pd.DataFrame:
    """By setting, with the SLO's limit if all runs have one and that one in common."""
    rows = by_x(points, metric)
    column = f"config.slo.{metric.split('_')[1]}_s"
    limits = sorted(set(points[column].dropna())) if column in points else []
    return rows.assign(limit=float(limits[0]) if len(limits) == 1 else float("nan"))


def _limits(data: pd.DataFrame, metric: str, size: float, ax: Any) -> None:
    """Dotted lines at the limits of the SLO, each with its value."""
    lines: tuple[float, ...] = SHARES if metric == "slo_attainment" else ()
    if "limit" in data:
        lines = tuple(float(limit) for limit in data["limit"].dropna().unique())
        _log_scale(ax, pd.concat([data["low"], data["high"], data["limit"].dropna()]) / size)
    elif metric in TRAINING:
        ax.set_ylim(bottom=0)
    unit = _name(metric, size).rpartition(", ")[2]
    for level in lines:
        ax.axhline(level / size, color=BLACK, linewidth=0.9, linestyle=":")
        text = f"{level / size:g} {unit}" + (" SLO" if "limit" in data else "")
        at = {"xy": (0.995, level / size), "xycoords": ("axes fraction", "data")}
        box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.6}
        side = "top" if level == SHARES[-1] else "bottom"  # below 99 %: most points lie above
        ax.annotate(text, **at, ha="right", va=side, fontsize=7, bbox=box, zorder=4)


def _values_along_x(ax: Any, values: pd.Series) -> None:
    """The values that were tried as ticks, on a logarithmic axis where they spread widely."""
    from matplotlib.ticker import NullLocator

    tried = sorted(set(values.dropna()))
    low, high = tried[0], tried[-1]
    is_log = low > 0 and high / low >= WIDE
    if is_log:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis, low, high)
    if len(tried) <= MOST_TICKS + 3 and _are_apart(tried, is_log):
        ax.set_xticks(tried, [f"{value:.4g}" for value in tried])
        ax.xaxis.set_minor_locator(NullLocator())


def _are_apart(values: list[float], is_log: bool) -> bool:
    """Whether labels at these values leave room for one another."""
    steps = [b / a if is_log else b - a for a, b in pairwise(values)]
    if len(steps) < 2:
        return True
    gaps = [log(step) if is_log else step for step in steps]
    return min(gaps) >= 0.1 * sum(gaps)


def _log_scale(ax: Any, values: pd.Series) -> None:
    low, high = float(values.min()), float(values.max())
    if low > 0 and isfinite(high) and high / low > WIDE:
        ax.set_yscale("log")
        ax.set_ylim(low * 0.9, high * 1.15)
        plain_ticks(ax.yaxis, low, high)


def _shown(
    name: str,
    parts: list[pd.DataFrame],
    plot: Callable[..., Any],
    size: tuple[float, float],
    folder: Path,
) -> Shown:
    axis = next((found for part in parts if (found := axis_in(part))), None)
    over = "setting" if axis is None else axis.name
    title, caption = (text.replace("{x}", over) for text in TEXTS[name])
    if name == "goodput" and axis is not None and axis.is_rate:
        caption += ASKED
    return panel(name, parts, plot, size, folder, text=(title, caption))
