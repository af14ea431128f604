"""The tables of a report page, as text, numbers to sort by and marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import verdicts
from analysis.compare import Comparison
from analysis.distance import drift
from analysis.metric_names import (
    FOR,
    LATENCIES,
    MEASUREMENT,
    OF,
    PERCENTILES,
    PREDICTION,
    THROUGHPUTS,
    classes_in,
    tenants_in,
)
from analysis.metrics import samples, statistics
from analysis.pages.cells import KEPT, Cell, HtmlTable, amount_cell, amount_cells, kept_cell
from analysis.pages.training_tables import compared_training, training_table
from analysis.replicas import replicas
from analysis.run import Run
from analysis.usage import memory_use

CLASS_LATENCIES = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"))
CLASS_COLUMNS = (
    *("class", "requests", "within the SLO", "goodput"),
    *(f"{stat} {name.upper()}" for name, stat in CLASS_LATENCIES),
)
NOTE = "Each by the limits of its class; the share is of all its requests."


def class_table(metrics: Mapping[str, Any]) -> HtmlTable:
    """A row per class of a run's metrics; without rows for a run without classes."""
    rows = [class_cells(metrics, name) for name in classes_in(metrics)]
    return HtmlTable("SLO classes", NOTE, CLASS_COLUMNS, rows)


def class_cells(metrics: Mapping[str, Any], name: str) -> list[Cell]:
    """The cells of one class under CLASS_COLUMNS; n/a for unknown ones."""
    count, unknown = float(metrics[f"num_requests{OF}{name}"]), float("nan")
    cells = [Cell(name), Cell(f"{count:,.0f}", count)]
    kept = {metric: float(metrics.get(f"{metric}{OF}{name}", unknown)) for metric in KEPT}
    cells += [kept_cell(metric, value) for metric, value in kept.items()]
    known = (f"{stat}_{latency}_s{OF}{name}" for latency, stat in CLASS_LATENCIES)
    return cells + [amount_cell(metrics.get(key, unknown), "s") for key in known]


TENANT_COUNTS = {  # columns of the table of tenants, by the figures in them
    "num_requests": "requests",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "finetune_tokens": "tokens finetuned",
    "charged": "charged",
}
TENANT_NOTE = "Charged: the weighted sum of the tokens that a fair scheduling goes by."


def tenant_table(metrics: Mapping[str, Any]) -> HtmlTable:
    """A row per tenant of a run's metrics; without rows for a run without tenants."""
    unknown, rows = float("nan"), list[list[Cell]]()
    for name in tenants_in(metrics):
        counts = [metrics.get(f"{figure}{FOR}{name}") for figure in TENANT_COUNTS]
        cells = [Cell(name)]
        cells += [Cell("n/a" if n is None else f"{n:,.0f}", n) for n in counts]
        known = [f"{stat}_{latency}_s{FOR}{name}" for latency, stat in CLASS_LATENCIES]
        rows.append([*cells, *[amount_cell(metrics.get(key, unknown), "s") for key in known]])
    cuts = [f"{stat} {latency.upper()}" for latency, stat in CLASS_LATENCIES]
    return HtmlTable("Tenants", TENANT_NOTE, ["tenant", *TENANT_COUNTS.values(), *cuts], rows)


RUNS = (PREDICTION, MEASUREMENT)
STATS = ("peak", "mean", "fullest")
HELD = (
    "Means are over time. Fullest: bytes of the kind when the pool is fullest, which add up to the "
    "peak of `used`. Pending: freed, and in use until an operation ends."
)


def compared_tables(comparison: Comparison) -> list[HtmlTable]:
    """The tables of a comparison; those without rows are left out."""
    found = [
        _runs(comparison),
        compared_training(comparison),
        _errors(comparison),
        _split(comparison),
        _memory(comparison),
        _steps(comparison),
        _requests(comparison),
        _shares(comparison),
        _replicas({"predicted": comparison.prediction, "measured": comparison.measurement}),
        _config_differences(comparison),
    ]
    return [table for table in found if table.rows]


