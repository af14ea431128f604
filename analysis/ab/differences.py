"""A against B: the difference of every metric with its interval, per request and per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose, isnan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.ab.groups import RunGroup, grouped, has_one_policy, letter, pairs
from analysis.ab.intervals import Interval, Statistic, over_blocks, over_groups, over_pairs
from analysis.classes import limits_in, met
from analysis.metrics import goodput, latencies, throughput
from analysis.run import RunFacts, whole
from analysis.training import finetuning_summary, training_summary
from analysis.usage import memory_use

Floats = NDArray[np.float64]

LATENCIES = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)
BUSY = 0.9  # load above which one pair of runs cannot say what is chance
UNITS = {
    "request_throughput": "req/s",
    "output_throughput": "tok/s",
    "slo_attainment": "share",
    "goodput": "req/s",
    "preemptions": "count",
    "peak_kv": "bytes",
    "peak_memory": "bytes",
    "mean_train_step": "s",
    "train_tokens_per_s": "tok/s",
    "finetune_tokens_per_s": "tok/s",
}
MORE_IS_BETTER = {
    **dict.fromkeys(LATENCIES, False),
    **dict.fromkeys(("request_throughput", "output_throughput", "goodput"), True),
    **{"slo_attainment": True, "preemptions": False, "mean_train_step": False},
    "finetune_tokens_per_s": True,
    "train_tokens_per_s": True,  # peak KV is neither: room that is used is no loss
}


@dataclass(frozen=True)
class FigureDifference:
    """One figure of two groups: means over their runs, and B - A with its interval."""

    metric: str
    stat: str  # mean, a percentile, or run
    unit: str
    a: float
    b: float
    interval: Interval
    has_few: bool = False  # a percentile of so few requests that one of them decides it
    is_neutral: bool = False  # a prediction beside its measurement: neither is better

    @property
    def relative(self) -> float:
        """The difference relative to A; NaN where A is 0 and B is not."""
        if self.a == 0:
            return 0.0 if self.interval.value == 0 else float("nan")
        return self.interval.value / abs(self.a)

    @property
    def verdict(self) -> str:
        """better or worse, of B; higher or lower where neither is better; else what is missing."""
        if isnan(self.interval.value):
            return "no value"
        if not self.interval.is_known:
            return "equal" if self.interval.value == 0 else "needs seeds"
        if not self.interval.excludes_zero:
            return "no difference shown"
        is_more, more = self.interval.value > 0, MORE_IS_BETTER.get(self.metric)
        if more is None or self.is_neutral:
            return "higher" if is_more else "lower"
        return "better" if is_more == more else "worse"


@dataclass(frozen=True, eq=False)
class Against:
    """One group beside the baseline.

    rows      every metric
    requests  a row per trace and request that both sides finished: `<metric>_s_a`, `_s_b` and
              `<metric>_difference_s`, with prompt_tokens, slo, arrival_s and third; means where
              a side has reruns
    classes   `winners`
    seeds     traces of which both sides have runs; 0: the groups have none in common
    load      the largest of all runs, see `load`
    left_out  requests that one run of a pair finished and the other did not
    letter    of the group that is not the baseline, in words and figures
    unpaired  runs of A and of B that are not used: the other side has no run of their trace
    """

    a: RunGroup
    b: RunGroup
    rows: Sequence[FigureDifference]
    requests: pd.DataFrame
    classes: pd.DataFrame
    seeds: int
    load: float
    left_out: int
    unpaired: tuple[int, int] = (0, 0)
    letter: str = "B"

    @property
    def is_one_pair(self) -> bool:
        """Whether each side has one trace that counts."""
        return len(self.a.traces) == len(self.b.traces) == 1

    @property
    def is_prediction(self) -> bool:
        """Whether one side simulates what the other measured: no comparison of settings."""
        return self.is_across_backends and has_one_policy(_any(self.a), _any(self.b))

    @property
    def is_across_backends(self) -> bool:
        """Whether one side is simulated and the other measured."""
        return _any(self.a).is_measured != _any(self.b).is_measured

    @property
    def needs_seeds(self) -> bool:
        """Whether the load is so high that intervals of one pair of runs are too narrow."""
        return self.is_one_pair and self.load > BUSY

    def row(self, metric: str, stat: str = "mean") -> FigureDifference | None:
        """One figure."""
        return next((r for r in self.rows if (r.metric, r.stat) == (metric, stat)), None)


def against_baseline(runs: Sequence[RunFacts]) -> list[Against]:
    """Every other group against the first, see `grouped`.

    Raises:
        ValueError: In one line, runs that cannot be compared.
    """
    first, *others = grouped(runs)
    if not others:
        raise ValueError(f"all {len(runs)} runs have the setting {first.name}: nothing differs")
    if not any(_has_done_work(run) for run in runs):
        raise ValueError(
            f"no request finished in any of these {len(runs)} runs: nothing to compare, see "
            "status.json of each for the reason"
        )
    return [against(first, other, letter(i)) for i, other in enumerate(others, start=1)]


def _has_done_work(run: RunFacts) -> bool:
    is_trained = run.has("training") and run.rows("training") > 0
    return is_trained or bool(run.columns("requests", ("status",))["status"].is_("finished").any())


def against(a: RunGroup, b: RunGroup, own: str = "B") -> Against:
    """Two groups: paired by trace where they share any, else as independent traces.

    Runs of one trace are averaged first: they tell of a machine's noise and not of chance.
    """
    traces = pairs(a, b)
    one, two = _kept(a, traces, b), _kept(b, traces, a)
    sides = [
        {trace: _averaged(runs) for trace, runs in group.traces.items()} for group in (one, two)
    ]
    parts, left_out = [], 0
    for trace in traces:
        both, odd = _joined(sides[0][trace], sides[1][trace])
        parts.append(both.assign(seed=str(one.traces[trace][0].config.get("seed", ""))))
        left_out += odd
    requests = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if len(traces) == len(one.traces) == len(two.traces) == 1:
        rows = _of_one_pair(one, two, requests)
    else:
        rows = _of_seeds(one, two, parts, sides)
    loads = [load(run) for run in (*one.runs.values(), *two.runs.values())]
    unpaired = (len(a.runs) - len(one.runs), len(b.runs) - len(two.runs))
    told = (requests, winners(requests), len(traces), max(loads), left_out, unpaired, own)
    found = Against(one, two, rows, *told)
    neutral = [replace(row, is_neutral=True) for row in rows]
    return replace(found, rows=neutral) if found.is_prediction else found


def _any(group: RunGroup) -> RunFacts:
    return next(iter(group.runs.values()))


def _kept(own: RunGroup, traces: Sequence[str], other: RunGroup) -> RunGroup:
    """The runs that count: of paired traces, unless groups of several have none or one paired."""
    is_paired = len(traces) > 1 or (traces and min(len(own.traces), len(other.traces)) == 1)
    kept = {key: run for key, run in own.runs.items() if key[0] in traces}
    return RunGroup(own.name, kept) if is_paired else own


# ---- requests
def request_rows(run: RunFacts) -> pd.DataFrame:
    """The finished requests by id, in the order of arrival: latencies, class and preemptions."""
    rows = latencies(run)
    slo = limits_in(run.config)
    frame = pd.DataFrame(
        {
            "prompt_tokens": rows["prompt_tokens"],
            "slo": np.array([*rows["slo"].names, ""])[rows["slo"].chosen],
            "arrival_s": rows["arrival_s"],
            **{f"{metric}_s": rows[f"{metric}_s"] for metric in LATENCIES},
            "preemptions": rows["restarts"] + rows["swaps"],
            "is_met": met(rows, slo) if slo else False,
            "is_finished": rows["status"].is_("finished"),
        },
        index=pd.Index(rows["request_id"], name="request_id"),
    )
    return frame.sort_values("arrival_s", kind="stable")


def _averaged(runs: Sequence[RunFacts]) -> pd.DataFrame:
    """The requests of the runs of one trace, with the means of what differs from run to run."""
    frames = [request_rows(run) for run in runs]
    out = frames[0]
    if len(frames) == 1:
        return out
    alike = [frame.reindex(out.index) for frame in frames]
    for name in (*(f"{metric}_s" for metric in LATENCIES), "preemptions", "is_met"):
        out[name] = sum(frame[name].astype(float) for frame in alike) / len(alike)
    out["is_finished"] = np.all([frame["is_finished"] for frame in alike], axis=0)
    return out


def _joined(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Requests that finished in both, and how many finished in one alone."""
    is_both = a["is_finished"] & b["is_finished"].reindex(a.index)
    odd = int((a["is_finished"] ^ b["is_finished"].reindex(a.index)).sum())
    left, right = a[is_both], b.reindex(a.index[is_both])
    out = left[["prompt_tokens", "slo", "arrival_s"]].copy()
    out["third"] = np.arange(len(out)) * 3 // max(1, len(out))
    for metric in LATENCIES:
        out[f"{metric}_s_a"], out[f"{metric}_s_b"] = left[f"{metric}_s"], right[f"{metric}_s"]
        out[f"{metric}_difference_s"] = right[f"{metric}_s"] - left[f"{metric}_s"]
    for name in ("preemptions", "is_met"):
        out[f"{name}_a"], out[f"{name}_b"] = left[name].astype(float), right[name].astype(float)
    return out.reset_index(), odd


