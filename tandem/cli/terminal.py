"""The figures of a run and the points of a sweep for the terminal, why a run has served no request,
and progress bars."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from analysis.metric_names import (
    FOR,
    OF,
    PARTS,
    PENDING,
    PERCENTILES,
    classes_in,
    percents,
    shares_in,
    tenants_in,
)
from analysis.swept import HEADLINES, METRICS, best_points, number
from engine.loop.engine import Engine
from engine.results.recorder import Recorder
from tandem.wiring.folder import OK, provenance_in
from traces.serving.request import Request, TrainingJob

INTERVAL_S = 0.5
ENDED_BEFORE = 0.05  # share of a run without finetuning at its end, above which that is told


@contextmanager
def progress_bar(
    engine: Engine, work: Sequence[Request | TrainingJob], is_shown: bool
) -> Iterator[None]:
    """Shows how much of the work has left the engine, while the block runs: see `amount`."""
    if not is_shown:
        yield
        return
    from tqdm import tqdm

    over = threading.Event()
    total, unit = amount(work)

    def watch() -> None:
        with tqdm(total=total, unit=unit, file=sys.stderr, leave=False) as bar:
            while not over.wait(INTERVAL_S):
                bar.n = done(engine.recorder)
                bar.refresh()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def search_bar(what: str) -> Iterator[Callable[[], object]]:
    """Counts the points that a search tries, while the block runs: to be called for each.

    Warnings of cost tables are off in the block: the search chose these points, the user did not.
    """
    from tqdm import tqdm

    tables = logging.getLogger("sim.cost.piecewise")
    was_disabled = tables.disabled
    tables.disabled = True
    try:
        with tqdm(desc=what, unit=" tried", leave=False, disable=None) as bar:  # None: no terminal
            yield bar.update
    finally:
        tables.disabled = was_disabled


def amount(work: Sequence[Request | TrainingJob]) -> tuple[int, str]:
    """How much there is to do, and its unit: requests, steps of training, or both as items."""
    jobs = [item for item in work if isinstance(item, TrainingJob)]
    steps = [job.num_steps - job.begun_steps for job in jobs]
    requests = len(work) - len(steps)
    return requests + sum(steps), "step" if not requests else "item" if steps else "req"


def done(recorder: Recorder) -> int:
    """How much of it is."""
    return recorder.trained_steps + recorder.ended_requests


def refusal(folder: Path, metrics: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """One line where a finished run refused all requests, or a server lost some; None elsewhere."""
    count = metrics.get("num_requests")
    if count and config["backend"]["name"] == "openai":
        return _lost(folder, metrics)
    if not count or metrics["num_refused"] < count:
        return None
    told = f"all {count} requests were refused"
    if config.get("replayed") is not None:
        return f"{told}, as they were in the run that is replayed: {config['replayed']}"
    return f"{told}: {_reason(folder, config)}"


def num_lost(metrics: Mapping[str, Any]) -> int:
    """How many requests a server has refused or not finished; 0 in other backends, whose policies
    may refuse."""
    if metrics.get("backend") != "openai":
        return 0
    return int(metrics["num_refused"] + metrics["num_unfinished"])


def _lost(folder: Path, metrics: Mapping[str, Any]) -> str | None:
    if not (lost := num_lost(metrics)):
        return None
    refused, unfinished = metrics["num_refused"], metrics["num_unfinished"]
    return (
        f"the server lost {lost} of {metrics['num_requests']} requests ({refused} refused, "
        f"{unfinished} unfinished): what became of each is in {folder}/client.parquet"
    )


def _reason(folder: Path, config: Mapping[str, Any]) -> str:
    """A request's need beside the memory. A reservation is taken whole, pages as a job grows."""
    pages, page_tokens = int(provenance_in(folder)["kv_pages"]), config["page_tokens"]
    shortest = _shortest_prompt_tokens(folder)
    there = f"a device has {pages} pages of {page_tokens} tokens"
    more = f"raise budget.kv_pages (it is {pages}) or budget.fraction"
    if share := config["memory"].get("device_share"):  # set aside for training
        there += f", of which training keeps {100 * share:g}%"
        more = f"lower memory.device_share (it is {share:g}), or {more}"
    reserved = config["memory"].get("max_tokens")
    if reserved is None:
        return (
            f"the shortest has a prompt of {shortest} tokens, {-(-shortest // page_tokens)} pages "
            f"of KV, and grows from there; {there}; {more}, or import a trace of shorter requests"
        )
    needed = -(-reserved // page_tokens)
    if needed > pages:
        return (
            f"each reserves {needed} pages of KV (memory.max_tokens={reserved}), {needed - pages} "
            f"more than there are; {there}; {more}, or lower memory.max_tokens"
        )
    return (
        f"none stays within its reservation of memory.max_tokens={reserved} (the shortest has a "
        f"prompt of {shortest} tokens); raise it, or take memory=paged_restart"
    )


def _shortest_prompt_tokens(folder: Path) -> int:
    from engine.results.schema import read_table

    tokens = read_table(folder / "requests.parquet", columns=["prompt_tokens"])
    return min(map(int, tokens["prompt_tokens"].to_pylist()))


LATENCIES = ("ttft", "tpot", "e2e")
ERRORS, WIDTH = 5, 400  # of a server: so many kinds are told, in so many characters
STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))