def single_tables(run: Run, metrics: Mapping[str, float | int | str]) -> list[HtmlTable]:
    """Training, latencies, throughput and counts, memory of one run."""
    rows = []
    for metric, values in samples(run).items():
        if stats := statistics(values):
            rows.append([Cell(metric), *amount_cells([*stats.values()], "s")])
    known = [name for name in THROUGHPUTS if name in metrics]
    figures = [[Cell(n), amount_cell(float(metrics[n]), verdicts.unit_of(n))] for n in known]
    figures += [[Cell(n), kept_cell(n, float(metrics[n]))] for n in KEPT if n in metrics]
    if len(run.requests):
        done = [(f"{n} requests", f"num_{n}") for n in ("finished", "refused", "unfinished")]
        done += [(n.replace("_", " "), n) for n in ("restarts", "swaps", "cached_tokens")]
        figures += [[Cell(name), Cell(str(metrics[key]))] for name, key in done]
    held = [
        [Cell(f"{row['kind']} on {row['pool']}"), *amount_cells([row[s] for s in STATS], "bytes")]
        for row in memory_use(run).to_dict("records")
    ]
    found = [
        training_table(metrics),
        HtmlTable("Latencies", "", ["metric", "mean", *(f"p{q}" for q in PERCENTILES)], rows),
        HtmlTable("Throughput and counts", "", ["metric", "value"], figures),
        class_table(metrics),
        tenant_table(metrics),
        HtmlTable("Memory", HELD, ["what", *STATS], held),
        _workspace(metrics),
        _replicas({"": run}),
    ]
    return [table for table in found if table.rows]


def _workspace(metrics: Mapping[str, float | int | str]) -> HtmlTable:
    """Workspace of launches; without rows if it is unknown."""
    rows = [
        [Cell(f"largest launch, {name}"), amount_cell(metrics[key], "bytes")]
        for name in ("predicted", "measured")
        if (key := f"workspace_{name}_bytes") in metrics
    ]
    if "workspace_p90_error" in metrics:
        launches, p90 = metrics["workspace_launches"], float(metrics["workspace_p90_error"])
        rows.append([Cell("launches measured"), Cell(f"{launches:,}", float(launches))])
        rows.append([Cell("p90 of their absolute errors"), Cell(f"{100 * p90:.1f} %", p90)])
    return HtmlTable(
        "Workspace", "Of sampled launches, where it is measured.", ["what", "value"], rows
    )


def _error(metric: str, value: float) -> Cell:
    mark = verdicts.verdict(metric, value)
    return Cell(verdicts.percent(value), abs(value), "" if mark == "undefined" else mark)


def _share(value: float) -> Cell:
    return Cell(verdicts.percent(value), abs(value))


def _runs(comparison: Comparison) -> HtmlTable:
    rows = []
    named = {"prediction": comparison.prediction, "measurement": comparison.measurement}
    if comparison.replay:
        named["replay of the measured plans"] = comparison.replay
    if comparison.corrected:
        named["prediction with measured ratios"] = comparison.corrected
    for number, run in enumerate(comparison.reruns, 1):
        named[f"rerun {number} of the measurement"] = run
    for role, run in named.items():
        done = int(run.requests["status"].eq("finished").sum())
        moved = drift(run)
        texts = [role, run.name, run.backend, str(run.provenance.get("device", "-"))]
        ended = f"{done} of {len(run.requests)}" if len(run.requests) else ""
        steps = f"{len(run.training)} steps" if len(run.training) else ""
        texts += [run.cost_form, ", ".join(filter(None, (ended, steps)))]
        texts += [str(len(run.plans)), "-" if moved is None else f"{100 * moved:.1f} %"]
        rows.append([Cell(text) for text in texts])
    columns = ["role", "run", "backend", "device", "durations", "finished", "plans", "drift"]
    plans = comparison.plans
    note = f"{plans.common} plans in common from the start ({100 * plans.share:.0f} %)."
    if plans.divergence:
        note += f" First difference {plans.divergence}."
    return HtmlTable("Runs", note, columns, rows)


