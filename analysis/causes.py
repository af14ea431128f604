"""Causes of a difference between two runs: operations, decisions against timing, lanes, keys."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.agreement import common_plans
from analysis.distance import relative_error
from analysis.metric_names import LATENCIES, MEASUREMENT, PREDICTION, THROUGHPUTS
from analysis.metrics import samples, throughput
from analysis.run import Run
from analysis.training import MEAN_STEP, STEP, training_summary
from analysis.usage import host_share, lane_shares, memory_use, operations

SPLIT = ("mean ttft", "mean tpot", "mean e2e", *THROUGHPUTS, MEAN_STEP, "peak kv")


def matched_steps(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Operations of the plans that both logs begin with, side by side."""
    common = common_plans(prediction, measurement)
    keys = ["index", "device", "lane", "order"]
    parts = []
    for run in (prediction, measurement):
        index = run.plans.groupby("device").cumcount()  # over the plans of a device
        kept = index < run.plans["device"].map(common)
        number = pd.Series(index[kept].to_numpy(), index=run.plans["step"][kept])
        ops = operations(run).assign(index=run.steps["step"].map(number))
        parts.append(ops.dropna(subset="index"))
    figures = ["start_ns", "duration_s", "host_s", "peak_bytes"]
    left, right = parts[0][[*keys, *figures]], parts[1][[*keys, "group", *figures]]
    return left.merge(right, on=keys, suffixes=("_prediction", "_measurement"))


def step_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Durations of matched operations by group, and of the host per plan: the cost model's
    error. sum_error weighs long operations more; mean_abs is over single operations.
    """
    parts = [(str(name), part, "duration_s") for name, part in rows.groupby("group")]
    host = rows[(rows["host_s_prediction"] > 0) | (rows["host_s_measurement"] > 0)]
    if len(host):
        parts.append(("host", host, "host_s"))
    out = []
    for name, part, column in parts:
        a, b = part[f"{column}_prediction"], part[f"{column}_measurement"]
        single = ((a - b) / b.where(b > 0)).abs().mean()
        total = relative_error(float(a.sum()), float(b.sum()))
        out.append((name, len(part), a.sum(), b.sum(), a.mean(), b.mean(), total, single))
    runs = (PREDICTION, MEASUREMENT)
    sums = [f"{figure}_{run}_s" for figure in ("sum", "mean") for run in runs]
    return pd.DataFrame(out, columns=["group", "count", *sums, "sum_error", "mean_abs"])


def split(prediction: Run, replay: Run | None, measurement: Run) -> pd.DataFrame:
    """The difference of each metric in parts: total = decisions + timing, exactly, in its unit.

    decisions = prediction - replay (same cost model, other plans); timing = replay - measurement
    (same plans, other durations). `_share` columns are relative to the measurement.
    """
    names = ["metric", "prediction", "replay", "measurement", "decisions", "timing", "total"]
    if replay is None:
        return pd.DataFrame(columns=[*names, "decisions_share", "timing_share"])
    figures = [_figures(run) for run in (prediction, replay, measurement)]
    rows = []
    for name in SPLIT:
        if all(name in figure for figure in figures):
            a, r, b = (figure[name] for figure in figures)
            rows.append((name, a, r, b, a - r, r - b, a - b))
    out = pd.DataFrame(rows, columns=names)
    size = out["measurement"].abs().where(out["measurement"] != 0)
    return out.assign(decisions_share=out["decisions"] / size, timing_share=out["timing"] / size)


def _figures(run: Run) -> dict[str, float]:
    values = samples(run)
    out = {f"mean {m}": float(values[m].mean()) for m in LATENCIES if len(values[m])}
    use = memory_use(run)
    kv = use[use["pool"].str.startswith("gpu") & use["kind"].eq("kv")]["peak"]
    if STEP in (trained := training_summary(run)):
        out[MEAN_STEP] = float(trained[STEP])
    return out | throughput(run) | ({"peak kv": float(kv.max())} if len(kv) else {})


def shares(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Share of each run that every lane, and the host between plans, was busy."""
    a, b = ({**lane_shares(run), "host": host_share(run)} for run in (prediction, measurement))
    rows = [(name, a.get(name, 0.0), b.get(name, 0.0)) for name in sorted(a.keys() | b.keys())]
    return pd.DataFrame(rows, columns=["lane", "prediction", "measurement"])


def config_differences(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Configuration keys with different values: with one trace and policy, only the backend's."""
    a, b = (_flat(run.config) for run in (prediction, measurement))
    rows = [
        (key, str(a.get(key, "-")), str(b.get(key, "-")))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]
    return pd.DataFrame(rows, columns=["key", "prediction", "measurement"])


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {prefix.removesuffix("."): config}
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= _flat(value, f"{prefix}{key}.")
    return out