def _pair(requests: pd.DataFrame, metric: str) -> tuple[Floats, Floats]:
    """The values of both runs for the requests that have them in both, by arrival."""
    if requests.empty:
        return np.empty(0), np.empty(0)
    both = requests[[f"{metric}_s_a", f"{metric}_s_b"]].dropna().to_numpy(float)
    return both[:, 0], both[:, 1]


def load(run: RunFacts) -> float:
    """Share of the time between the first and the last arrival with a request in the system.

    It is the utilisation of a server that never idles while work is there, and needs requests
    alone. With replicas: of the busiest. 0 without two arrivals, 1 where all are there at once.
    """
    rows = run.columns("requests", ("device", "status", "arrival_ns", "finish_ns"))
    device = np.nan_to_num(rows["device"].astype(float), nan=0.0)
    end = np.where(np.isnan(rows["finish_ns"].astype(float)), np.inf, rows["finish_ns"])
    is_served = ~rows["status"].is_("refused")
    found = [0.0]
    for number in np.unique(device):
        own = is_served & (device == number)
        order = np.argsort(rows["arrival_ns"][own], kind="stable")
        arrival = rows["arrival_ns"][own][order].astype(float)
        if len(arrival) > 1:
            until = np.maximum.accumulate(end[own][order])[:-1]
            idle, time = np.maximum(0.0, arrival[1:] - until).sum(), arrival[-1] - arrival[0]
            found.append(float(1 - idle / time) if time > 0 else 1.0)
    return max(found)


