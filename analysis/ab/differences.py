"""A against B: the difference of every metric with its interval, per request and per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.ab.groups import Key, RunGroup, grouped, letter, pairs
from analysis.ab.intervals import Interval, Statistic, over_blocks, over_groups, over_pairs
from analysis.classes import limits_in, met
from analysis.metrics import goodput, latencies, throughput
from analysis.run import RunFacts, whole
from analysis.training import training_summary
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
}
MORE_IS_BETTER = {
    **dict.fromkeys(LATENCIES, False),
    **dict.fromkeys(("request_throughput", "output_throughput", "goodput"), True),
    **{"slo_attainment": True, "preemptions": False, "mean_train_step": False},
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

    @property
    def relative(self) -> float:
        """The difference relative to A; NaN where A is 0 and B is not."""
        if self.a == 0:
            return 0.0 if self.interval.value == 0 else float("nan")
        return self.interval.value / abs(self.a)

    @property
    def verdict(self) -> str:
        """better or worse, of B; higher or lower where neither is better; else what is missing."""
        if not self.interval.is_known:
            return "needs seeds"
        if not self.interval.excludes_zero:
            return "no difference shown"
        is_more, more = self.interval.value > 0, MORE_IS_BETTER.get(self.metric)
        if more is None:
            return "higher" if is_more else "lower"
        return "better" if is_more == more else "worse"


@dataclass(frozen=True, eq=False)
class Against:
    """One group beside the baseline.

    rows      every metric
    requests  a row per seed and request that both runs finished: `<metric>_s_a`, `_s_b` and
              `<metric>_difference_s`, with prompt_tokens, slo, arrival_s and third
    classes   `winners`
    seeds     pairs of runs of one seed; 0: the groups have no seed in common
    load      the largest of all runs, see `load`
    left_out  requests that one run of a pair finished and the other did not
    letter    of the group that is not the baseline, in words and figures
    """

    a: RunGroup
    b: RunGroup
    rows: Sequence[FigureDifference]
    requests: pd.DataFrame
    classes: pd.DataFrame
    seeds: int
    load: float
    left_out: int
    letter: str = "B"

    @property
    def is_one_pair(self) -> bool:
        """Whether each side has one run that counts."""
        return len(self.a.runs) == len(self.b.runs) == 1

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
    return [against(first, other, letter(i)) for i, other in enumerate(others, start=1)]


def against(a: RunGroup, b: RunGroup, own: str = "B") -> Against:
    """Two groups: paired by seed where they share any, else as independent runs."""
    keys = pairs(a, b)
    one, two = _kept(a, keys, b), _kept(b, keys, a)
    found = {run: request_rows(run) for run in (*one.runs.values(), *two.runs.values())}
    parts, left_out = [], 0
    for key in keys:
        both, odd = _joined(found[one.runs[key]], found[two.runs[key]])
        parts.append(both.assign(seed=key[0]))
        left_out += odd
    requests = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if len(keys) == len(one.runs) == len(two.runs) == 1:
        rows = _of_one_pair(one.runs[keys[0]], two.runs[keys[0]], requests)
    else:
        rows = _of_seeds(one, two, keys, parts, found)
    loads = [load(run) for run in (*one.runs.values(), *two.runs.values())]
    classes = winners(requests)
    return Against(one, two, rows, requests, classes, len(keys), max(loads), left_out, own)


def _kept(own: RunGroup, keys: Sequence[Key], other: RunGroup) -> RunGroup:
    """The runs that count: of paired seeds, unless groups of several have none or one paired."""
    is_paired = len(keys) > 1 or (keys and min(len(own.runs), len(other.runs)) == 1)
    return RunGroup(own.name, {key: own.runs[key] for key in keys}) if is_paired else own


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
        out[f"{name}_a"], out[f"{name}_b"] = left[name].astype(int), right[name].astype(int)
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
    return out


def _peak_bytes(run: RunFacts, kind: str) -> float:
    """The most that a device holds of a kind; 0 where it never does."""
    use = memory_use(run, (kind,))
    return float(use[use["pool"].str.startswith("gpu")]["peak"].max() if len(use) else 0.0)


def _of_one_pair(a: RunFacts, b: RunFacts, requests: pd.DataFrame) -> list[FigureDifference]:
    """Intervals over blocks of requests; throughput and peaks are single numbers without one."""
    rows = []
    for metric in LATENCIES:
        one, two = _pair(requests, metric)
        for stat, of in STATISTICS.items() if len(one) else ():
            found = over_blocks(one, two, of)
            figures = (float(of(one)), float(of(two)))
            rows.append(
                FigureDifference(metric, stat, "s", *figures, found, is_few(stat, len(one)))
            )
    one_run, two_run = totals(a), totals(b)
    for name in (name for name in UNITS if name in one_run and name in two_run):
        left, right = one_run[name], two_run[name]
        found = Interval(right - left)
        if name in DRAWN and len(requests):
            of, column = DRAWN[name]
            one, two = (requests[f"{column}_{side}"].to_numpy(float) for side in "ab")
            drawn_from = over_blocks(one, two, of)
            if drawn_from.value == found.value:  # of all requests, which both runs finished
                found = drawn_from
        rows.append(FigureDifference(name, "run", UNITS[name], left, right, found))
    return rows


def _of_seeds(
    a: RunGroup,
    b: RunGroup,
    keys: Sequence[Key],
    parts: Sequence[pd.DataFrame],
    found: Mapping[RunFacts, pd.DataFrame],
) -> list[FigureDifference]:
    """Intervals over runs: of paired differences, or Welch's where no seed is shared."""
    is_paired = len(keys) > 1 and len(keys) == len(a.runs) == len(b.runs)
    rows = []
    for metric in LATENCIES:
        if is_paired:
            both = [_pair(part, metric) for part in parts]
            sides = [[pair[side] for pair in both] for side in (0, 1)]
        else:
            sides = [_samples(found, group, metric) for group in (a, b)]
        counts = [len(values) for side in sides for values in side]
        for stat, of in STATISTICS.items() if min(counts) else ():
            one, two = (np.array([float(of(values)) for values in side]) for side in sides)
            few = is_few(stat, min(counts))
            rows.append(_over_seeds(metric, stat, "s", one, two, is_paired, few))
    one_runs, two_runs = ([totals(run) for run in group.runs.values()] for group in (a, b))
    for name, unit in UNITS.items():
        if all(name in figures for figures in (*one_runs, *two_runs)):
            one, two = (np.array([f[name] for f in runs]) for runs in (one_runs, two_runs))
            rows.append(_over_seeds(name, "run", unit, one, two, is_paired))
    return rows


def _samples(found: Mapping[RunFacts, pd.DataFrame], group: RunGroup, metric: str) -> list[Floats]:
    return [found[run][f"{metric}_s"].dropna().to_numpy(float) for run in group.runs.values()]


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
