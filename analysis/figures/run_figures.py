"""The figures of a report: titles, captions, panels and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.compare import Comparison
from analysis.figures import plots, timelines, training_plots
from analysis.figures.style import RC, legend, save
from analysis.metric_names import MEASUREMENT, PREDICTION
from analysis.run import Run
from analysis.usage import devices

CDFS = ("ttft", "tpot", "itl", "e2e")
PARITY = ("ttft", "tpot", "e2e")
TEXTS = {
    "latencies": (
        "Latencies",
        "Distribution functions over requests; inter-token latency over all gaps.",
    ),
    "parity": (
        "Request by request",
        "One point per request. On the line: predicted exactly; bands of 10 and 20 %.",
    ),
    "steps": (
        "Step by step",
        "Durations of the same operations in both runs (all of them with a replay of the measured "
        "plans, else those of the plans in common). Left: against one another; right: the error "
        "over time, where drift is a slope.",
    ),
    "memory": (
        "Memory over time",
        "The GPU tier of each device by kind, as booked; pending bytes are freed but still in use "
        "by an operation. Of two runs the measurement is filled, the prediction dashed; black: the "
        "meter's reading.",
    ),
    "requests": (
        "Running and waiting",
        "Requests in service, and requests that wait for their first step. A preempted request "
        "counts as running.",
    ),
    "lanes": (
        "Lanes",
        "The operations of each lane in one window of time: around the first copy, else mid-run.",
    ),
}


@dataclass(frozen=True)
class Shown:
    """A figure on disk; its CSV lies beside its SVG."""

    name: str
    title: str
    caption: str
    svg: Path


def compared(comparison: Comparison, folder: Path) -> list[Shown]:
    """Draws and saves every figure of a comparison."""
    a, b = comparison.prediction, comparison.measurement
    runs = {PREDICTION: a, MEASUREMENT: b}
    drawn = _training(runs, folder)
    if _is_served(runs):
        drawn.append(_latencies(runs, folder))
        parity = [plots.parity_data(comparison.requests, metric) for metric in PARITY]
        drawn.append(panel("parity", parity, _parity, (10.5, 3.6), folder))
    steps = plots.step_data(comparison.replay or a, b)
    if len(steps):
        drawn.append(panel("steps", [steps, steps], _step, (11, 3.4), folder, widths=(1, 2.2)))
    return drawn + _timelines(runs, timelines.window_s(b), folder)


def single(run: Run, folder: Path) -> list[Shown]:
    """Draws and saves the figures of one run."""
    runs = {MEASUREMENT if run.is_measured else PREDICTION: run}
    drawn = _training(runs, folder)
    if _is_served(runs):
        drawn.append(_latencies(runs, folder))
    return drawn + _timelines(runs, timelines.window_s(run), folder)


def _is_served(runs: Mapping[str, Run]) -> bool:
    """Whether a run has requests, or nothing else to show."""
    return any(len(run.requests) or run.training.empty for run in runs.values())


def _training(runs: Mapping[str, Run], folder: Path) -> list[Shown]:
    """Losses and step times; empty without training."""
    data = training_plots.training_data(runs)
    columns = training_plots.shown(data)
    if not columns:
        return []

    def draw(part: pd.DataFrame, ax: Any) -> None:
        training_plots.plot_training(part, ax, columns[ax.get_subplotspec().colspan.start])

    size, text = (10.5, 3.0), training_plots.TEXT
    return [panel("training", [data] * len(columns), draw, size, folder, text=text)]


def _latencies(runs: Mapping[str, Run], folder: Path) -> Shown:
    parts = [plots.ecdf_data(runs, metric) for metric in CDFS]
    return panel("latencies", parts, _ecdf, (12, 2.8), folder)


def _timelines(runs: Mapping[str, Run], window: tuple[float, float], folder: Path) -> list[Shown]:
    def frames(make: Callable[[Run], pd.DataFrame]) -> list[pd.DataFrame]:
        return [make(run).assign(run=name) for name, run in runs.items()]

    def lanes(data: pd.DataFrame, ax: Any) -> None:
        timelines.plot_gantt(data, ax, window)

    memory = _memory(runs)
    busy = pd.concat(frames(timelines.occupancy_data))
    gantt = frames(lambda run: timelines.gantt_data(run, window))
    lanes_shown = max(part["lane"].nunique() for part in gantt)
    rows, height = (len(runs), 1), 0.3 + max(1.5, 0.37 * lanes_shown) * len(runs)
    size = (10.5, 2.6 * len(memory))
    drawn = [panel("memory", memory, _held, size, folder, (len(memory), 1))]
    if _is_served(runs):
        drawn.append(panel("requests", [busy, busy], _busy, (10.5, 2.6), folder))
    return [*drawn, panel("lanes", gantt, _titled(lanes), (10.5, height), folder, rows)]


def _memory(runs: Mapping[str, Run]) -> list[pd.DataFrame]:
    """The memory over time of each device, of all runs; an empty frame for runs without devices."""
    found = sorted({device for run in runs.values() for device in devices(run)}) or [0]
    return [
        pd.concat(
            [
                timelines.memory_data(run, f"gpu:{device}").assign(run=name, device=device)
                for name, run in runs.items()
            ]
        )
        for device in found
    ]


def _held(data: pd.DataFrame, ax: Any) -> None:
    timelines.plot_memory(data, ax)
    rows = ax.get_subplotspec().get_gridspec().nrows
    if len(data) and rows > 1:
        ax.set_title(f"device {int(data['device'].iloc[0])}")


def _is_first(ax: Any) -> bool:
    return bool(ax.get_subplotspec().is_first_col())


def _ecdf(data: pd.DataFrame, ax: Any) -> None:
    plots.plot_ecdf(data, ax)
    if not _is_first(ax) and ax.get_legend():
        ax.get_legend().remove()


def _parity(data: pd.DataFrame, ax: Any) -> None:
    plots.plot_parity(data, ax)
    if len(data):
        ax.set_title(plots.NAMES[str(data["metric"].iloc[0])])


def _step(data: pd.DataFrame, ax: Any) -> None:
    if _is_first(ax):
        legend(plots.plot_parity(data, ax), loc="upper left", markerscale=2, handletextpad=0.2)
        for handle in ax.get_legend().legend_handles if ax.get_legend() else ():
            handle.set_alpha(1)  # its points are faint where they are many
    else:
        plots.plot_step_time(data, ax)


def _busy(data: pd.DataFrame, ax: Any) -> None:
    timelines.plot_occupancy(data, ax, "running" if _is_first(ax) else "waiting")
    if _is_first(ax) and ax.get_legend():
        ax.get_legend().remove()


def _titled(plot: Callable[[pd.DataFrame, Any], Any]) -> Callable[[pd.DataFrame, Any], None]:
    def draw(data: pd.DataFrame, ax: Any) -> None:
        plot(data, ax)
        if len(data):
            ax.set_title(str(data["run"].iloc[0]))

    return draw


def panel(
    name: str,
    parts: Sequence[pd.DataFrame],
    draw: Callable[[pd.DataFrame, Any], Any],
    size: tuple[float, float],
    folder: Path,
    grid: tuple[int, int] | None = None,
    widths: Sequence[float] | None = None,
    text: tuple[str, str] | None = None,
) -> Shown:
    """Draws and saves one figure with axes per frame; its CSV has each distinct frame once.

    Args:
        name: name of the files.
        parts: a frame per axes.
        draw: draws a frame on axes.
        size: width and height in inches.
        folder: folder of the files.
        grid: rows and columns of axes; one row by default.
        widths: relative widths of columns.
        text: title and caption; by default those of `name` in TEXTS.

    Returns:
        The figure.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(RC):
        fig = Figure(figsize=size)
        rows, columns = grid or (1, len(parts))
        cells = fig.subplots(rows, columns, squeeze=False, width_ratios=widths)
        for ax, data in zip(cells.flat, parts, strict=True):
            draw(data, ax)
        once = {id(part): part for part in parts if len(part)}
        svg = save(fig, pd.concat(list(once.values()) or [parts[0]]), folder, name)
    return Shown(name, *(text or TEXTS[name]), svg)