# ---- figures
def _mean(values: Floats) -> float:
    return float(np.mean(values))


def _sum(values: Floats) -> float:
    return float(np.sum(values))


def _percentile(values: Floats, q: int) -> float:
    return float(np.percentile(values, q))


STATISTICS: Mapping[str, Statistic] = {
    "mean": _mean,
    **{f"p{q}": partial(_percentile, q=q) for q in PERCENTILES},
}
DRAWN: Mapping[str, tuple[Statistic, str]] = {  # totals that are made of requests, and their column
    "preemptions": (_sum, "preemptions"),
    "slo_attainment": (_mean, "is_met"),
}


def is_few(stat: str, count: int) -> bool:
    """Whether fewer than one request is expected beyond a percentile: p99 of fewer than 100."""
    return stat.startswith("p") and count * (100 - int(stat[1:])) < 100


def totals(run: RunFacts) -> dict[str, float]:
    """Figures of a whole run; those that it has no table for are left out."""
    out: dict[str, float] = {}
    if run.rows("requests"):
        slo, rows = limits_in(run.config), run.columns("requests", ("restarts", "swaps"))
        found = throughput(run) | (goodput(run, slo) if slo else {})
        out |= {name: found[name] for name in UNITS if name in found}
        out["preemptions"] = float(np.nansum(rows["restarts"]) + np.nansum(rows["swaps"]))
    if run.has("memory") and run.rows("requests"):
        out |= {"peak_kv": peak} if (peak := _peak_bytes(run, "kv")) else {}
    if run.has("training") and run.rows("training"):
        trained = training_summary(whole(run))
        names = {"mean_train_step": "mean_train_step_s", "train_tokens_per_s": "train_tokens_per_s"}
        out |= {name: float(trained[key]) for name, key in names.items() if key in trained}
        out["peak_memory"] = _peak_bytes(run, "used")
    if rate := finetuning_summary(run).get("finetune_tokens_per_s"):
        out["finetune_tokens_per_s"] = float(rate)
    return out


