"""Causes of a difference between two runs: operations, their consequence, lanes, settings.

A difference has two causes that are told apart. `retimed` is the measurement at equal decisions,
with the durations that were predicted for its operations. `duration_ratios` scale the durations of
a simulation that decides for itself: it says how much of the difference comes from durations, with
all that they do to decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.agreement import common_plans
from analysis.distance import relative_error
from analysis.metric_names import LATENCIES, MEASUREMENT, PREDICTION
from analysis.metrics import samples
from analysis.run import Run, flat
from analysis.training import MEAN_STEP, STEP, training_summary
from analysis.usage import host_share, lane_shares, memory_use, operations

HOST = "host"
# Throughput follows the arrivals: at equal decisions it says nothing.
SPLIT = ("mean ttft", "mean tpot", "mean e2e", MEAN_STEP, "peak kv")
Floats = NDArray[np.float64]
COMPUTING = ("cpu", "compute_2", "compute")  # the last has the say where both are busy
TIMES = ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns")
LEAST = 10  # operations that a ratio rests on, where there are as many
MOST = {"slices": 16, "load": 8, "context": 4}  # ratios by each part, within the ones before

Ratio = dict[str, Any]


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
    a, b = (flat(run.config) for run in (prediction, measurement))
    rows = [
        (key, str(a.get(key, "-")), str(b.get(key, "-")))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]
    return pd.DataFrame(rows, columns=["key", "prediction", "measurement"])


# ---- the measurement at equal decisions
# Each plan, each batch and each wait for a request stays as it was measured. Where a computing lane
# is busy, time passes by the predicted over the measured duration of its operation; else where the
# host makes a plan, by that of the host's time; else where a copy or a collective is in flight, by
# its. Otherwise it passes as measured. A request arrives within an operation where it did.
class Clock:
    """Time of a device as it would have passed with predicted durations."""

    def __init__(self, operations: pd.DataFrame) -> None:
        """A clock from the matched operations of a device, see `matched_steps`."""
        host = operations[operations["host_s_measurement"] > 0]
        hosts = _lane(host["issue_ns_measurement"], host, "host_s")
        lanes = {
            str(name): _lane(part["start_ns_measurement"], part, "duration_s")
            for name, part in operations.groupby("lane")
        }
        moving = [lane for name, lane in lanes.items() if name not in COMPUTING]
        computing = [lanes[name] for name in COMPUTING if name in lanes]
        spans = [*moving, hosts, *computing]
        self._at = np.unique(np.concatenate([part for lane in spans for part in lane[:2]]))
        pace = np.ones(max(0, len(self._at) - 1))
        for lane in spans:
            _paint(pace, self._at, *lane)
        self._passed = np.concatenate([[0.0], np.cumsum(pace * np.diff(self._at))])

    def ns(self, at_ns: Floats) -> Floats:
        """Times of this clock for measured ones, NaN where unknown."""
        if not len(self._at):
            return at_ns
        early = np.minimum(at_ns - self._at[0], 0)  # outside of the operations as measured
        late = np.maximum(at_ns - self._at[-1], 0)
        found: Floats = np.interp(at_ns, self._at, self._passed) + early + late
        return found


def _lane(starts_ns: pd.Series, rows: pd.DataFrame, name: str) -> tuple[Floats, Floats, Floats]:
    """Starts and ends of what a lane did, in order, and predicted over measured time."""
    measured_s = rows[f"{name}_measurement"].to_numpy(float)
    order = np.argsort(starts_ns.to_numpy(), kind="stable")
    order = order[measured_s[order] > 0]
    starts = starts_ns.to_numpy(float)[order]
    ratio = rows[f"{name}_prediction"].to_numpy(float)[order] / measured_s[order]
    return starts, starts + measured_s[order] * 1e9, ratio


def _paint(pace: Floats, at: Floats, starts: Floats, ends: Floats, ratio: Floats) -> None:
    """Sets the pace between the times `at` where a lane is busy."""
    middle = (at[:-1] + at[1:]) / 2
    number = np.searchsorted(starts, middle, side="right") - 1
    busy = number >= 0
    busy[busy] = middle[busy] < ends[number[busy]]
    pace[busy] = ratio[number[busy]]


def retimed(operations: pd.DataFrame, measurement: Run) -> Run:
    """The requests and training steps of a measured run, with predicted durations.

    Args:
        operations: of a replay of the measured plans and of the measurement, side by side.
        measurement: the measured run.

    Returns:
        The run; its tables of steps, memory and plans are as measured.
    """
    clocks = {int(str(name)): Clock(part) for name, part in operations.groupby("device")}
    first = min(clocks, default=0)
    clocks.setdefault(first, Clock(operations))
    requests, training = measurement.requests.copy(), measurement.training.copy()
    devices = requests["device"].fillna(first).to_numpy(int)
    for device in {*devices.tolist()}:
        own, clock = devices == device, clocks.get(device, clocks[first])
        for name in TIMES:
            requests[name] = requests[name].astype(float)
            requests.loc[own, name] = clock.ns(requests.loc[own, name].to_numpy(float))
        tokens = requests.loc[own, "token_ns"].map(partial(_tokens, clock))
        requests.loc[own, "token_ns"] = tokens
    for name in ("start_ns", "end_ns"):
        training[name] = clocks[first].ns(training[name].to_numpy(float))
    return replace(measurement, requests=requests, training=training)


def _tokens(clock: Clock, token_ns: Sequence[int] | None) -> Floats | None:
    return None if token_ns is None else clock.ns(np.asarray(token_ns, float))


# ---- measured over predicted durations
def duration_ratios(replay: Run, measurement: Run) -> list[Ratio]:
    """Ratios of the durations of a replay of the measured plans, for its configuration.

    Rows are those of sim.cost.scaled.DurationRatio: group, ratio of sums (so that long operations
    weigh more), the least size that it is for, and what is added where nothing was predicted.
    """
    rows = matched_steps(replay, measurement)
    kinds = {str(name): part for name, part in rows.groupby("group")}
    found = [row for name, part in kinds.items() for row in _of_group({"group": name}, part)]
    host_s = [rows[f"host_s_{run}"] for run in ("prediction", "measurement")]
    is_plan = (host_s[0] > 0) | (host_s[1] > 0)
    return [*found, *_of_sums({"group": HOST}, *(part[is_plan] for part in host_s))]


def _of_group(where: Ratio, rows: pd.DataFrame, parts: Sequence[str] = SIZES) -> Iterator[Ratio]:
    """The ratios of operations by slices, within them by load, and within that by context."""
    if not parts:
        yield from _of_sums(where, rows["duration_s_prediction"], rows["duration_s_measurement"])
        return
    part, *others = parts
    for least, members in _buckets(rows[part].to_numpy(float), MOST[part]):
        yield from _of_group({**where, f"{part}_from": least}, rows[members], others)


def _buckets(values: NDArray[Any], most: int) -> Iterator[tuple[float, NDArray[Any]]]:
    """Least values of equally full buckets, the first from 0 on, and the members of each."""
    count = max(1, min(most, len(values) // LEAST))
    inner = np.quantile(values, np.arange(1, count) / count, method="higher")
    starts = np.unique([0.0, *inner])
    places = np.searchsorted(starts, values, side="right") - 1
    for number, start in enumerate(starts):
        members = places == number
        if members.any():
            yield float(start), members


def _of_sums(where: Ratio, predicted_s: pd.Series, measured_s: pd.Series) -> Iterator[Ratio]:
    """The ratio of two sums; where nothing was predicted, the mean that was measured is added."""
    if not len(measured_s):
        return
    total_s = float(predicted_s.sum())
    if total_s > 0:
        yield {**where, "ratio": float(measured_s.sum()) / total_s}
    elif measured_s.sum() > 0:
        yield {**where, "ratio": 1.0, "added_ns": float(measured_s.mean()) * 1e9}