def _errors(comparison: Comparison) -> HtmlTable:
    rows = []
    apart = {row["metric"]: row for row in comparison.distances.to_dict("records")}
    for metric in (*LATENCIES, *THROUGHPUTS):
        part = comparison.errors[comparison.errors["metric"].eq(metric)]
        values = [*part["prediction"], *part["measurement"]]  # a metric has one unit
        shown = amount_cells(values, str(part["unit"].iloc[0])) if values else []
        for number, row in enumerate(part.to_dict("records")):
            cells = [Cell(metric), Cell(str(row["stat"])), *shown[number :: len(part)]]
            cells.append(_error(metric, float(row["error"])))
            for name in ("ks", "wasserstein"):
                value = float(apart[metric][name]) if row["stat"] == "mean" else None
                cells.append(Cell("" if value is None else f"{value:.3f}", value))
            rows.append(cells)
    note = (
        f"Errors are signed and relative to the measurement; {verdicts.LEGEND}. KS is the largest "
        "gap between the two distribution functions, W1 the Wasserstein distance over the measured "
        "mean. TTFT near or above capacity amplifies small errors of step times."
    )
    columns = ["metric", "statistic", "predicted", "measured", "error", "KS", "W1"]
    return HtmlTable("Errors", note, columns, rows)


def _split(comparison: Comparison) -> HtmlTable:
    rows = []
    is_corrected = comparison.corrected is not None
    parts = ("direct", "consequence", *(("rest",) if is_corrected else ()), "total")
    for row in comparison.split.to_dict("records"):
        metric, unit = str(row["metric"]), verdicts.unit_of(str(row["metric"]))
        runs = ("prediction", "retimed", *(("corrected",) if is_corrected else ()), "measurement")
        cells = [Cell(metric), *amount_cells([row[run] for run in runs], unit)]
        cells += [_share(float(row[f"{part}_share"])) for part in parts]
        if is_corrected:
            share = float(row["explained"])
            text = "-" if share != share else f"{100 * share:.0f} %"
            cells.append(Cell(text, 0.0 if share != share else share))
        rows.append(cells)
    shown = ["predicted", "retimed", *(["corrected"] if is_corrected else []), "measured"]
    last = ["explained"] if is_corrected else []
    return HtmlTable(WHY, _why_note(comparison), ["metric", *shown, *parts, *last], rows)


WHY = "Direct error of operations, and its consequence"


def _why_note(comparison: Comparison) -> str:
    """How the parts of the error are made, what cancels, and what reruns say of it."""
    note = (
        "Retimed: the measured plans and waits, with predicted durations. Direct = retimed - "
        "measured: the error of operations at equal decisions. "
    )
    if comparison.corrected is not None:
        note += (
            "Corrected: the prediction with durations scaled by the measured ratios, which "
            "decides for itself. Consequence = predicted - corrected - direct: what that error "
            "does to batching and preemption. Rest = corrected - measured: what durations do not "
            "explain. "
        )
    else:
        note += "Consequence = predicted - retimed: what that error does to decisions. "
    rows = comparison.split.to_dict("records")
    opposite = [r["metric"] for r in rows if verdicts.cancels(r["direct"], r["consequence"])]
    if opposite:
        note += f"{verdicts.CANCEL} for {', '.join(opposite)}: read both, not their sum. "
    if hidden := comparison.within_spread:
        count = len(comparison.reruns) + 1
        note += f"Left out, as no more than the spread of {count} measurements: "
        note += f"{', '.join(hidden)}. "
    elif not comparison.reruns:
        note += verdicts.UNKNOWN
    return note.strip()


