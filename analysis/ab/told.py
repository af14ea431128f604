"""A against B in words: a headline, the losers in one sentence, a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from textwrap import wrap

from analysis.ab.differences import BUSY, BY_TIME, Against, FigureDifference
from analysis.ab.groups import RunGroup
from analysis.units import UNITS, amount
from analysis.verdicts import LATENCY_NAMES, percent

METRIC_NAMES = {
    "request_throughput": "request rate",
    "output_throughput": "output rate",
    "slo_attainment": "SLO attainment",
    "goodput": "goodput",
    "preemptions": "preemptions",
    "peak_kv": "peak KV",
    "peak_memory": "peak memory",
    "mean_train_step": "training step",
    "train_tokens_per_s": "training rate",
    "finetune_tokens_per_s": "finetuning rate",
}
CLASS_LATENCIES = {"ttft": "TTFT", "e2e": "E2E"}
HEADLINE = ("ttft", "tpot", "e2e", "output_throughput", "mean_train_step", "finetune_tokens_per_s")
TRAINED = "train_tokens_per_s"  # told beside the rate of tokens that went forward
SCALES = UNITS | {"share": (("points", 0.01),)}  # of differences
SHOWN = ("better", "worse")  # verdicts that an interval shows
TINY = 1e-4  # share of an interval's larger end below which the other end reads as 0
LOAD = (
    "load: share of the time between the first and the last arrival in which a request is in the "
    "system"
)
FEW = "* fewer than one request is expected beyond this percentile: single requests decide it"


def metric_name(row: FigureDifference) -> str:
    """A figure's name, such as "p99 TTFT *" where few requests make it."""
    if row.metric not in LATENCY_NAMES:
        return METRIC_NAMES[row.metric]
    name = "E2E" if row.metric == "e2e" else LATENCY_NAMES[row.metric]
    return f"{row.stat} {name}" + (" *" if row.has_few else "")


def figure(value: float, unit: str) -> str:
    """The value of one side with its unit."""
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if unit == "count" else amount(value, unit)


def _scaled(values: Sequence[float], unit: str) -> tuple[list[float], str]:
    """Values in the largest unit in which one of them is at least 1."""
    scales = SCALES.get(unit, (("" if unit == "count" else unit, 1.0),))
    most = max(abs(value) for value in values)
    name, size = next((pair for pair in scales if most >= pair[1]), scales[-1])
    return [value / size if abs(value) > TINY * most else 0.0 for value in values], name


def difference(row: FigureDifference) -> str:
    """B - A with its sign and unit."""
    (value,), unit = _scaled([row.interval.value], row.unit)
    return f"{_signed(value)} {unit}".rstrip()


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3g}"


def interval(row: FigureDifference) -> str:
    """The interval in one unit; a dash where there is none."""
    if not row.interval.is_known:
        return "-"
    (low, high), unit = _scaled([row.interval.low, row.interval.high], row.unit)
    return f"{_signed(low)} to {_signed(high)} {unit}".rstrip()


def verdict(row: FigureDifference, found: Against) -> str:
    """The verdict with its subject, such as "B better"; at high load that it needs seeds."""
    if row.verdict not in ("better", "worse", "higher", "lower"):
        return row.verdict
    return f"{found.letter} {row.verdict}" + (", needs seeds" if found.needs_seeds else "")


def share(value: float) -> str:
    """A signed share such as +3.2 %; what rounds to 0 has no minus."""
    return percent(value if isnan(value) else round(value, 3) + 0.0)


def method(found: Against) -> str:
    """How the intervals are made, in one sentence."""
    known = [row.interval.method for row in found.rows if row.interval.is_known]
    if not known:
        return "There is no interval: give runs of several seeds on both sides."
    if found.is_one_pair:
        lengths = sorted({text.partition(",")[0] for text in known if text.startswith("blocks")})
        sizes = [float(text.split()[2]) for text in lengths]
        if not sizes:
            is_equal = all(row.interval.value == 0 for row in found.rows if row.stat != "run")
            why = "are equal" if is_equal else "have too few blocks of requests for an interval"
            return f"Latencies of one trace a side {why}."
        return (
            "95 % intervals are over blocks of consecutive requests of one run a side (stationary "
            f"bootstrap, Politis and White's mean length: {min(sizes):.3g} to {max(sizes):.3g})."
        )
    return f"95 % intervals are by {known[0]}."


