"""Timelines of a run: memory, lanes, running and waiting requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.figures.style import BLACK, KINDS, axes, group_color, legend, line
from analysis.metric_names import MEASUREMENT, PARTS, PENDING
from analysis.run import Run
from analysis.units import Scale, amount, axis_scale
from analysis.usage import devices, operations, pools

BINS = 300  # columns of a timeline
WINDOW_OPS = 40  # operations in a Gantt chart
MIB = 2**20


def memory_data(run: Run, pool: str = "gpu:0") -> pd.DataFrame:
    """Bytes by kind over time, at most one row per bin: the fullest, so that peaks remain.

    Columns at_s, one per kind, pending (freed, still in use), capacity, measured (the meter's
    largest reading in the bin; it reads at settles only).
    """
    rows = pools(run).get(pool)
    if rows is None:
        return pd.DataFrame(columns=["at_s", *PARTS, "capacity", "measured"])
    rows = rows.reset_index(drop=True)
    bins = pd.cut(rows["at_ns"], BINS, labels=False) if len(rows) > BINS else rows.index
    parts = rows.groupby(bins)
    kept = rows.loc[parts["used_bytes"].idxmax()]
    out = pd.DataFrame({"at_s": kept["at_ns"] / 1e9})
    for part in PARTS:
        out[part] = kept[f"{part}_bytes"]
    measured = parts["measured_bytes"].max().to_numpy(float)
    return out.assign(capacity=kept["capacity_bytes"], measured=measured)


def plot_memory(data: pd.DataFrame, ax: Any = None) -> Any:
    """Memory of one pool stacked by kind; a prediction over its measurement as lines.

    With a column `run` of several runs, the measurement is filled, and of the prediction the tops
    of the kinds are dashed. The capacity is a line where it leaves the data half of the height, and
    else a note.
    """
    ax = axes(ax)
    runs = dict([*data.groupby("run", sort=False)]) if "run" in data else {"": data}
    top = max((float(_tops(part)[-1].max()) for part in runs.values() if len(part)), default=0.0)
    read = data["measured"].max() if len(data) else float("nan")
    top = max(top, 0.0 if read != read else float(read))
    memory, time = axis_scale([top], "bytes"), axis_scale(data["at_s"], "s")
    filled = MEASUREMENT if MEASUREMENT in runs else next(iter(runs), "")
    for name, part in runs.items():
        if len(part):
            draw = _fill_kinds if name == filled else _draw_tops
            label = str(name) if len(runs) > 1 else ""
            draw(ax, time.of(part["at_s"]), memory.of(_tops(part)), label)
            _draw_readings(ax, part, time, memory)
    if top > 0:
        _draw_capacity(ax, data, top, memory)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set(xlabel=f"time, {time.unit}", ylabel=f"memory, {memory.unit}")
    return ax


STACKED = {**KINDS, PENDING: "#DDDDDD"}
SQUASHED = 0.5  # share of the capacity below which a line of it would squash the data


def _tops(part: pd.DataFrame) -> Any:
    """Tops of the stacked kinds, a row per kind of STACKED."""
    rows = [part[kind].to_numpy(float) if kind in part else np.zeros(len(part)) for kind in STACKED]
    return np.cumsum(rows, axis=0)


def _fill_kinds(ax: Any, at: pd.Series, tops: Any, name: str) -> None:
    below = np.zeros(len(at))
    for (kind, color), top in zip(STACKED.items(), tops, strict=True):
        if (top > below).any():
            style = {"color": color, "linewidth": 0, "step": "post", "label": kind}
            ax.fill_between(at, below, top, **style)
        below = top
    if name:
        ax.plot(at, below, drawstyle="steps-post", label=name, **{**line(name), "linewidth": 1.1})


def _draw_tops(ax: Any, at: pd.Series, tops: Any, name: str) -> None:
    """Lines of the kinds' tops; only the highest, the sum, has a label."""
    style = {**line(name), "drawstyle": "steps-post"}
    below = np.zeros(len(at))
    for top in tops[:-1]:
        if (top > below).any() and (top < tops[-1]).any():
            ax.plot(at, top, **{**style, "linewidth": 0.7, "alpha": 0.7})
        below = top
    ax.plot(at, tops[-1], label=name, **{**style, "linewidth": 1.1})


def _draw_readings(ax: Any, part: pd.DataFrame, time: Scale, memory: Scale) -> None:
    """The meter's readings, where there are any."""
    read = part.dropna(subset="measured")
    if len(read):
        style = {"color": BLACK, "linewidth": 0.8, "drawstyle": "steps-post"}
        at, held = time.of(read["at_s"]), memory.of(read["measured"])
        ax.plot(at, held, label="read by the meter", **style)


