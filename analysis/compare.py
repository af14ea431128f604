"""Two runs of one trace side by side: the size of their differences, and the causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.agreement import Agreement, agreement
from analysis.causes import (
    config_differences,
    is_told,
    matched_steps,
    retimed,
    shares,
    split,
    step_errors,
)
from analysis.distance import ks, relative_error, wasserstein
from analysis.metric_names import LATENCIES, THROUGHPUTS
from analysis.metrics import per_request, samples, statistics, throughput
from analysis.run import Run
from analysis.training import (
    UNITS,
    Losses,
    check_same_training,
    finetuning_summary,
    losses,
    paired_steps,
    training_summary,
)
from analysis.usage import memory_use
from analysis.workspace import workspace_rows

MEMORY_KEYS = ["pool", "kind", "stat"]
PER_REQUEST = ("ttft", "tpot", "e2e", "norm_latency")


@dataclass(frozen=True, eq=False)
class Comparison:
    """A prediction beside a measurement. Errors are signed and relative to the measurement.

    errors              metric, stat, unit, prediction, measurement, error
    distances           metric, ks, wasserstein
    requests            both values and the error per request that finished in both runs
    request_errors      distribution of these errors
    memory              pool, kind, stat, both values, error; then the workspace of sampled launches
    training            `paired_steps`
    steps               durations by group
    split               `split`; empty without a replay of the measured plan log, and without a plan
                        in common: then two policies differ, and durations did not part them
    within_spread       metrics left out of `split`: their error is within the spread of reruns
    shares              busy share of each lane and of the host, per run
    config_differences  configuration keys with different values
    plans               agreement of the plan logs
    """

    prediction: Run
    measurement: Run
    replay: Run | None
    corrected: Run | None
    reruns: tuple[Run, ...]
    errors: pd.DataFrame
    distances: pd.DataFrame
    requests: pd.DataFrame
    request_errors: pd.DataFrame
    memory: pd.DataFrame
    training: pd.DataFrame
    steps: pd.DataFrame
    split: pd.DataFrame
    within_spread: tuple[str, ...]
    shares: pd.DataFrame
    config_differences: pd.DataFrame
    plans: Agreement

    def error(self, metric: str, stat: str) -> float:
        """One signed relative error; NaN where it is undefined."""
        rows = self.errors
        found = rows[rows["metric"].eq(metric) & rows["stat"].eq(stat)]["error"]
        return float(found.iloc[0]) if len(found) else float("nan")

    @property
    def losses(self) -> Losses:
        """Whether both runs computed equal losses."""
        return losses(self.training)

    @property
    def busy_error(self) -> float:
        """Signed relative error of all durations in `steps` together; NaN without any."""
        ops = self.steps[self.steps["group"].ne("host")]
        sums = (float(ops[f"sum_{run}_s"].sum()) for run in ("prediction", "measurement"))
        return relative_error(*sums)


def compare(
    prediction: Run,
    measurement: Run,
    replay: Run | None = None,
    corrected: Run | None = None,
    reruns: Sequence[Run] = (),
) -> Comparison:
    """Joins two runs of one trace.

    Args:
        prediction: the simulated run.
        measurement: the measured run.
        replay: a simulation of the measured plan log.
        corrected: a simulation with durations scaled by the measured ratios.
        reruns: other measurements of the same point.

    Returns:
        The comparison.

    Raises:
        ValueError: the runs served different requests, or trained different steps.
    """
    for run in (prediction, replay, corrected, *reruns):
        if run is not None:
            check_same_work(run, measurement)
    requests = joined(prediction, measurement)
    plans = agreement(prediction, measurement)
    steps = matched_steps(replay or prediction, measurement)
    equal = retimed(steps, measurement) if replay and plans.common else None
    parts = split(prediction, equal, measurement, corrected, reruns)
    told = is_told(parts)
    return Comparison(
        prediction,
        measurement,
        replay,
        corrected,
        tuple(reruns),
        errors=errors(prediction, measurement),
        distances=distances(prediction, measurement),
        requests=requests,
        request_errors=request_errors(requests),
        memory=pd.concat([memory_errors(prediction, measurement), workspace(steps)]),
        training=paired_steps(prediction, measurement),
        steps=step_errors(steps),
        split=parts[told],
        within_spread=tuple(parts["metric"][~told]),
        shares=shares(prediction, measurement),
        config_differences=config_differences(prediction, measurement),
        plans=plans,
    )


def check_same_work(a: Run, b: Run) -> None:
    """ValueError unless both runs had the same requests and the same training steps."""
    check_same_training(a, b)
    hashes = [run.provenance.get("trace_hash") for run in (a, b)]
    if None not in hashes and hashes[0] != hashes[1]:
        raise ValueError(f"{a.name} and {b.name} replay different traces (hashes differ)")
    left, right = (run.requests.set_index("request_id")["prompt_tokens"] for run in (a, b))
    if odd := sorted(set(left.index) ^ set(right.index)):
        where = a.name if odd[0] in left.index else b.name
        raise ValueError(
            f"{a.name} and {b.name} replay different traces: "
            f"{len(odd)} requests are in one only (request {odd[0]} in {where})"
        )
    if differ := [i for i in left.index if left[i] != right[i]]:
        raise ValueError(
            f"{a.name} and {b.name} replay different traces: request {differ[0]} has "
            f"{left[differ[0]]} prompt tokens in one, {right[differ[0]]} in the other"
        )


def errors(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Every latency at its mean and percentiles, and every throughput."""
    sampled = [samples(run) for run in (prediction, measurement)]
    rows: list[tuple[Any, ...]] = []
    for metric in LATENCIES:
        a, b = (statistics(values[metric]) for values in sampled)
        rows += [(metric, stat, "s", a[stat], b[stat]) for stat in a if stat in b]
    a, b = throughput(prediction), throughput(measurement)
    units = {"request_throughput": "req/s", "duration_s": "s"}
    for metric in (*THROUGHPUTS, "duration_s"):
        if metric in a and metric in b:
            name, unit = metric.removesuffix("_s"), units.get(metric, "tok/s")
            rows.append((name, "run", unit, a[metric], b[metric]))
    a, b = (training_summary(run) | finetuning_summary(run) for run in (prediction, measurement))
    for metric, unit in UNITS.items():
        if metric in a and metric in b:
            rows.append((metric, "run", unit, a[metric], b[metric]))
    return _with_error(rows, ["metric", "stat", "unit"])


