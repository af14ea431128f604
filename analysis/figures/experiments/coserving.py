"""Figures of serving and finetuning on one device: finetuning and latency over what is swept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import FigureAxis, finished, plot_lines
from analysis.figures.run_figures import Shown, panel

MS = 1e-3
FINETUNED = FigureAxis("finetune_tokens_per_s", "finetuned tokens/s")
TRAINED = FigureAxis("train_tokens_per_s", "trained tokens/s, after the first step")
LATENCY = FigureAxis("mean_tpot_s", "mean TPOT, ms", MS)
TAIL = FigureAxis("p99_tpot_s", "p99 TPOT, ms", MS)
SAMPLES = FigureAxis("finetune_trained_tokens_per_s", "tokens/s of samples that are through")
ATTAINED = FigureAxis("slo_attainment", "requests within their SLO, %", 0.01)
HITS = FigureAxis("record_hit_rate", "records that a sample used, %", 0.01)
RATE = "rate_per_s"
SERVING, FINETUNING = "serving alone", "finetuning alone"
DEVICES = 4  # of FlexLLM's clusters
BESIDE = (
    "Left: tokens of samples that went forward per second. Middle: mean TPOT of the requests. "
    "Right: the share of them that is within their SLO."
)


def _read(runs: pd.DataFrame, column: str, by: str, x: str, series: str) -> pd.DataFrame:
    """Columns of `x`, the series and the figures of each finished run."""
    rows = finished(runs)
    names = rows[by] if by == series else rows[by].map(lambda value: f"{value} {series}")
    out = pd.DataFrame({series: names, x: rows[column].astype(float)})
    for axis in (FINETUNED, TRAINED, LATENCY, TAIL, ATTAINED, SAMPLES, HITS):
        if axis.column in rows:
            out[axis.column] = rows[axis.column].astype(float)
    return out.sort_values([series, x]).reset_index(drop=True)


def beside(
    name: str,
    column: str,
    by: str,
    series: str,
    x: FigureAxis,
    text: tuple[str, str],
    axes: Sequence[FigureAxis] = (FINETUNED, LATENCY, ATTAINED),
) -> Callable[[pd.DataFrame, Path, Path], Shown]:
    """Makes the drawing of some axes over what is swept: training, and what it costs.

    Args:
        name: of the figure.
        column: the setting along x, such as config.arrival.rate.
        by: the setting that a line has one value of.
        series: what its values are, for the legend.
        x: the axis of the setting.
        text: heading, and sentences below it.
        axes: from left to right.

    Returns:
        Draws the runs of a sweep.
    """

    def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
        data = _read(runs, column, by, x.column, series)
        shown = [axis for axis in axes if axis.column in data]  # a run may have no SLO
        return _panels(name, data, x, shown, series, folder, text)

    return drawn


def frontier(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws latency over finetuning throughput, a line per policy through its loads."""
    data = _read(runs, "config.arrival.rate", "policy", "rate_per_s", "policy")
    text = (
        "Latency against finetuning",
        "Mean TPOT of the requests over tokens of samples that went forward per second; a point is "
        "a load, a line a policy.",
    )
    draw = partial(_over, x=FINETUNED, y=LATENCY)
    return panel("coserve_frontier", [data], draw, (6.5, 3.6), folder, text=text)


def ways_to_share(runs: pd.DataFrame) -> pd.DataFrame:
    """The figures of each finished run by load, those of the bounds, and of devices of their own.

    A run that trains nothing is `serving alone`, one that serves nothing `finetuning alone`. Where
    both are there, `m of 4 devices serve` has the means over four devices of which m serve the
    load of all, and the others finetune (FlexLLM's separate clusters).

    Args:
        runs: the table of `tandem collect`.

    Returns:
        Columns policy, rate_per_s (of a device), and those of the three figures.
    """
    rows = runs[runs["status"].eq("ok")]
    data = pd.DataFrame({"policy": rows["policy"], RATE: rows["config.arrival.rate"].astype(float)})
    for axis in (FINETUNED, LATENCY, TAIL, ATTAINED):
        data[axis.column] = rows.reindex(columns=[axis.column])[axis.column].astype(float)
    serves, trains = data[LATENCY.column].notna(), data[FINETUNED.column].notna()
    data.loc[serves & ~trains, "policy"] = SERVING
    data.loc[trains & ~serves, "policy"] = FINETUNING
    alone = data.loc[trains & ~serves, FINETUNED.column].max()
    parts = [data]
    for serving in range(1, DEVICES) if alone == alone else ():  # NaN: no such run
        part = data[serves & ~trains].copy()
        part["policy"] = f"{serving} of {DEVICES} devices serve"
        part[RATE] *= serving / DEVICES
        part[FINETUNED.column] = alone * (DEVICES - serving) / DEVICES
        parts.append(part)
    return pd.concat(parts).sort_values(["policy", RATE]).reset_index(drop=True)


