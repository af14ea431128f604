"""Causes of a difference between two runs: operations, their consequence, lanes, settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.agreement import common_plans
from analysis.distance import relative_error
from analysis.metric_names import LATENCIES, MEASUREMENT, PREDICTION
from analysis.metrics import samples
from analysis.run import Run
from analysis.training import MEAN_STEP, STEP, training_summary
from analysis.usage import host_share, lane_shares, memory_use, operations

HOST = "host"
# Throughput follows the arrivals: at equal decisions it says nothing.
SPLIT = ("mean ttft", "mean tpot", "mean e2e", MEAN_STEP, "peak kv")


def matched_steps(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Operations of the plans that both logs begin with, side by side."""
    common = common_plans(prediction, measurement)
    keys = ["index", "device", "lane", "order"]
    parts = []
    for run in (prediction, measurement):
        index = run.plans.groupby("device").cumcount()  # over the plans of a device
        kept = index < run.plans["device"].map(common)
        number = pd.Series(index[kept].to_numpy(), index=run.plans["step"][kept])
        ops = operations(run).assign(index=run.steps["step"].map(number), **_sizes(run.steps))
        parts.append(ops.dropna(subset="index"))
    figures = ["issue_ns", "start_ns", "duration_s", "host_s", "peak_bytes"]
    told = [*keys, "group", *SIZES, *figures]
    left, right = parts[0][[*keys, *figures]], parts[1][told]
    return left.merge(right, on=keys, suffixes=("_prediction", "_measurement"))


SIZES = ("slices", "load", "context")  # of an operation, as sim.cost.scaled.LaunchSize


def _sizes(steps: pd.DataFrame) -> dict[str, Any]:
    """The size of each operation; of training its load is 0."""
    tokens = steps["prefill_tokens"] + steps["decode_tokens"]
    contexts = [0 if part is None else float(sum(part)) for part in steps["contexts"]]
    moved = steps["nbytes"].fillna(0)
    slices = steps["tokens"].map(lambda part: 0 if part is None else len(part))
    load = tokens.where(moved.eq(0), moved)
    return {"slices": slices.where(tokens > 0, 0), "load": load, "context": contexts}


def step_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Durations of matched operations by group, and of the host per plan: the cost model's
    error. sum_error weighs long operations more; mean_abs is over single operations.
    """
    parts = [(str(name), part, "duration_s") for name, part in rows.groupby("group")]
    host = rows[(rows["host_s_prediction"] > 0) | (rows["host_s_measurement"] > 0)]
    if len(host):
        parts.append((HOST, host, "host_s"))
    out = []
    for name, part, column in parts:
        a, b = part[f"{column}_prediction"], part[f"{column}_measurement"]
        single = ((a - b) / b.where(b > 0)).abs().mean()
        total = relative_error(float(a.sum()), float(b.sum()))
        out.append((name, len(part), a.sum(), b.sum(), a.mean(), b.mean(), total, single))
    runs = (PREDICTION, MEASUREMENT)
    sums = [f"{figure}_{run}_s" for figure in ("sum", "mean") for run in runs]
    return pd.DataFrame(out, columns=["group", "count", *sums, "sum_error", "mean_abs"])


def split(
    prediction: Run,
    retimed: Run | None,
    measurement: Run,
    corrected: Run | None = None,
    reruns: Sequence[Run] = (),
) -> pd.DataFrame:
    """The error of each metric in parts, in its unit: total = direct + consequence + rest.

    direct       retimed - measurement: durations of operations, at equal decisions
    consequence  what that error does to decisions (batching, preemption); with a corrected
                 simulation, which has the measured durations and decides for itself, prediction -
                 corrected - direct; else prediction - retimed
    rest         corrected - measurement: what durations do not explain; NaN without `corrected`
    explained    1 - |rest| / |total|
    spread       largest - smallest measured value; NaN without reruns

    `retimed` is the measurement with predicted durations. `_share` columns are relative to the
    measurement. Empty without `retimed`.
    """
    parts = ["direct", "consequence", "rest", "total"]
    runs = ["prediction", "retimed", "corrected", "measurement"]
    rows = []
    if retimed is not None:
        known = [_figures(run) for run in (prediction, retimed, measurement)]
        scaled = {} if corrected is None else _figures(corrected)
        others = [_figures(run) for run in reruns]
        for name in SPLIT:
            if all(name in figures for figures in known):
                a, equal, b = (figures[name] for figures in known)
                c, direct = scaled.get(name, float("nan")), equal - b
                rest = c - b
                consequence = a - equal if rest != rest else a - c - direct
                measured = [b, *(figures[name] for figures in others if name in figures)]
                spread = max(measured) - min(measured) if len(measured) > 1 else float("nan")
                rows.append((name, a, equal, c, b, direct, consequence, rest, a - b, spread))
    out = pd.DataFrame(rows, columns=["metric", *runs, *parts, "spread"])
    size = out["measurement"].abs().where(out["measurement"] != 0)
    out["explained"] = 1 - out["rest"].abs() / out["total"].abs().where(out["total"] != 0)
    return out.assign(**{f"{part}_share": out[part] / size for part in parts})


def is_told(split: pd.DataFrame) -> pd.Series:
    """Whether the error of each metric is more than reruns of the measurement differ."""
    spread = split["spread"]  # an unknown one hides nothing, nor does none at all
    return ~((split["total"].abs() <= spread) & (spread > 0))


def _figures(run: Run) -> dict[str, float]:
    values = samples(run)
    out = {f"mean {m}": float(values[m].mean()) for m in LATENCIES if len(values[m])}
    use = memory_use(run)
    kv = use[use["pool"].str.startswith("gpu") & use["kind"].eq("kv")]["peak"]
    if STEP in (trained := training_summary(run)):
        out[MEAN_STEP] = float(trained[STEP])
    return out | ({"peak kv": float(kv.max())} if len(kv) else {})


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