def notes(found: Against) -> list[str]:
    """What a reader must know beside the table."""
    out = []
    if found.is_across_backends:
        kinds = ["measured" if _is_measured(group) else "simulated" for group in (found.a, found.b)]
        out.append(f"A is {kinds[0]}, {found.letter} is {kinds[1]}.")
    if found.is_prediction:
        out.append("Both have one policy: the difference is the prediction's error.")
    sides = zip(("A", found.letter), (found.a, found.b), found.unpaired, strict=True)
    for letter, group, unpaired in sides:
        if len(group.runs) > len(group.traces):
            reruns = f"{len(group.runs)} runs of {len(group.traces)} distinct traces"
            if len(group.traces) == 1:
                reruns = f"{len(group.runs)} reruns of one trace"
            out.append(f"{letter} has {reruns}: they are averaged, and a trace counts once.")
        if unpaired:
            out.append(
                f"{unpaired} run{'s' * (unpaired > 1)} of {letter} left out: "
                "the other side has no run of the trace."
            )
    if found.needs_seeds:
        out.append(
            f"load {100 * found.load:.0f} %, above {100 * BUSY:.0f} %: the queue seldom empties, "
            "so one run a side tells little of chance. The intervals need seeds: run both with "
            "seed=0,1,2,... and compare the folders."
        )
    if found.left_out:
        out.append(f"{found.left_out} requests finished on one side alone and are left out.")
    if found.seeds and found.requests.empty and found.row("mean_train_step", "run") is None:
        out.append("No request finished on both sides.")
    return out


def headline(found: Against) -> str:
    """Both names, which is better, by how much and whether that could be chance."""
    return f"A is {found.a.name}, {found.letter} is {found.b.name}. {findings(found)}"


def findings(found: Against) -> str:
    """The headline without names."""
    return " ".join([outcome(found), *notes(found)])


def outcome(found: Against) -> str:
    """Which is better, and whether that could be chance.

    Percentiles that the mean does not tell of are named, too.
    """
    finetunes = any([row.metric == "finetune_tokens_per_s" for row in found.rows])
    told = (*HEADLINE, TRAINED) if finetunes else HEADLINE
    rows = [row for m in told for row in found.rows if row.metric == m]
    percentiles = [row for row in rows if is_told_apart(row, found.row(row.metric))]
    rows = [row for row in rows if row.stat in ("mean", "run")]
    shown = sorted([*rows, *percentiles], key=lambda row: told.index(row.metric))
    is_known = {row.metric: row.interval.is_known for row in rows}
    better, worse = ([_part(row) for row in shown if row.verdict == one] for one in SHOWN)
    same = [metric_name(row) for row in rows if row.verdict == "no difference shown"]
    text, own = "", found.letter
    if better:
        text += f"{own} is better in {_listed(better)}. "
    if worse:
        text += f"{own} is worse in {_listed(worse)}. "
    if (better or worse) and found.is_one_pair and not found.needs_seeds:
        text += "Within these runs of one trace, the intervals leave out 0; seeds would tell more. "
    elif (better or worse) and not found.needs_seeds:
        text += "Chance alone seldom does that: these 95 % intervals leave out 0. "
    elif better or worse:
        text += "That could still be chance. "
    if same:
        text += f"No difference is shown in {_listed(same)}"
        is_equal = all(row.interval.value == 0 for row in found.rows)
        text += ": all figures are equal. " if is_equal else ": what there is may be chance. "
    if rows and not any(is_known.values()):
        parts = [f"{metric_name(row)} ({share(row.relative)})" for row in rows]
        text += f"{own} differs in {_listed(parts)}: without an interval that may be chance. "
    few = [f"{FEW}."] if any(row.has_few for row in percentiles) else []
    return " ".join([text.strip(), *few])