def coserve_table(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws finetuning and latency of the ways to share a device, with their bounds, over load."""
    data, x = ways_to_share(runs), FigureAxis(RATE, "requests per second and device")
    text = ("Ways to share a device", f"{BESIDE} A line is a policy, a bound, or devices apart.")
    axes = (FINETUNED, LATENCY, ATTAINED)
    return _panels("coserve_table", data, x, axes, "policy", folder, text)


def _panels(
    name: str,
    data: pd.DataFrame,
    x: FigureAxis,
    axes: Sequence[FigureAxis],
    series: str,
    folder: Path,
    text: tuple[str, str],
) -> Shown:
    """Draws columns side by side, each over x."""
    ys = iter(axes)

    def draw(part: pd.DataFrame, ax: Any) -> Any:
        return plot_lines(part, ax, x, next(ys), series)

    return panel(name, [data] * len(axes), draw, (4.75 * len(axes), 3.6), folder, text=text)


def _over(data: pd.DataFrame, ax: Any, x: FigureAxis, y: FigureAxis) -> Any:
    return plot_lines(data, ax, x, y, "policy")


budget_sweep = beside(
    "budget_sweep",
    "config.scheduling.token_budget",
    "config.scheduling.backward_layers",
    "layers a step",
    FigureAxis("budget_tokens", "budget of a step, tokens", is_log=True),
    ("Budgets of co-serving", f"{BESIDE} A line is a number of layers back in a step."),
)
slo_sweep = beside(
    "slo_sweep",
    "config.scheduling.slo_s",
    "config.arrival.rate",
    "requests per second",
    FigureAxis("slo_s", "SLO of a step, ms", MS),
    ("Finetuning within an SLO", f"{BESIDE} A line is a load."),
)
finetune_length = beside(
    "finetune_length",
    "config.training.data.mean_tokens",
    "policy",
    "policy",
    FigureAxis("sample_tokens", "tokens of a sample", is_log=True),
    ("Length of samples", BESIDE),
)
burstiness = beside(
    "burstiness",
    "config.arrival.burstiness",
    "policy",
    "policy",
    FigureAxis("burstiness", "burstiness of arrivals: 1 is Poisson, less is burstier"),
    ("Bursts", BESIDE),
)
tide_under_kv = beside(
    "tide_under_kv",
    "config.arrival.rate",
    "policy",
    "policy",
    FigureAxis("rate_per_s", "requests per second"),
    (
        "Training under keys and values",
        "Left: tokens trained per second. Right: mean TPOT of the requests. PatrickStar "
        "has half of the device (time_shared), or what keys and values leave (elastic).",
    ),
    (TRAINED, LATENCY),
)


BEST_SHARE, SLACK, FIXED = "time_shared_protrain, best share in hindsight", 1.05, 0.5
SHARE = "config.memory.device_share"


def breathing_kv_data(runs: pd.DataFrame) -> pd.DataFrame:
    """The figures of each finished run by load, and what a plan per load could reach.

    Where ProTrain ran in several shares of the device, half of it is the fixed plan's (none is,
    where that share is not among them). In hindsight, each load has the share that trains fastest
    among those whose mean TPOT is at most 5 % above the least: a bound on what a planner reaches
    that searches again when the load changes.

    Args:
        runs: the table of `tandem collect`.

    Returns:
        Columns policy, rate_per_s, device_share and those of the figures.
    """
    rows = finished(runs)
    data = pd.DataFrame({"policy": rows["policy"], RATE: rows["config.arrival.rate"].astype(float)})
    data["device_share"] = rows.reindex(columns=[SHARE])[SHARE].astype(float)
    for axis in (TRAINED, LATENCY):
        data[axis.column] = rows[axis.column].astype(float)
    data = data.sort_values(["policy", RATE, "device_share"]).reset_index(drop=True)
    searches = data["policy"].eq(BEST_SHARE.partition(",")[0])
    tried = data[searches]
    if tried["device_share"].nunique() < 2:
        return data
    fixed = tried[tried["device_share"].eq(FIXED)]
    chosen = [_fastest(part) for _, part in tried.groupby(RATE)]
    again = pd.concat(chosen).assign(policy=BEST_SHARE)
    return pd.concat([data[~searches], fixed, again]).reset_index(drop=True)


def _fastest(part: pd.DataFrame) -> pd.DataFrame:
    """The row, of the plans at one load the one that trains fastest and delays requests little."""
    kept = part[part[LATENCY.column] <= SLACK * part[LATENCY.column].min()]
    fastest: pd.DataFrame = kept.nlargest(1, TRAINED.column)
    return fastest


def breathing_kv(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws training and latency by load: memory that breathes, and plans for a share of it."""
    data, x = breathing_kv_data(runs), FigureAxis(RATE, "requests per second")
    axes = iter((TRAINED, LATENCY))

    def draw(part: pd.DataFrame, ax: Any) -> Any:
        return plot_lines(part, ax, x, next(axes), "policy")

    words = (
        "Left: tokens trained per second. Right: mean TPOT of the requests. elastic gives each "
        "side what the other leaves, elastic_protrain by plans made again between steps; "
        "time_shared and ProTrain's one plan keep a share."
    )
    if data["policy"].eq(BEST_SHARE).any():
        words += " In hindsight: at each load the share that trains fastest and delays little."
    text = ("Plans under keys and values", words)
    return panel("breathing_kv", [data, data], draw, (9.5, 3.6), folder, text=text)
