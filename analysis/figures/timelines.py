"""Timelines of a run: memory, lanes, running and waiting requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.figures.style import BLACK, KINDS, axes, group_color, legend, line
from analysis.metric_names import PARTS, PENDING
from analysis.run import Run
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
    """Memory of one pool stacked by kind, with its capacity and the meter's reading."""
    ax = axes(ax)
    colors = {**KINDS, PENDING: "#DDDDDD"}
    shown = [kind for kind in colors if kind in data and data[kind].max() > 0]
    below = np.zeros(len(data))
    for kind in shown:
        top = below + data[kind].to_numpy(float) / MIB
        style = {"color": colors[kind], "linewidth": 0, "step": "post", "label": kind}
        ax.fill_between(data["at_s"], below, top, **style)
        below = top
    if len(data):
        capacity = float(data["capacity"].iloc[0]) / MIB
        ax.axhline(capacity, color=BLACK, linewidth=1, linestyle=":", label="capacity")
        ax.set_ylim(0, capacity * 1.08)
        if data["measured"].notna().any():
            read = data.dropna(subset="measured")
            style = {"color": BLACK, "linewidth": 0.8, "drawstyle": "steps-post"}
            ax.plot(read["at_s"], read["measured"] / MIB, label="measured by the meter", **style)
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set(xlabel="seconds", ylabel="MiB")
    return ax


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
    ax = axes(ax)
    for name, part in data.groupby("run", sort=False):
        style = {"drawstyle": "steps-post", **line(str(name)), "linewidth": 1.2}
        ax.plot(part["at_s"], part[count], label=name, **style)
    ax.set(xlabel="seconds", ylabel="requests", title=count)
    ax.set_ylim(bottom=0)
    legend(ax, loc="upper right")
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


def plot_gantt(data: pd.DataFrame, ax: Any = None) -> Any:
    """Lanes as rows, operations as bars, coloured by class."""
    ax = axes(ax)
    lanes = sorted(data["lane"].unique(), key=lambda lane: (lane != "host", "->" in lane, lane))
    for row, lane in enumerate(lanes):
        for group, part in data[data["lane"].eq(lane)].groupby("group"):
            bars = list(zip(part["start_s"], part["end_s"] - part["start_s"], strict=True))
            edge = 0.0 if group == "host" else 0.4  # the host's bars are too thin for one
            style = {"facecolor": group_color(str(group)), "edgecolor": "white", "linewidth": edge}
            ax.broken_barh(bars, (row - 0.38, 0.76), label=f"_{group}", **style)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="seconds")
    _legend_of_groups(ax, sorted(data["group"].unique()))
    return ax


def _legend_of_groups(ax: Any, groups: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=group_color(group), label=group) for group in groups]
    if handles:
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
