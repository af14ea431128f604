"""A comparison in words: a verdict per figure, a paragraph, a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from textwrap import wrap
from typing import Any

from analysis.compare import Comparison
from analysis.distance import STEADY, drift
from analysis.run import Run
from analysis.training import LABELS, MEAN_STEP, STEP
from analysis.units import amount, amounts
from analysis.workspace import KIND, P90

# Relative errors up to which a prediction is good or fair. Throughput and latencies take the bars
# of Tandem's own fidelity claims (2 %; 5 % and never above 10 %), memory 3 % free-running.
LIMITS = {"throughput": (0.02, 0.05), "memory": (0.03, 0.10), "latency": (0.05, 0.10)}
MARKS = {"good": "+", "fair": "o", "poor": "-", "undefined": "?"}
LEGEND = "; ".join(
    f"{kind}: good to {100 * good:.0f} %, fair to {100 * fair:.0f} %"
    for kind, (good, fair) in LIMITS.items()
)
PARTS = ("direct", "consequence", "rest")  # of an error, see analysis.causes.split
LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end-to-end latency"}


def limits_name(metric: str) -> str:
    """The entry of LIMITS that judges a metric."""
    if "throughput" in metric or "tokens_per_s" in metric or metric == "duration":
        return "throughput"
    return "memory" if metric in ("memory", "peak kv") else "latency"


def verdict(metric: str, error: float) -> str:
    """good, fair, poor or undefined."""
    if math.isnan(error):
        return "undefined"
    good, fair = LIMITS[limits_name(metric)]
    return "good" if abs(error) <= good else "fair" if abs(error) <= fair else "poor"


def percent(value: float) -> str:
    """A signed error such as +3.2 %."""
    return "n/a" if math.isnan(value) else f"{100 * value:+.1f} %"


def unit_of(metric: str) -> str:
    """The unit of a row of the split."""
    if metric == "peak kv":
        return "bytes"
    if metric == "request_throughput":
        return "req/s"
    return "tok/s" if "throughput" in metric or "tokens_per_s" in metric else "s"


def peak_error(comparison: Comparison, kind: str = "kv") -> float:
    """Largest signed error of the peak bytes of a kind on the GPU tier; NaN without any."""
    rows = comparison.memory
    is_gpu = rows["pool"].str.startswith("gpu")
    errors = rows[is_gpu & rows["kind"].eq(kind) & rows["stat"].eq("peak")]["error"].dropna()
    return float(errors.iloc[errors.abs().argmax()]) if len(errors) else math.nan


def headline(comparison: Comparison) -> str:
    """A paragraph: the size of the differences, and their causes."""
    sentences = [_verdict(comparison)]
    if not comparison.training.empty:
        sentences.append(_trained(comparison))
    if len(comparison.measurement.requests) or comparison.training.empty:
        sentences.append(_served(comparison))
    sentences += [_decisions(comparison), _why(comparison), _ground(comparison)]
    return " ".join(sentences).strip()


def _verdict(comparison: Comparison) -> str:
    """What was compared, and how well the worst of the judged figures was predicted."""
    a, b = comparison.prediction, comparison.measurement
    text = f"{a.name}, predicted, against {b.name}, measured on {b.provenance.get('device', '-')}: "
    errors = {name: comparison.error(metric, stat) for name, (metric, stat) in JUDGED.items()}
    errors["peak KV memory"] = peak_error(comparison)
    known = {name: error for name, error in errors.items() if not math.isnan(error)}
    if not known:
        return f"{text}nothing can be judged."
    marks = {name: verdict(METRICS.get(name, name), error) for name, error in known.items()}
    mark = next(mark for mark in ("poor", "fair", "good") if mark in marks.values())
    worst = max((n for n in known if marks[n] == mark), key=lambda name: abs(known[name]))
    if mark == "good":
        return f"{text}a good prediction, at most {percent(known[worst])} off ({worst})."
    return f"{text}a {mark} prediction, by {worst} ({percent(known[worst])})."


# What the verdict of a comparison judges, by name; and by which limits, where the name tells not.
JUDGED = {
    "throughput": ("output_throughput", "run"),
    "mean TPOT": ("tpot", "mean"),
    "mean end-to-end latency": ("e2e", "mean"),
    "mean TTFT": ("ttft", "mean"),
    "mean training step": (STEP, "run"),
}
METRICS = {"peak KV memory": "memory"}
RAN = ("predicted", "measured")


def run_headline(run: Run, metrics: Mapping[str, float | int | str]) -> str:
    """What one run did, and how it went, in sentences."""
    is_known = not run.is_measured and run.cost_form != "-"
    how = f"predicted ({run.cost_form})" if is_known else RAN[run.is_measured]
    text = f"{run.name}, {how} on {run.provenance.get('device', '-')}: "
    return text + " ".join(filter(None, (_did_serve(run, metrics), _did_train(metrics))))


def _did_serve(run: Run, metrics: Mapping[str, float | int | str]) -> str:
    total = len(run.requests)
    if not total:
        return ""
    done = int(metrics.get("num_finished", 0))
    text = f"all {total} requests finished" if done == total else f"{done} of {total} finished"
    known = [(name, f"mean_{name}_s") for name in ("ttft", "tpot", "e2e")]
    means = [
        f"{LATENCY_NAMES[name]} {amount(float(metrics[key]), 's')}"
        for name, key in known
        if key in metrics
    ]
    if "output_throughput" in metrics:
        text += f", at {amount(float(metrics['output_throughput']), 'tok/s')} of output"
    text += f"; mean {', '.join(means)}." if means else "."
    if "slo_attainment" in metrics:
        text += f" {100 * float(metrics['slo_attainment']):.1f} % kept their SLO."
    if "peak_kv_usage" in metrics:
        text += f" KV filled {100 * float(metrics['peak_kv_usage']):.0f} % of its room at most"
        restarts, swaps = (int(metrics.get(name, 0)) for name in ("restarts", "swaps"))
        text += f"; {restarts} restarts, {swaps} swaps." if restarts + swaps else ", no preemption."
    return text


def _did_train(metrics: Mapping[str, float | int | str]) -> str:
    if "train_steps" not in metrics:
        return ""
    text = f"{metrics['train_steps']} training steps"
    return f"{text} of {amount(float(metrics[STEP]), 's')} in the mean of those after the first."


def _trained(comparison: Comparison) -> str:
    off = _off(comparison.error(STEP, "run"))
    text = f"The prediction puts a training step, in the mean of those after the first, {off}; "
    text += f"peak memory is {_equal_or_off(peak_error(comparison, 'used'))}; "
    return f"{text}the losses {comparison.losses.text}."


def _served(comparison: Comparison) -> str:
    latencies = ("tpot", "e2e", "ttft")
    parts = [f"mean {LATENCY_NAMES[m]} {_off(comparison.error(m, 'mean'))}" for m in latencies]
    throughput = _off(comparison.error("output_throughput", "run"))
    text = f"The prediction puts the throughput {throughput}, " + ", ".join(parts[:-1])
    return f"{text} and {parts[-1]}; peak KV memory is {_equal_or_off(peak_error(comparison))}."


def _equal_or_off(error: float) -> str:
    return "equal to the byte" if error == 0 else _off(error)


def _off(error: float) -> str:
    if math.isnan(error):
        return "(undefined)"
    if abs(error) < 0.0005:
        return "right (within 0.05 %)"
    return f"{abs(error) * 100:.1f} % too {'high' if error > 0 else 'low'}"


def _decisions(comparison: Comparison) -> str:
    plans = comparison.plans
    if not (plans.prediction and plans.measurement):
        return "Their decisions are not compared: one run, such as a server's, has no plan log."
    if plans.divergence is None:
        return f"Both runs made the same {plans.common} decisions."
    if not plans.common:
        return "They have no plan in common: causes of the error cannot be told apart."
    longer = max(plans.prediction, plans.measurement)
    return f"Their decisions are the same for the first {plans.common} of {longer} plans."


def _why(comparison: Comparison) -> str:
    """The direct error of operations, its consequence, and how much of the error they explain."""
    rows = comparison.split[comparison.split["metric"].isin((E2E, MEAN_STEP))]
    if rows.empty:
        return _left_out(comparison)
    row = rows.to_dict("records")[0]
    direct, consequence = float(row["direct_share"]), float(row["consequence_share"])
    name = "mean end-to-end latency" if row["metric"] == E2E else "mean training step"
    text = (
        f"At equal decisions, operations are off by {percent(comparison.busy_error)} of their "
        f"time: this direct error of operations puts the {name} off by {percent(direct)}, and its "
        f"consequence for decisions (batching, preemption) by {percent(consequence)}."
    )
    if cancels(direct, consequence):
        text += f" {CANCEL}, which leaves {percent(direct + consequence)}."
    text += _explained(row)
    return text if comparison.reruns else f"{text} {UNKNOWN}"


E2E = "mean e2e"
CANCEL = "The two have opposite signs and cancel in part"
UNKNOWN = "The spread of reruns is not known (--rerun), so part of this may be chance."
LEAST = 0.1  # share of the larger part from which on two opposite parts cancel


def cancels(direct: float, consequence: float) -> bool:
    """Whether two parts of an error have opposite signs, and neither is small beside the other."""
    sizes = abs(direct), abs(consequence)
    return direct * consequence < 0 and min(sizes) >= LEAST * max(sizes)


def _explained(row: Mapping[Hashable, Any]) -> str:
    """How much of an error a simulation with the measured durations brings about."""
    share, rest = float(row["explained"]), float(row["rest_share"])
    if math.isnan(share):
        return ""
    text = f" With durations scaled by the measured ratios, the prediction is {percent(rest)} off: "
    if share < ENOUGH:
        return f"{text}durations explain {_of_all(share)} of the error, something else the rest."
    return f"{text}durations and what follows from them explain {_of_all(share)} of the error."


ENOUGH = 0.9  # share of an error from which on it counts as explained


def _of_all(share: float) -> str:
    """A share of an error; below none the corrected prediction is worse than the prediction."""
    return f"{100 * share:.0f} %" if share >= 0.005 else "none"


def _left_out(comparison: Comparison) -> str:
    if E2E not in comparison.within_spread:
        return ""
    return (
        "The error of the mean end-to-end latency is no more than the spread of "
        f"{len(comparison.reruns) + 1} measurements, so its causes are left out."
    )


def _ground(comparison: Comparison) -> str:
    run = comparison.prediction
    is_known = run.cost_form != "-" and not run.is_measured
    text = f"The prediction rests on the cost form {run.cost_form}." if is_known else ""
    moved = drift(comparison.measurement)
    if moved is not None:
        text += f" The machine drifted by {moved * 100:.1f} % around the measurement."
    return text


def table(comparison: Comparison) -> str:
    """Fixed-width text for a terminal, at most 80 columns."""
    lines = [f"{'':27}{'predicted':>15}{'measured':>15}{'error':>11}  "]
    for row in comparison.errors.to_dict("records"):
        metric, stat = str(row["metric"]), str(row["stat"])
        if stat in ("mean", "p99", "run") and metric != "norm_latency":
            name = LABELS.get(metric, metric) if stat == "run" else f"{stat} {metric}"
            lines.append(_line(name, metric, row, str(row["unit"])))
    for row in comparison.memory.to_dict("records"):
        if row["stat"] == "peak" and row["kind"] in ("kv", "used", KIND):
            name = f"peak {row['kind']} {row['pool']}"
            lines.append(_line(name, "memory", row, "bytes"))
        if row["stat"] == P90:
            lines.append(f"{'  of single launches, p90':<57}{100 * row['error']:>9.1f} %")
    lines += ["", "+ good  o fair  - poor, by the size of the error:"]
    lines += [f"  {limits}" for limits in LEGEND.split("; ")]
    lines.append("")
    for row in comparison.split.to_dict("records"):
        if row["metric"] in ("mean ttft", "mean tpot", E2E, MEAN_STEP):
            parts = [f"{part} {percent(row[f'{part}_share']):>8}" for part in PARTS]
            text = "  ".join(parts[:2] if math.isnan(row["rest"]) else parts)
            lines.append(f"{row['metric']:<27}{text}")
    if len(comparison.training):
        lines.append(f"{'losses':<27} {comparison.losses.text}")
    if comparison.replay is not None:
        off = percent(comparison.busy_error)
        lines.append(f"operations, same plans      {off} of their time in all, copies too")
        lines += _notes(comparison)
    plans = comparison.plans
    forms = [run.cost_form for run in (comparison.prediction, comparison.measurement)]
    lines.append(f"{'durations rest on':<27}{forms[0]:>15}{forms[1]:>15}")
    apart = ": then each run decides for itself" if plans.divergence else ""
    longer = max(plans.prediction, plans.measurement)
    common = f"{plans.common} of {longer} ({100 * plans.share:.0f} %){apart}"
    if plans.divergence and not plans.common:
        common = f"none of {plans.measurement}: causes cannot be told apart"
    lines.append(f"plans in common             {common}")
    moved = drift(comparison.measurement)
    if moved is not None:
        note = "" if moved <= STEADY else ": errors of that size say nothing of the model"
        lines.append(f"drift of the machine        {percent(moved)}{note}")
    return "\n".join([*lines, "", *wrap(_verdict(comparison), 80)])


def _notes(comparison: Comparison) -> list[str]:
    """What the parts of the error mean: what cancels, what reruns hide, and what is unknown."""
    rows = comparison.split.to_dict("records")
    found = []
    opposite = [str(r["metric"]) for r in rows if cancels(r["direct"], r["consequence"])]
    if opposite:
        found.append(f"  direct and consequence cancel in part: {', '.join(opposite)}")
    if comparison.within_spread:
        found.append(f"  within the spread of reruns: {', '.join(comparison.within_spread)}")
    elif rows and not comparison.reruns:
        found.append("  the spread of reruns is not known (--rerun): part may be chance")
    return [line for text in found for line in wrap(text, 80, subsequent_indent="  ")]


def _line(name: str, metric: str, row: Mapping[Hashable, Any], unit: str) -> str:
    """A row of the table; `metric` selects the limits of its verdict."""
    shown = amounts([row[run] for run in ("prediction", "measurement")], unit)
    mark = MARKS[verdict(metric, row["error"])]
    return f"{name:<27}{shown[0]:>15}{shown[1]:>15}{percent(row['error']):>11} {mark}"
