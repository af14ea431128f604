"""Fidelity over reruns: errors of predictions, their medians and worst, judged by bars.

An error is signed and relative: +0.05 is a prediction 5 % above its measurement. Its median over
reruns is judged. Signs may cancel in a median, so the worst rerun stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.distance import STEADY, relative_error
from analysis.metrics import summary
from analysis.run import Run
from analysis.units import amount
from analysis.verdicts import percent

METRICS = ("ttft", "tpot", "e2e")
STATS = ("mean", "p50", "p90", "p99")
THROUGHPUT, KV_PEAK, STEADY_RERUNS = "request_throughput", "kv_peak_pages", "steady_reruns"
FIGURES = (THROUGHPUT, *(f"{s}_{m}_s" for m in METRICS for s in STATS))
JUDGED = (THROUGHPUT, "mean_tpot_s", "mean_e2e_s", "mean_ttft_s", KV_PEAK)
FINETUNED, DEVICE_PEAK = "finetune_tokens_per_s", "device_peak_bytes"
JUDGED_BESIDE = (FINETUNED, DEVICE_PEAK)  # too, where a job finetunes beside requests
TRAINED, HITS = "finetune_trained_tokens_per_s", "record_hit_rate"  # printed beside
COLUMNS = ["case", "figure", "measured", "error", "worst_rerun", "rerun_iqr"]
# Rows that are 1 if a property holds for all reruns; the claim fails if one is not.
MUST_HOLD = ("kv_peak_replayed_equal", "swapped_in_every_run", "bytes_copied_replayed_equal")

THROUGHPUT_BAR, KV_PEAK_BAR, TTFT_BAR = 0.02, 0.03, 0.10
FINETUNED_BAR, DEVICE_PEAK_BAR = 0.05, 0.03
LATENCY_BAR = 0.05  # of mean TPOT and E2E, or the spread of reruns where that is more
NEVER_ABOVE = 0.10  # whatever the spread of reruns
TTFT_UP_TO = 0.5  # share of the capacity; near saturation a queue amplifies errors of step times


@dataclass(frozen=True)
class Pair:
    """A measured run, its prediction, and its plan log replayed in the simulator.

    `varied` are predictions with durations a little longer or shorter: what is compared is the
    median over all predictions.
    """

    measured: Run
    predicted: Run
    replayed: Run
    varied: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Rerun:
    """A measured run with its prediction; `moved` is the largest drift of the probes around it."""

    number: int
    moved: float
    pair: Pair

    @property
    def is_steady(self) -> bool:
        """Whether it counts: the machine was as fast after the run as before it."""
        return counts(self.moved)


def counts(moved: float) -> bool:
    """Whether a run counts whose drift probes moved by this share."""
    return moved <= STEADY


def steady_pairs(reruns: Sequence[Rerun]) -> list[Pair]:
    """The pairs of the reruns that count."""
    return [rerun.pair for rerun in reruns if rerun.is_steady]


def kv_peak_pages(run: Run) -> int:
    """Most KV pages that were booked on the device."""
    rows = run.memory[run.memory["tier"].eq("gpu") & run.memory["cause"].eq("issue")]
    return int(rows["kv_pages"].max())


def device_peak_bytes(run: Run) -> int:
    """Most bytes of the device that were booked at once, by whatever they are for."""
    rows = run.memory[run.memory["tier"].eq("gpu") & run.memory["cause"].eq("issue")]
    return int((rows["capacity_bytes"] - rows["free_bytes"]).max())


def figures_of(run: Run) -> dict[str, float]:
    """What is compared of a run: throughput in requests/s, latencies in s, peak KV in pages.

    Of a job that finetunes beside requests also tokens forward per second, and the peak of the
    device in bytes; tokens of whole samples per second, and the share of records that were used. A
    figure that is not defined is left out: the TPOT of answers of one token.
    """
    known = summary(run)
    wanted = (*FIGURES, *((TRAINED, HITS) if "finetune_trained_tokens_per_s" in known else ()))
    found = {key: float(known[key]) for key in wanted if key in known}
    found[KV_PEAK] = float(kv_peak_pages(run))
    if FINETUNED in known:
        found |= {FINETUNED: float(known[FINETUNED]), DEVICE_PEAK: float(device_peak_bytes(run))}
    return found


def rerun_rows(case: str, reruns: Sequence[Rerun]) -> pd.DataFrame:
    """A row per rerun and figure, of discarded reruns too.

    Columns case, rerun, counts, moved, figure, measured, predicted, error.
    """
    rows = [
        (case, rerun.number, rerun.is_steady, rerun.moved, name, *compared)
        for rerun in reruns
        for name, compared in _compared(rerun.pair).items()
    ]
    columns = ["case", "rerun", "counts", "moved", "figure", "measured", "predicted", "error"]
    return pd.DataFrame(rows, columns=columns)


def _compared(pair: Pair) -> dict[str, tuple[float, float, float]]:
    """By measured figure: the measured value, the predicted one (NaN if it lacks), the error."""
    real = figures_of(pair.measured)
    predicted = [figures_of(run) for run in (pair.predicted, *pair.varied)]
    guess = {n: float(np.median([one.get(n, np.nan) for one in predicted])) for n in real}
    return {n: (real[n], guess[n], relative_error(guess[n], real[n])) for n in real}


def table_of(case: str, pairs: Sequence[Pair], wanted: int) -> pd.DataFrame:
    """Per figure: medians over reruns of the measured value and of the signed error.

    `wanted` reruns were asked for; fewer of them are a row that fails.
    """
    rows = [(case, STEADY_RERUNS, float(len(pairs)), len(pairs) / wanted - 1, 0.0, 0.0)]
    if not pairs:
        return pd.DataFrame(rows, columns=COLUMNS)
    values = [_compared(pair) for pair in pairs]
    for key in values[0]:  # reruns are of equal requests, so they have equal figures
        real, _, error = np.array([value[key] for value in values]).T
        rows.append((case, key, float(np.median(real)), *middle(error), spread_of(real)))
    equal = all(kv_peak_pages(p.replayed) == kv_peak_pages(p.measured) for p in pairs)
    rows.append((case, "kv_peak_replayed_equal", float(equal), 0.0, 0.0, 0.0))
    for name in pairs[0].measured.provenance["probe_ratios"]:
        ratios = np.array([p.measured.provenance["probe_ratios"][name] for p in pairs])
        rows.append((case, f"probe_{name}_after_over_before", 1.0, *middle(ratios - 1), 0.0))
    return pd.DataFrame(rows, columns=COLUMNS)


def spread_of(values: np.ndarray) -> float:
    """The interquartile range of reruns over their median; 0 of a median of 0."""
    low, high = np.percentile(values, (25, 75))
    middle = float(np.median(values))
    return float(high - low) / middle if middle else 0.0


def middle(errors: np.ndarray) -> tuple[float, float]:
    """The median of signed errors, and the error that is farthest from zero."""
    return float(np.median(errors)), float(errors[np.abs(errors).argmax()])


def bars(row: Mapping[Any, Any], judges_ttft: bool) -> float | None:
    """The largest error that passes; None for a figure without a bar.

    Throughput 2 %. Mean TPOT and E2E: 5 %, or the spread of reruns if that is more, never above
    10 %. TTFT 10 %, and only well below saturation, where requests do not queue. KV peak 3 %.
    Finetuned tokens per second 5 %, and the peak of the device beside them 3 %.
    """
    figure, spread = str(row["figure"]), float(str(row["rerun_iqr"]))
    if figure == THROUGHPUT:
        return THROUGHPUT_BAR
    if figure in ("mean_tpot_s", "mean_e2e_s"):
        return min(NEVER_ABOVE, max(LATENCY_BAR, spread))
    if figure == "mean_ttft_s":
        return TTFT_BAR if judges_ttft else None
    fixed = {KV_PEAK: KV_PEAK_BAR, FINETUNED: FINETUNED_BAR, DEVICE_PEAK: DEVICE_PEAK_BAR}
    return fixed.get(figure)


def judged(table: pd.DataFrame, judges_ttft: bool) -> pd.DataFrame:
    """The table with its bars, and the used share of each bar (above 1 fails).

    An error that is not a number fails its bar.
    """
    table = table.copy()
    table["bar"] = [bars(row, judges_ttft) for row in table.to_dict("records")]
    table["used"] = table["error"].abs() / table["bar"].astype(float)
    broken = table["figure"].isin(MUST_HOLD) & table["measured"].lt(1)
    broken |= table["figure"].eq(STEADY_RERUNS) & table["error"].lt(0)
    broken |= table["bar"].notna() & table["error"].isna()
    table.loc[broken, "used"] = np.inf
    return table


def judgement(used: float) -> str:
    """pass or fail by the used share of a bar; nothing for a figure without one."""
    if used != used:
        return ""
    return "pass" if used <= 1 else "fail"


@dataclass(frozen=True, eq=False)
class JudgedLoad:
    """A load of a workload: its judged table and a row per rerun and figure.

    `share` is that of the capacity, `rate` in requests/s.
    """

    name: str
    share: float
    rate: float
    table: pd.DataFrame
    reruns: pd.DataFrame

    @property
    def failed(self) -> list[str]:
        """The figures that are beyond their bars, and the properties that do not hold."""
        return [str(figure) for figure in self.table.loc[self.table["used"].gt(1), "figure"]]

    @property
    def num_discarded(self) -> int:
        """Measured runs that do not count."""
        return int((~self.reruns.drop_duplicates("rerun")["counts"].astype(bool)).sum())

    @property
    def figures(self) -> list[str]:
        """The figures that are judged: those of serving, and of a job that finetunes beside it."""
        return [*JUDGED, *[f for f in JUDGED_BESIDE if self.row(f) is not None]]

    @property
    def undefined(self) -> list[str]:
        """Figures with a bar elsewhere that no request of this load has."""
        if self.row(THROUGHPUT) is None:  # without a steady rerun
            return []
        return [figure for figure in JUDGED if self.row(figure) is None]

    def row(self, figure: str) -> dict[str, Any] | None:
        """The judged row of a figure; None without a steady rerun, or where it is not defined."""
        rows = self.table[self.table["figure"].eq(figure)].to_dict("records")
        return {str(key): value for key, value in rows[0].items()} if rows else None


@dataclass(frozen=True, eq=False)
class Fidelity:
    """How far predictions of a workload are from its measurements; `capacity` in requests/s."""

    capacity: float
    loads: tuple[JudgedLoad, ...]
    discarded_calibrations: int = 0
    discarded_capacity_runs: int = 0

    @property
    def discarded(self) -> dict[str, int]:
        """How many pieces of work of a kind count for nothing, as the machine was not steady."""
        return {
            "calibrations": self.discarded_calibrations,
            "capacity runs": self.discarded_capacity_runs,
            "judged runs": sum(one.num_discarded for one in self.loads),
        }

    @property
    def figures(self) -> list[str]:
        """The figures that are judged at one of the loads."""
        return list(dict.fromkeys([*JUDGED, *[f for one in self.loads for f in one.figures]]))

    @property
    def failed(self) -> list[str]:
        """What fails, each with its load."""
        return [
            f"{figure_name(figure)} at {one.name}" for one in self.loads for figure in one.failed
        ]

    @property
    def table(self) -> pd.DataFrame:
        """The judged rows of all loads."""
        return pd.concat([one.table for one in self.loads], ignore_index=True)

    @property
    def reruns(self) -> pd.DataFrame:
        """The rows of all reruns of all loads."""
        return pd.concat([one.reruns for one in self.loads], ignore_index=True)


def load_of(
    name: str, share: float, rate: float, reruns: Sequence[Rerun], wanted: int
) -> JudgedLoad:
    """A load judged by its steady reruns, of which `wanted` were asked for."""
    table = judged(table_of(name, steady_pairs(reruns), wanted), share <= TTFT_UP_TO)
    return JudgedLoad(name, share, rate, table, rerun_rows(name, reruns))


NAMES = {
    THROUGHPUT: "throughput",
    KV_PEAK: "peak KV",
    FINETUNED: "finetuned",
    DEVICE_PEAK: "peak memory",
    STEADY_RERUNS: "steady reruns",
    "kv_peak_replayed_equal": "peak KV of replayed plans",
}


def figure_name(figure: str) -> str:
    """The name of a figure for people, such as mean TPOT."""
    if figure in NAMES:
        return NAMES[figure]
    stat, _, metric = figure.removesuffix("_s").partition("_")
    return f"{stat} {metric.upper()}"


def shown(figure: str, value: float) -> str:
    """A value of a figure with its unit."""
    if figure == KV_PEAK:
        return f"{value:,.0f} pages"
    units = {THROUGHPUT: "req/s", FINETUNED: "tok/s", DEVICE_PEAK: "bytes"}
    return amount(value, units.get(figure, "s"))


def percent_of(share: float | None, signed: bool = True) -> str:
    """A share as a percentage; a dash where there is none."""
    if share is None or share != share:
        return "-"
    return percent(float(share)) if signed else f"{100 * share:.1f} %"