def _draw_capacity(ax: Any, data: pd.DataFrame, top: float, memory: Scale) -> None:
    """The capacity as a line, or as a note where it lies far above all data."""
    capacity = float(data["capacity"].iloc[0])
    if top >= SQUASHED * capacity:
        style = {"color": BLACK, "linewidth": 1, "linestyle": ":"}
        ax.axhline(memory.of(capacity), label="capacity", **style)
        ax.set_ylim(0, memory.of(max(capacity, top)) * 1.08)
        return
    ax.set_ylim(0, memory.of(top) * 1.25)
    text = f"\u2191 capacity {amount(capacity, 'bytes')}, above the axis"
    place = {"xy": (0.995, 0.98), "xycoords": "axes fraction", "ha": "right", "va": "top"}
    ax.annotate(text, fontsize=8, color=BLACK, **place)


def occupancy_data(run: Run) -> pd.DataFrame:
    """Requests running (issued, not finished) and waiting over time: at_s, running, waiting.

    A preempted request counts as running.
    """
    rows = run.requests[run.requests["status"].eq("finished")]
    if rows.empty:
        return pd.DataFrame(columns=["at_s", "running", "waiting"])
    arrived, issued, ended = (
        np.sort(rows[name].to_numpy(float)) / 1e9
        for name in ("arrival_ns", "scheduled_ns", "finish_ns")
    )
    at = np.linspace(arrived[0], ended[-1], BINS)
    counts = [np.searchsorted(times, at, side="right") for times in (arrived, issued, ended)]
    running, waiting = counts[1] - counts[2], counts[0] - counts[1]
    return pd.DataFrame({"at_s": at, "running": running, "waiting": waiting})


def plot_occupancy(data: pd.DataFrame, ax: Any = None, count: str = "running") -> Any:
    """Running or waiting requests over time, a curve per run (column `run`)."""
    ax, scale = axes(ax), axis_scale(data["at_s"], "s")
    for name, part in data.groupby("run", sort=False):
        style = {"drawstyle": "steps-post", **line(str(name)), "linewidth": 1.2}
        ax.plot(scale.of(part["at_s"]), part[count], label=name, **style)
    ax.set(xlabel=f"time, {scale.unit}", ylabel="requests", title=count)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.set_ylim(bottom=0)
    legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def window_s(run: Run) -> tuple[float, float]:
    """The time of WINDOW_OPS operations: around the first copy, or in the middle of the run."""
    rows = run.steps.sort_values("start_ns", kind="stable")
    if rows.empty:
        return 0.0, 0.0
    copies = np.flatnonzero(rows["lane"].str.contains("->"))
    centre = int(copies[0]) if len(copies) else len(rows) // 2
    first = min(max(0, centre - WINDOW_OPS // 2), max(0, len(rows) - WINDOW_OPS))
    part = rows.iloc[first : first + WINDOW_OPS]
    return float(part["start_ns"].min()) / 1e9, float(part["end_ns"].max()) / 1e9


def gantt_data(run: Run, window: tuple[float, float]) -> pd.DataFrame:
    """Operations in a window, in seconds: columns lane, group, start_s, end_s, step.

    With several devices a lane's name begins with its device's; one host serves them all.
    """
    ops = operations(run)
    if len(devices(run)) > 1:
        ops["lane"] = ops["device"].astype(str) + ":" + ops["lane"]
    host = ops[ops["host_ns"] > 0]
    columns = {"start_s": ops["start_ns"] / 1e9, "end_s": ops["end_ns"] / 1e9}
    shown = ops.assign(**columns)[["lane", "group", "start_s", "end_s", "step"]]
    start = host["issue_ns"] / 1e9
    hosts = host.assign(lane="host", group="host", start_s=start, end_s=start + host["host_s"])
    rows = pd.concat([hosts[shown.columns], shown])
    return rows[(rows["end_s"] > window[0]) & (rows["start_s"] < window[1])]


def plot_gantt(
    data: pd.DataFrame, ax: Any = None, window: tuple[float, float] | None = None
) -> Any:
    """Lanes as rows, operations as bars, coloured by class; `window` is in seconds."""
    ax, scale = axes(ax), axis_scale(data["end_s"], "s")
    lanes = sorted(data["lane"].unique(), key=lambda lane: (lane != "host", "->" in lane, lane))
    for row, lane in enumerate(lanes):
        for group, part in data[data["lane"].eq(lane)].groupby("group"):
            starts, ends = scale.of(part["start_s"]), scale.of(part["end_s"])
            bars = list(zip(starts, ends - starts, strict=True))
            edge = 0.0 if group == "host" else 0.4  # the host's bars are too thin for one
            style = {"facecolor": group_color(str(group)), "edgecolor": "white", "linewidth": edge}
            ax.broken_barh(bars, (row - 0.38, 0.76), label=f"_{group}", **style)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel=f"time, {scale.unit}")
    if window is not None and window[0] < window[1]:
        ax.set_xlim(*map(scale.of, window))
    _legend_of_groups(ax, sorted(data["group"].unique()))
    return ax


def _legend_of_groups(ax: Any, groups: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=group_color(group), label=group) for group in groups]
    if handles:
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
