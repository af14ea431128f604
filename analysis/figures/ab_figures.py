"""Figures of a comparison of settings: one curve per group, overlaid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.ab.differences import LATENCIES, request_rows
from analysis.ab.groups import RunGroup, letter
from analysis.figures.plots import GRID, NAMES, WIDE, plain_ticks
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY
from analysis.figures.timelines import MIB, memory_data
from analysis.run import Run, RunFacts
from analysis.usage import devices

BY_PLACE = (BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), "-.", (0, (6, 1, 1, 1)))
BINS = 60  # of a timeline: curves of several groups must stay apart
MARKS = 9  # markers on a curve

CDFS = (
    "Latencies",
    "Distribution functions over the finished requests of all runs of a group.",
)
TIMES = (
    "Over time",
    "Of the first run of each group. Batch size: jobs in an operation that computes, weighted by "
    "its duration. Throughput: output tokens as they are delivered. Preemptions: restarts and "
    "swaps so far. Memory: KV in use, the fullest in each bin, summed over devices.",
)
COUNTS = ("batch", "preemptions", "present")  # their ticks are whole numbers
YS = {
    "batch": ("batch size", "jobs"),
    "throughput": ("throughput", "output tokens/s"),
    "preemptions": ("preemptions", "count so far"),
    "memory": ("memory of KV", "MiB"),
    "present": ("requests in the system", "requests"),
}


def style(number: int) -> dict[str, Any]:
    """Colour, marker and line of a group, by its place: none is told by colour alone."""
    return {
        "color": BY_PLACE[number % len(BY_PLACE)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "markersize": 4,
        "linewidth": 1.4,
    }


def drawn(groups: Sequence[RunGroup], whole: Mapping[str, Run], folder: Path) -> list[Shown]:
    """Draws latencies and timelines; those of tables that were not kept are left out.

    Args:
        groups: the groups, the baseline first.
        whole: the run of each group that timelines show, of those that kept their tables.
        folder: folder of the files.
    """
    names = [group.name for group in groups]
    key = "; ".join(f"{letter(i)} = {name}" for i, name in enumerate(names))

    def text(shown: tuple[str, str]) -> tuple[str, str]:
        return shown[0], f"{key}. {shown[1]}"

    def draw(data: pd.DataFrame, ax: Any) -> None:
        plot(data, ax, names)

    if not any(run.rows("requests") for group in groups for run in group.runs.values()):
        return []
    cdfs = [*(_cdf(groups, metric) for metric in LATENCIES), pd.DataFrame()]
    widths = (1, 1, 1, 0.2)
    found = [panel("latencies", cdfs, draw, (12, 3.2), folder, widths=widths, text=text(CDFS))]
    first = {group.name: next(iter(group.runs.values())) for group in groups}
    parts = [_over_time("throughput", first), _over_time("present", first)]
    if len(whole) == len(groups):
        made = {name: _over_time(name, whole) for name in ("batch", "preemptions", "memory")}
        parts = [made["batch"], parts[0], made["preemptions"], made["memory"], parts[1]]
    parts.append(pd.DataFrame())
    grid = (len(parts) // 3, 3)
    size = (12, 2.8 * grid[0])
    return [*found, panel("over_time", parts, draw, size, folder, grid, text=text(TIMES))]


def _cdf(groups: Sequence[RunGroup], metric: str) -> pd.DataFrame:
    share, parts = np.linspace(0, 1, GRID), []
    for group in groups:
        rows = pd.concat([request_rows(run) for run in group.runs.values()])
        values = rows[f"{metric}_s"].dropna().to_numpy(float)
        if len(values):
            at = np.quantile(values, share, method="linear")
            parts.append(pd.DataFrame({"group": group.name, "x": at, "y": share}))
    out = pd.concat(parts) if parts else pd.DataFrame(columns=["group", "x", "y"])
    is_short = len(out) > 0 and float(out["x"].max()) < 1
    unit = "ms" if is_short else "s"
    return out.assign(x=out["x"] * (1e3 if is_short else 1), figure=metric, x_unit=unit)


def _over_time(name: str, runs: Mapping[str, Any]) -> pd.DataFrame:
    make = {
        "batch": _batch,
        "throughput": _throughput,
        "preemptions": preemption_data,
        "memory": _memory,
        "present": _present,
    }[name]
    parts = [make(run).assign(group=group) for group, run in runs.items()]
    return pd.concat(parts)[["group", "x", "y"]].assign(figure=name, x_unit="s")


def _span_s(run: RunFacts) -> tuple[float, float]:
    rows = run.columns("requests", ("arrival_ns", "finish_ns"))
    begin, end = np.nanmin(rows["arrival_ns"]), np.nanmax(rows["finish_ns"])
    return float(begin) / 1e9, float(end) / 1e9


def _edges(run: RunFacts) -> Any:
    begin, end = _span_s(run)
    return np.linspace(begin, max(end, begin + 1e-9), BINS + 1)


def _frame(edges: Any, values: Any) -> pd.DataFrame:
    return pd.DataFrame({"x": (edges[:-1] + edges[1:]) / 2, "y": values})


def _batch(run: Run) -> pd.DataFrame:
    rows = run.steps[run.steps["lane"].eq("compute")]
    edges = _edges(run)
    at, spent = rows["start_ns"].to_numpy(float) / 1e9, (rows["end_ns"] - rows["start_ns"])
    weights = spent.to_numpy(float)
    jobs = rows["jobs"].map(len).to_numpy(float)
    total, _ = np.histogram(at, edges, weights=weights)
    found, _ = np.histogram(at, edges, weights=weights * jobs)
    return _frame(edges, np.divide(found, total, out=np.zeros(BINS), where=total > 0))


def _throughput(run: RunFacts) -> pd.DataFrame:
    edges = _edges(run)
    counts = np.zeros(BINS)
    for block in run.blocks("requests", ("token_ns",)):
        counts += np.histogram(block["token_ns"].values / 1e9, edges)[0]
    return _frame(edges, counts / (edges[1] - edges[0]))


def _present(run: RunFacts) -> pd.DataFrame:
    rows = run.columns("requests", ("arrival_ns", "finish_ns", "status"))
    done, edges = rows["status"].is_("finished"), _edges(run)
    middle = (edges[:-1] + edges[1:]) / 2
    came, went = (np.sort(rows[n][done].astype(float)) / 1e9 for n in ("arrival_ns", "finish_ns"))
    counts = [np.searchsorted(times, middle, side="right") for times in (came, went)]
    return _frame(edges, counts[0] - counts[1])


def preemption_data(run: Run) -> pd.DataFrame:
    """Restarts (a slice with no more tokens in KV than the one before) and copies to the host."""
    rows = run.steps[["start_ns", "lane", "jobs", "contexts", "step"]]
    ids = set(run.requests["request_id"])
    serve = rows[rows["lane"].eq("compute")].sort_values("start_ns", kind="stable")
    slices = serve.explode(["jobs", "contexts"]).dropna(subset=["jobs", "contexts"])
    slices = slices[slices["jobs"].isin(ids)].astype({"contexts": float})
    before = slices.groupby("jobs")["contexts"].shift()
    at = [slices["start_ns"][slices["contexts"] <= before].to_numpy(float)]
    copies = rows[rows["lane"].eq("gpu->host")].explode("jobs")
    copies = copies[copies["jobs"].isin(ids)].drop_duplicates(["step", "jobs"])
    at.append(copies["start_ns"].to_numpy(float))
    edges = _edges(run)
    return _frame(edges, np.cumsum(np.histogram(np.concatenate(at) / 1e9, edges)[0]))


def _memory(run: Run) -> pd.DataFrame:
    edges, total = _edges(run), np.zeros(BINS)
    for device in devices(run):
        rows = memory_data(run, f"gpu:{device}")
        place = np.clip(np.searchsorted(edges, rows["at_s"]) - 1, 0, BINS - 1)
        kv = rows["kv"].groupby(place).max().reindex(range(BINS)).ffill().fillna(0)
        total += kv.to_numpy(float) / MIB
    return _frame(edges, total)


def plot(data: pd.DataFrame, ax: Any, names: Sequence[str]) -> None:
    """Draws the curves of one figure under the letters of their groups; no rows: the legend."""
    from matplotlib.ticker import MaxNLocator

    if data.empty:  # the place of the legend
        handles = [ax.plot([], [], label=letter(i), **style(i))[0] for i in range(len(names))]
        legend = ax.legend(handles=handles, loc="center left", ncols=1 + (len(names) - 1) // 8)
        legend.set_in_layout(False)  # else many entries leave the curves no room
        ax.set_axis_off()
        return
    figure, unit = str(data["figure"].iloc[0]), str(data["x_unit"].iloc[0])
    for number, name in enumerate(names):
        part = data[data["group"].eq(name)]
        if len(part):
            step = max(1, len(part) // MARKS)
            every = (number * step // max(1, len(names)), step)  # markers of curves stay apart
            ax.plot(part["x"], part["y"], label=letter(number), markevery=every, **style(number))
    if figure in NAMES:
        low, high = float(data["x"].min()), float(data["x"].max())
        if low > 0 and high / low > WIDE:
            ax.set_xscale("log")
            plain_ticks(ax.xaxis, low, high)
        ax.set(title=NAMES[figure], xlabel=f"{figure.upper()}, {unit}", ylim=(0, 1.02))
        ax.set_ylabel("share of requests at or below")
    else:
        title, ylabel = YS[figure]
        ax.set(title=title, xlabel="time, s", ylabel=ylabel)
        ax.set_ylim(bottom=0)
        if figure in COUNTS:
            ax.yaxis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10), integer=True))
            ax.set_ylim(0, max(1.0, ax.get_ylim()[1]) if data["y"].any() else 1)
        elif not data["y"].any():
            ax.set_ylim(0, 1)