def _memory(comparison: Comparison) -> HtmlTable:
    rows = []
    for row in comparison.memory.to_dict("records"):
        cells = [Cell(f"{row['kind']} on {row['pool']}"), Cell(str(row["stat"]))]
        cells += amount_cells([row[run] for run in RUNS], "bytes")
        rows.append([*cells, _error("memory", float(row["error"]))])
    note = (
        "As booked by the ledger of each run; means are over time. Measured: the meter's reading, "
        "beside the bytes that the prediction held. "
        "Workspace: of sampled launches in both runs; its p90 is of their absolute errors."
    )
    return HtmlTable("Memory", note, ["what", "statistic", "predicted", "measured", "error"], rows)


def _steps(comparison: Comparison) -> HtmlTable:
    means = [[*comparison.steps[f"mean_{run}_s"]] for run in RUNS]
    shown = amount_cells([value for column in means for value in column], "s")
    rows = []
    for number, row in enumerate(comparison.steps.to_dict("records")):
        cells = [Cell(str(row["group"])), Cell(str(row["count"]), float(row["count"]))]
        cells += [*shown[number :: len(comparison.steps)], _error("step", float(row["sum_error"]))]
        rows.append([*cells, Cell(f"{100 * row['mean_abs']:.1f} %", row["mean_abs"])])
    note = "Matched operations of both runs; `host` is the time between plans."
    columns = ["class", "count", "mean predicted", "mean measured", "error of sum", "mean |error|"]
    return HtmlTable("Step times", note, columns, rows)


def _requests(comparison: Comparison) -> HtmlTable:
    rows = [
        [Cell(str(row["metric"])), *(_share(float(row[q])) for q in ("p10", "p50", "p90"))]
        + [Cell(f"{100 * row[name]:.1f} %", float(row[name])) for name in ("mean_abs", "within_10")]
        for row in comparison.request_errors.to_dict("records")
    ]
    columns = ["metric", "p10", "p50", "p90", "mean |error|", "within 10 %"]
    return HtmlTable("Errors of single requests", "Signed, over requests.", columns, rows)


def _shares(comparison: Comparison) -> HtmlTable:
    names = ("prediction", "measurement")
    rows = [
        [Cell(str(row["lane"])), *(Cell(f"{100 * row[n]:.1f} %", float(row[n])) for n in names)]
        for row in comparison.shares.to_dict("records")
    ]
    note = "Share of the run that each lane, and the host between plans, was busy."
    return HtmlTable("Device and host", note, ["lane", "predicted", "measured"], rows)


def _replicas(runs: Mapping[str, Run]) -> HtmlTable:
    """The work of each replica; without rows for one device."""
    rows = []
    for name, run in runs.items():
        for row in replicas(run).to_dict("records"):
            cells = [Cell(f"{name} {int(row['replica'])}".strip())]
            counts = ("requests", "prompt_tokens", "output_tokens", "restarts")
            cells += [Cell(f"{row[key]:,}", float(row[key])) for key in counts]
            shares = ("busy", "peak_kv", "mean_kv")
            cells += [Cell(f"{100 * row[key]:.1f} %", float(row[key])) for key in shares]
            rows.append(cells)
    note = "Requests as the router placed them; busy is the compute lane's share of the run."
    counts_shown = ["requests", "prompt tokens", "output tokens", "restarts"]
    return HtmlTable(
        "Replicas", note, ["replica", *counts_shown, "busy", "peak KV", "mean KV"], rows
    )


def _config_differences(comparison: Comparison) -> HtmlTable:
    frame: pd.DataFrame = comparison.config_differences
    rows = [[Cell(str(value)) for value in row.values()] for row in frame.to_dict("records")]
    note = "Only the backend should differ between a prediction and its measurement."
    return HtmlTable("Settings that differ", note, ["key", "prediction", "measurement"], rows)