def is_told_apart(row: FigureDifference, mean: FigureDifference | None) -> bool:
    """Whether a percentile is shown to be what its mean is not: the opposite, or for p99 at all."""
    if mean is None or row is mean or row.verdict not in SHOWN or row.verdict == mean.verdict:
        return False
    return row.stat == "p99" or mean.verdict in SHOWN


def _is_measured(group: RunGroup) -> bool:
    return next(iter(group.runs.values())).is_measured


def _part(row: FigureDifference) -> str:
    size = share(row.relative) if not isnan(row.relative) else difference(row)
    return f"{metric_name(row)} ({size}, interval {interval(row)})"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def losers(found: Against) -> str:
    """The classes of requests that wait longer in B, in one sentence; empty without pairs."""
    if found.classes.empty:
        return ""
    parts: dict[str, list[str]] = {}
    rows = found.classes.to_dict("records")
    for metric, name in CLASS_LATENCIES.items():
        mean, slower, faster = (f"{metric}_{part}" for part in ("mean_s", "slower", "faster"))
        known = [r for r in rows if r["by"] != BY_TIME and r.get(mean) == r.get(mean, 0.0)]
        lost = [r for r in known if r[mean] > 0 and r[slower] > r[faster]]
        if lost:
            worst = max(lost, key=lambda row: float(row[mean]))
            size = f"{100 * worst[slower]:.0f} % are slower, {seconds(worst[mean])} in the mean"
            most = "all, most of them " if len(lost) == len(known) > 1 else ""
            parts.setdefault(f"{most}{worst['class']}", []).append(f"in {name} ({size})")
    if not parts:
        return f"No class of requests loses under {found.letter}."
    told = [f"{name} {_listed(lost)}" for name, lost in parts.items()]
    return f"Losers under {found.letter}: {'; '.join(told)}."


def seconds(value: float) -> str:
    (scaled,), unit = _scaled([value], "s")
    return f"{scaled:+.3g} {unit}"


def class_lines(found: Against) -> list[str]:
    """The classes of requests, as lines of a table."""
    if found.classes.empty:
        return []
    lines = [f"{f'under {found.letter}':<36}{'requests':>9}"]
    for name in CLASS_LATENCIES.values():
        lines[0] += f"{f'{name} faster':>13}{'slower':>8}{'median':>12}"
    for row in found.classes.to_dict("records"):
        cells = f"{row['class']:<36}{row['requests']:>9,}"
        for metric in CLASS_LATENCIES:
            faster, slower = (float(row.get(f"{metric}_{p}", nan)) for p in ("faster", "slower"))
            median = f"{seconds(row[f'{metric}_median_s']):>12}" if faster == faster else " " * 12
            cells += f"{part_of(faster):>13}{part_of(slower):>8}{median}"
        lines.append(cells)
    return lines


def part_of(value: float) -> str:
    """A share of requests; a dash where it is unknown."""
    return "-" if isnan(value) else f"{100 * value:.0f} %"


def table(found: Against) -> str:
    """A comparison for a terminal of 120 columns."""
    sides = [
        f"{letter}  {group.name} ({len(group.runs)} run{'s' * (len(group.runs) > 1)})"
        for letter, group in (("A", found.a), (found.letter, found.b))
    ]
    own = found.letter
    head = f"{'':<16}{'A':>14}{own:>14}{f'{own} - A':>16}{'%':>11}{'95 % interval':>28}  verdict"
    lines = [*sides, "", head]
    for row in found.rows:
        cells = [figure(value, row.unit) for value in (row.a, row.b)]
        shown = f"{cells[0]:>14}{cells[1]:>14} {difference(row):>15}{share(row.relative):>11}"
        lines.append(f"{metric_name(row):<16}{shown} {interval(row):>27}  {verdict(row, found)}")
    if any(row.has_few for row in found.rows):
        lines.append(FEW)
    if classes := class_lines(found):
        lines += ["", *classes, losers(found)]
    told = [outcome(found), method(found), *notes(found)]
    return "\n".join([*lines, "", *[line for text in told for line in wrap(text, 120)]])