def _peak_bytes(run: RunFacts, kind: str) -> float:
    """The most that a device holds of a kind; 0 where it never does."""
    use = memory_use(run, (kind,))
    return float(use[use["pool"].str.startswith("gpu")]["peak"].max() if len(use) else 0.0)


def _mean_totals(runs: Sequence[RunFacts]) -> dict[str, float]:
    """The means of the totals that all runs of a trace have."""
    found = [totals(run) for run in runs]
    shared = [name for name in found[0] if all(name in figures for figures in found)]
    return {name: float(np.mean([figures[name] for figures in found])) for name in shared}


def _of_one_pair(a: RunGroup, b: RunGroup, requests: pd.DataFrame) -> list[FigureDifference]:
    """Intervals over blocks of requests; throughput and peaks are single numbers without one."""
    rows = []
    for metric in LATENCIES:
        one, two = _pair(requests, metric)
        if not len(one):
            continue
        intervals = over_blocks(one, two, list(STATISTICS.values()))
        for (stat, of), interval in zip(STATISTICS.items(), intervals, strict=True):
            figures = (float(of(one)), float(of(two)))
            rows.append(
                FigureDifference(metric, stat, "s", *figures, interval, is_few(stat, len(one)))
            )
    one_run, two_run = (_mean_totals([*group.runs.values()]) for group in (a, b))
    for name in (name for name in UNITS if name in one_run and name in two_run):
        left, right = one_run[name], two_run[name]
        found = Interval(right - left)
        if name in DRAWN and len(requests):
            of, column = DRAWN[name]
            one, two = (requests[f"{column}_{side}"].to_numpy(float) for side in "ab")
            (drawn_from,) = over_blocks(one, two, [of])
            if isclose(
                drawn_from.value, found.value, abs_tol=1e-12
            ):  # of all requests, which both runs finished
                found = drawn_from
        rows.append(FigureDifference(name, "run", UNITS[name], left, right, found))
    return rows