def _with_error(rows: list[tuple[Any, ...]], names: list[str]) -> pd.DataFrame:
    """Rows end in prediction, measurement; adds the signed relative error."""
    full = [(*row, relative_error(row[-2], row[-1])) for row in rows]
    return pd.DataFrame(full, columns=[*names, "prediction", "measurement", "error"])


def distances(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Per latency: KS and Wasserstein-1 (over the measured mean) between the distributions."""
    a, b = samples(prediction), samples(measurement)
    rows = [(m, ks(a[m], b[m]), wasserstein(a[m], b[m])) for m in LATENCIES]
    return pd.DataFrame(rows, columns=["metric", "ks", "wasserstein"])


def joined(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Requests finished in both, by id: `<metric>_s_prediction`, `_s_measurement`, `_error`."""
    a, b = per_request(prediction), per_request(measurement)
    both = a.index[a["status"].eq("finished") & b["status"].eq("finished").reindex(a.index)]
    columns: dict[str, Any] = {n: b.loc[both, n] for n in ("prompt_tokens", "output_tokens")}
    for metric in PER_REQUEST:
        left, right = a.loc[both, f"{metric}_s"], b.loc[both, f"{metric}_s"]
        columns[f"{metric}_s_prediction"], columns[f"{metric}_s_measurement"] = left, right
        columns[f"{metric}_error"] = (left - right) / right.where(right > 0)
    return pd.DataFrame(columns, index=both)


def request_errors(requests: pd.DataFrame) -> pd.DataFrame:
    """Distribution of the per-request errors: signed percentiles, mean absolute, share in 10 %."""
    rows = []
    for metric in PER_REQUEST:
        values = requests[f"{metric}_error"].dropna().to_numpy(float)
        if len(values):
            p10, p50, p90 = np.percentile(values, (10, 50, 90), method="linear")
            size = np.abs(values)
            rows.append((metric, len(values), p10, p50, p90, size.mean(), (size <= 0.1).mean()))
    names = ["metric", "requests", "p10", "p50", "p90", "mean_abs", "within_10"]
    return pd.DataFrame(rows, columns=names)


def memory_errors(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Peak and time-weighted mean bytes per pool and kind that both runs know.

    A prediction has no meter. Its held bytes stand beside the reading (kind `measured`), because a
    meter sees no pending bytes. The operating system's figure (kind `process`) has no prediction.
    """
    a, b = memory_use(prediction), memory_use(measurement)
    if "measured" not in set(a["kind"]):
        held = memory_use(prediction, ["held"]).assign(kind="measured")
        a = pd.concat([a, held], ignore_index=True)
    both = a.merge(b, on=["pool", "kind"], how="right", suffixes=("_a", "_b"))
    both = both[both["peak_a"].notna() | both["kind"].eq("process")]
    both = both.sort_values("pool", kind="stable")
    rows: list[tuple[Any, ...]] = [
        (row["pool"], row["kind"], stat, row[f"{stat}_a"], row[f"{stat}_b"])
        for row in both.to_dict("records")
        for stat in ("peak", "mean")
    ]
    return _with_error(rows, MEMORY_KEYS)


def workspace(steps: pd.DataFrame) -> pd.DataFrame:
    """Errors of the workspace of operations in both runs; the p90 error is over single launches."""
    columns = [*MEMORY_KEYS, "prediction", "measurement", "error"]
    return pd.DataFrame(workspace_rows(steps), columns=columns)