def told(metrics: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Counts, throughput, latencies and memory of a run, in ten lines."""
    if not metrics.get("num_requests"):
        return "\n".join([_counts(metrics), *_training(metrics), *_assumed(provenance)])
    lines = [_counts(metrics), _throughput(metrics)]
    lines.append(f"{'':8}" + "".join(f"{name:>12}" for name in STATISTICS))
    for name in LATENCIES:
        cells = _in_one_unit([metrics.get(f"{stat}_{name}_s") for stat in STATISTICS])
        lines.append(f"{name:8}" + "".join(f"{cell:>12}" for cell in cells))
    if "slo_attainment" in metrics:
        lines.append(_kept(metrics))
    lines += [_class(metrics, name) for name in classes_in(metrics)]
    lines += [_tenant(metrics, name) for name in tenants_in(metrics)]
    peak = metrics.get("peak_kv_usage")
    if peak is not None:
        lines.append(f"KV peak {peak:.1%} of its room, mean {metrics.get('mean_kv_usage', 0):.1%}")
    lines += _adapters(metrics)
    if metrics["backend"] != "openai":  # a server's memory is not ours to plan
        lines.append(_memory(provenance))
    else:
        lines += [*_counted(provenance), *_errors(provenance)]
    if "replicas" in metrics:
        lines.append(_imbalance(metrics))
    lines += [*_training(metrics), *_assumed(provenance)]
    return "\n".join(lines)


def _assumed(provenance: Mapping[str, Any]) -> list[str]:
    """What the times of a simulation rest on that was never measured."""
    return [f"assumed: {provenance['assumed']}"] if "assumed" in provenance else []


def brief(metrics: Mapping[str, Any]) -> str:
    """One line for a point of a sweep."""
    if not metrics.get("num_requests"):
        return (
            f"{_steps(metrics)}, {_rate(metrics)}"
            if "train_steps" in metrics
            else "nothing finished"
        )
    if not metrics["num_finished"]:
        return _counts(metrics)
    parts = [f"{metrics.get('output_throughput', 0):.4g} tokens/s"]
    parts += [f"{name} p50 {shown_seconds(metrics.get(f'p50_{name}_s'))}" for name in LATENCIES]
    return ", ".join(parts)


def best(runs: Iterable[tuple[str, Mapping[str, Any]]], over: str = "") -> str:
    """The best point per metric, of runs as `best_points` takes them; empty where none has metrics.

    `over` ends the heading: what values are means over.
    """
    lines = []
    for row in best_points(runs):
        name, unit = METRICS[row.metric]
        value = shown_seconds(row.value) if unit == "s" else f"{row.value:.4g} {unit}"
        value = f"{row.value:.1%}" if unit == "%" else value
        lines.append(f"{name:24}{value:>18}  {row.point}".rstrip())
    return "\n".join([f"best of each metric{over}:", *lines] if lines else [])


MOST_ROWS = 60
STEPS = "steps/s"  # of training; told beside the time of a step, of which it is the inverse
WHERE_NOT_ALL_ZERO = ("restarts", "swaps")


@dataclass(frozen=True)
class PointTold:
    """A point: its varied settings as they were given, its status, and its metrics if it is ok."""

    settings: Mapping[str, str]
    status: str
    metrics: Mapping[str, Any]


def points_table(points: Sequence[PointTold], most_rows: int = MOST_ROWS) -> str:
    """A line of headings and a line per point; empty for a single point or none.

    Metrics that no point has are left out; a point without a result has its status instead.
    """
    if len(points) < 2 or not any(point.settings for point in points):
        return ""
    shown = [name for name in HEADLINES if any(_is_told(name, p.metrics) for p in points)]
    headings = [*points[0].settings, *(HEADLINES[name][0] for name in shown)]
    rows = [[*map(_short, p.settings.values()), *_cells(p, shown)] for p in points[:most_rows]]
    if "mean_train_step_s" in shown:
        headings.insert(at := headings.index("train step") + 1, STEPS)
        for point, row in zip(points, rows, strict=False):
            step_s = point.metrics.get("mean_train_step_s")
            row.insert(at, f"{1 / step_s:.4g}" if step_s else "-" if point.status == OK else "")
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    is_left = [index < len(points[0].settings) for index in range(len(headings))]
    lines = [_row(cells, widths, is_left) for cells in (headings, *rows)]
    if left := len(points) - most_rows:
        lines += [f"... and {left} more: see the report"] if left > 0 else []
    return "\n".join(lines)


def _row(cells: Sequence[str], widths: Sequence[int], is_left: Sequence[bool]) -> str:
    padded = [
        cell.ljust(width) if left else cell.rjust(width)
        for cell, width, left in zip(cells, widths, is_left, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _is_told(name: str, metrics: Mapping[str, Any]) -> bool:
    return bool(metrics.get(name)) if name in WHERE_NOT_ALL_ZERO else metrics.get(name) is not None


def _cells(point: PointTold, shown: Sequence[str]) -> list[str]:
    if point.status == OK:
        return [_cell(name, point.metrics.get(name)) for name in shown]
    return [point.status, *[""] * (len(shown) - 1)] if shown else []


def _cell(name: str, value: Any) -> str:
    if value is None or value != value:
        return "-"
    if name == "slo_attainment":
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return shown_bytes(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return shown_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _short(text: str) -> str:
    """A value as given, but numbers short: 1e+09 for 1000000000.0."""
    found = number(text)
    return text if found is None else f"{found:.12g}"


Overrides = tuple[str, ...]


class Sized(Protocol):
    """A point: its own overrides, the size of its model, and whether it fits."""

    @property
    def overrides(self) -> Overrides: ...
    @property
    def parameters(self) -> int: ...
    @property
    def fits(self) -> bool: ...


Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True)
class Tried:
    """A point that was run."""

    overrides: Overrides
    parameters: int
    fits: bool


def largest_model_by_rest(rows: Iterable[Row]) -> Mapping[Overrides, Row | None]:
    """The largest model that fits, per choice of all else; None where none fits."""
    best: dict[Overrides, Row | None] = {}
    for row in rows:
        rest = tuple(word for word in row.overrides if not _is_of_model(word))
        before = best.setdefault(rest, None)
        if row.fits and (before is None or row.parameters > before.parameters):
            best[rest] = row
    return best


def largest_model_lines(rows: Iterable[Sized], verb: str) -> list[str]:
    """A line per choice of all else, such as: largest that fits with policy=patrickstar: ..."""
    return [
        f"largest that {verb}{_with_overrides(others)}: {_model_size(best)}"
        for others, best in largest_model_by_rest(rows).items()
    ]


def model_of(words: Overrides) -> Overrides:
    """Those of the words that choose the model."""
    return tuple(word for word in words if _is_of_model(word))


def _model_size(row: Sized | None) -> str:
    if row is None:
        return "none"
    return f"{row.parameters / 1e6:,.1f} M parameters ({' '.join(model_of(row.overrides))})"


def _is_of_model(word: str) -> bool:
    return word.lstrip("+~").partition("=")[0].partition(".")[0] == "model"


def _with_overrides(others: Overrides) -> str:
    return f" with {' '.join(others)}" if others else ""


def _counts(metrics: Mapping[str, Any]) -> str:
    parts = []
    if metrics.get("num_requests"):
        parts.append(f"{metrics['num_finished']} of {metrics['num_requests']} requests finished")
    if "train_steps" in metrics:
        parts.append(f"{_steps(metrics)} trained")
    for name in ("refused", "unfinished"):
        if metrics.get(f"num_{name}"):
            parts.append(f"{metrics[f'num_{name}']} {name}")
    parts += [f"{metrics[name]} {name}" for name in ("restarts", "swaps") if metrics.get(name)]
    if "prefix_hit_rate" in metrics:
        parts.append(f"{metrics['prefix_hit_rate']:.0%} of prompt tokens found in the prefix cache")
    form = metrics.get("cost_form")  # None in earlier versions' runs
    return f"{metrics['backend']}{f' ({form})' if form else ''}: " + ", ".join(parts)


def _training(metrics: Mapping[str, Any]) -> list[str]:
    """Steps, rate and losses of what was trained, what its time and its memory went to."""
    if "train_steps" not in metrics:
        return [*_finetuned(metrics), *_recorded(metrics)]
    lanes = [
        f"{name.removeprefix('busy_share_')} {share:.0%}"
        for name, share in metrics.items()
        if name.startswith("busy_share_")
    ]
    told = [
        f"training: {_rate(metrics)}, the first {shown_seconds(metrics['first_train_step_s'])}",
        *_finetuned(metrics),
        *_recorded(metrics),
        f"time: {shown_times(metrics)}; lanes busy: {', '.join(lanes)}",
    ]
    if "peak_gpu0_used_bytes" in metrics:
        there = {part: metrics.get(f"fullest_gpu0_{part}_bytes", 0) for part in PARTS}
        used = shown_bytes(metrics["peak_gpu0_used_bytes"])
        told.append(f"device peak: {used}: {shown_parts(there)}")
    return told


def _adapters(metrics: Mapping[str, Any]) -> list[str]:
    """Adapters of requests: what they hold of the device at most, and how often one was copied."""
    if "adapter_loads" not in metrics:
        return []
    peak = shown_bytes(metrics.get("peak_gpu0_adapter_bytes", 0))
    loads, moved = metrics["adapter_loads"], shown_bytes(metrics["adapter_loaded_bytes"])
    return [f"adapters: {peak} on the device at most; {loads} copies to it, {moved}"]


def _finetuned(metrics: Mapping[str, Any]) -> list[str]:
    """Samples and their rate, and the largest gap that a request has seen between two tokens."""
    if "finetune_samples" not in metrics:
        return []
    samples, rate = metrics["finetune_samples"], metrics["finetune_tokens_per_s"]
    told = f"finetuning: {samples} samples, {rate:.4g} tokens/s forward"
    if "finetune_share" in metrics:
        told += f" ({metrics['finetune_share']:.1%} of finetuning alone)"
    if again := metrics["finetune_restarts"]:
        told += f", begun anew {again} times"
    if "max_itl_s" in metrics:
        told += f"; the largest gap between tokens is {shown_seconds(metrics['max_itl_s'])}"
    lines = [told]
    if (idle := metrics.get("finetune_ended_before_share", 0.0)) > ENDED_BEFORE:
        lines.append(
            f"finetuning ended before the requests: none in the last {idle:.0%} of the run, which "
            "its rate counts; more samples (training.data.count=) would last longer"
        )
    return lines


def _recorded(metrics: Mapping[str, Any]) -> list[str]:
    """Records of prompts: how many a sample has used, how old, and what the others have taken."""
    if "records" not in metrics:
        return []
    told = f"records: {metrics['records']}, of which samples used {metrics['record_hit_rate']:.1%}"
    if "mean_record_age_s" in metrics:
        told += f", {shown_seconds(metrics['mean_record_age_s'])} old on average"
    kept, wasted = metrics["record_kept_bytes"], metrics["record_wasted_bytes"]
    return [f"{told}; {shown_bytes(kept)} kept, {shown_bytes(wasted)} of it for none"]


def _steps(metrics: Mapping[str, Any]) -> str:
    steps = metrics["train_steps"]
    return f"{steps} of {metrics.get('train_steps_asked', steps)} steps"


def _rate(metrics: Mapping[str, Any]) -> str:
    """How long a step takes, tokens per second, and what became of the loss."""
    taken, rate = shown_seconds(metrics["mean_train_step_s"]), metrics["train_tokens_per_s"]
    loss = "loss is no number in some step"
    if "last_loss" in metrics:
        loss = f"loss {metrics['first_loss']:.4f} -> {metrics['last_loss']:.4f}"
    elif metrics["backend"] == "sim":
        loss = "no loss: nothing is computed"
    return f"{taken} a step, {rate:.4g} tokens/s, {loss}"


def _throughput(metrics: Mapping[str, Any]) -> str:
    return (
        f"{metrics.get('duration_s', 0):.3g} s, "
        f"{metrics.get('request_throughput', 0):.3g} requests/s, "
        f"{metrics.get('output_throughput', 0):.4g} output tokens/s"
    )


def _kept(metrics: Mapping[str, Any], of: str = "") -> str:
    """The share of requests within the SLO, and goodput."""
    share, goodput = metrics[f"slo_attainment{of}"], metrics.get(f"goodput{of}", 0)
    return f"{share:.1%} within the SLO, goodput {goodput:.3g} requests/s"


def _class(metrics: Mapping[str, Any], name: str) -> str:
    """One SLO class."""
    of = f"{OF}{name}"
    parts = [f"{metrics[f'num_requests{of}']} requests"]
    parts += [_kept(metrics, of)] if f"slo_attainment{of}" in metrics else []
    return f"class {name}: {', '.join([*parts, *_cuts(metrics, of)])}"


def _tenant(metrics: Mapping[str, Any], name: str) -> str:
    """One tenant: its tokens, what it was charged for them, and its latencies."""
    of, parts = f"{FOR}{name}", list[str]()
    if (count := metrics.get(f"num_requests{of}")) is not None:
        tokens = [metrics[f"{kind}_tokens{of}"] for kind in ("prompt", "output")]
        parts.append(f"{count} requests, {tokens[0]:,} prompt and {tokens[1]:,} output tokens")
    if trained := metrics.get(f"finetune_tokens{of}"):
        parts.append(f"{trained:,.0f} tokens finetuned")
    if f"charged{of}" in metrics:
        parts.append(f"charged {metrics[f'charged{of}']:,.0f}")
    return f"tenant {name}: {', '.join([*parts, *(_cuts(metrics, of) if count else ())])}"


def _cuts(metrics: Mapping[str, Any], of: str) -> list[str]:
    """Medians and 99th percentiles of the requests of a class or tenant."""
    parts = list[str]()
    for latency in ("ttft", "tpot"):
        p50, p99 = (metrics.get(f"{stat}_{latency}_s{of}") for stat in ("p50", "p99"))
        parts.append(f"{latency} p50 {shown_seconds(p50)}, p99 {shown_seconds(p99)}")
    return parts


def _memory(provenance: Mapping[str, Any]) -> str:
    """What a device's memory was for."""
    plan = provenance["memory_plan"]
    parts = [("weights", "weight"), ("activations", "activation"), ("reserve", "reserve")]
    shown = [f"{name} {shown_bytes(plan[f'{key}_bytes'])}" for name, key in (*parts, ("KV", "kv"))]
    return f"memory of a device: {', '.join(shown)} ({provenance['kv_pages']:,} pages)"


def _counted(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Where the server's counts of tokens are not those of the trace, or of its own stream."""
    words = {
        "prompt_tokens_differ": "prompt tokens differ in {}",
        "output_tokens_differ": "output tokens differ from what was asked for in {}",
        "output_tokens_too_few": "tokens are fewer than came in {}",
        "output_tokens_uncounted": "tokens are counted by chunks in {}, without usage",
    }
    parts = [text.format(provenance[key]) for key, text in words.items() if provenance.get(key)]
    if parts:
        yield f"the server's counts, in requests: {'; '.join(parts)}"


def _errors(provenance: Mapping[str, Any]) -> Iterator[str]:
    """What became of lost requests, the most frequent first."""
    found = sorted(provenance.get("errors", {}).items(), key=lambda item: -item[1])
    for error, count in found[:ERRORS]:
        yield f"lost: {count} x {error if len(error) <= WIDTH else f'{error[:WIDTH]}...'}"
    if rest := sum(count for _, count in found[ERRORS:]):
        yield f"lost: {rest} otherwise, see client.parquet"


def _imbalance(metrics: Mapping[str, Any]) -> str:
    """How far the fullest replica lies above the mean."""
    parts = [
        f"{name} {metrics[key] - 1:+.1%}"
        for name, key in (("requests", "request_imbalance"), ("busy time", "busy_imbalance"))
        if key in metrics
    ]
    return f"{metrics['replicas']} replicas, the fullest against their mean: {', '.join(parts)}"


def shown_bytes(value: int) -> str:
    """In MiB or GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def shown_parts(parts: Mapping[str, int]) -> str:
    """What a pool is filled with; parts of nothing are left out."""
    told = [f"{part} {shown_bytes(nbytes)}" for part, nbytes in parts.items() if nbytes]
    if parts.get(PENDING):
        told[-1] += " (freed, in use until an operation ends)"
    return ", ".join(told) or "nothing"


def shown_times(metrics: Mapping[str, Any]) -> str:
    """What the time of training went to; the parts add up to all of it."""
    parts = percents(shares_in(metrics))
    return ", ".join([f"{part} {share}%" for part, share in parts.items() if share != "0"])


def shown_seconds(value: Any) -> str:
    """In ms or s; a dash for nothing."""
    return _in_one_unit([value])[0]


def _in_one_unit(values: Sequence[Any]) -> list[str]:
    """Seconds that stand in one row, all in ms or all in s by the middle one."""
    known = [value for value in values if value is not None]
    is_long = bool(known) and sorted(known)[len(known) // 2] >= 1
    shown = [value if is_long else 1e3 * value for value in known]
    texts = iter([f"{value:.3f} s" if is_long else f"{value:.2f} ms" for value in shown])
    return ["-" if value is None else next(texts) for value in values]