def _of_seeds(
    a: RunGroup,
    b: RunGroup,
    parts: Sequence[pd.DataFrame],
    found: Sequence[Mapping[str, pd.DataFrame]],
) -> list[FigureDifference]:
    """Intervals over traces: of paired differences, or Welch's where no trace is shared."""
    is_paired = 1 < len(parts) == len(a.traces) == len(b.traces)
    rows = []
    for metric in LATENCIES:
        if is_paired:
            both = [_pair(part, metric) for part in parts]
            sides = [[pair[side] for pair in both] for side in (0, 1)]
        else:
            sides = [_samples(frames, metric) for frames in found]
        counts = [len(values) for side in sides for values in side]
        for stat, of in STATISTICS.items() if min(counts) else ():
            one, two = (np.array([float(of(values)) for values in side]) for side in sides)
            few = is_few(stat, min(counts))
            rows.append(_over_seeds(metric, stat, "s", one, two, is_paired, few))
    order = [*a.traces] if is_paired else [*b.traces]
    one_runs = [_mean_totals(runs) for runs in a.traces.values()]
    two_runs = [_mean_totals(b.traces[trace]) for trace in order]
    for name, unit in UNITS.items():
        if all(name in figures for figures in (*one_runs, *two_runs)):
            one, two = (np.array([f[name] for f in runs]) for runs in (one_runs, two_runs))
            rows.append(_over_seeds(name, "run", unit, one, two, is_paired))
    return rows


def _samples(found: Mapping[str, pd.DataFrame], metric: str) -> list[Floats]:
    return [frame[f"{metric}_s"].dropna().to_numpy(float) for frame in found.values()]


def _over_seeds(
    metric: str,
    stat: str,
    unit: str,
    a: Floats,
    b: Floats,
    is_paired: bool,
    has_few: bool = False,
) -> FigureDifference:
    interval = over_pairs(b - a) if is_paired else over_groups(a, b)
    return FigureDifference(metric, stat, unit, float(a.mean()), float(b.mean()), interval, has_few)


# ---- classes of requests
BY_TIME = "time of arrival"
THIRDS = ("first third of arrivals", "middle third of arrivals", "last third of arrivals")


def winners(requests: pd.DataFrame) -> pd.DataFrame:
    """Shares of requests that are faster in B, by prompt length, SLO class and time of arrival.

    Columns by, class, requests, and of TTFT and end-to-end latency: the share of requests that are
    faster and slower in B, the median and the mean of the difference in seconds.
    """
    if requests.empty:
        return pd.DataFrame()
    rows = []
    for by, names in _classes(requests).items():
        for name in dict.fromkeys(names[order] for order in _order(by, requests, names)):
            part = requests[names == name]
            row: dict[str, object] = {"by": by, "class": name, "requests": len(part)}
            for metric in ("ttft", "e2e"):
                values = part[f"{metric}_difference_s"].dropna().to_numpy(float)
                if len(values):
                    row[f"{metric}_faster"] = float((values < 0).mean())
                    row[f"{metric}_slower"] = float((values > 0).mean())
                    row[f"{metric}_median_s"] = float(np.median(values))
                    row[f"{metric}_mean_s"] = float(values.mean())
            rows.append(row)
    return pd.DataFrame(rows)


def _order(by: str, requests: pd.DataFrame, names: NDArray[np.str_]) -> NDArray[np.int64]:
    """Rows in the order in which their classes are listed."""
    keys = {"prompt length": "prompt_tokens", BY_TIME: "third"}
    values = requests[keys[by]].to_numpy() if by in keys else names
    found: NDArray[np.int64] = np.argsort(values, kind="stable")
    return found


def _classes(requests: pd.DataFrame) -> dict[str, NDArray[np.str_]]:
    """The class of each request, by what classes are made of."""
    tokens = requests["prompt_tokens"].to_numpy()
    cuts = np.unique(np.quantile(tokens, (0.25, 0.5, 0.75)))
    place = np.searchsorted(cuts, tokens, side="left")
    lengths = {}
    for number in np.unique(place):
        own = tokens[place == number]
        lengths[number] = f"prompts of {own.min():,} to {own.max():,} tokens"
    out = {"prompt length": np.array([lengths[number] for number in place])}
    if requests["slo"].nunique() > 1:
        out["SLO class"] = np.array([f"class {name or '(none)'}" for name in requests["slo"]])
    out[BY_TIME] = np.array([THIRDS[third] for third in requests["third"]])
    return out
