"""The few figures of a run for the screen; everything else is in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from analysis.classes import OF, classes_in
from analysis.metrics import BEST, PERCENTILES, ties
from analysis.training_time import percents, shares_in
from analysis.usage import PARTS, PENDING

LATENCIES = ("ttft", "tpot", "e2e")
ERRORS, WIDTH = 5, 400  # of a server: so many kinds are told, in so many characters
STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))


def told(metrics: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Counts, throughput, latencies and memory of a run, in ten lines."""
    if not metrics.get("num_requests"):
        return "\n".join([_counts(metrics), *_training(metrics)])
    lines = [_counts(metrics), _throughput(metrics)]
    lines.append(f"{'':8}" + "".join(f"{name:>12}" for name in STATISTICS))
    for name in LATENCIES:
        cells = (shown_seconds(metrics.get(f"{stat}_{name}_s")) for stat in STATISTICS)
        lines.append(f"{name:8}" + "".join(f"{cell:>12}" for cell in cells))
    if "slo_attainment" in metrics:
        lines.append(_kept(metrics))
    lines += [_class(metrics, name) for name in classes_in(metrics)]
    peak = metrics.get("peak_kv_usage")
    if peak is not None:
        lines.append(f"KV peak {peak:.1%} of its room, mean {metrics.get('mean_kv_usage', 0):.1%}")
    if metrics["backend"] != "openai":  # a server's memory is not ours to plan
        lines.append(_memory(provenance))
    else:
        lines += [*_counted(provenance), *_errors(provenance)]
    if "replicas" in metrics:
        lines.append(_balance(metrics))
    lines += _training(metrics)
    return "\n".join(lines)


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


def best(points: Mapping[str, Mapping[str, Any]]) -> str:
    """The best point per metric, of points by name, and how many others are as good; empty where
    none has metrics."""
    lines = []
    for metric, is_more_better in BEST.items():
        found = {name: m[metric] for name, m in points.items() if metric in m}
        if found:
            name = (max if is_more_better else min)(found, key=lambda key: found[key])
            value = found[name]
            name += ties(found.values(), value)
            is_time = metric.endswith("_s") and not metric.endswith("_per_s")
            shown = shown_seconds(value) if is_time else f"{value:.4g}"
            lines.append(f"{metric:20}{shown:>12}  {name}")
    return "\n".join(["best of each metric:", *lines] if lines else [])


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
    form = metrics.get("cost_form")  # runs of before have none
    return f"{metrics['backend']}{f' ({form})' if form else ''}: " + ", ".join(parts)


def _training(metrics: Mapping[str, Any]) -> list[str]:
    """Steps, rate and losses of what was trained, what its time and its memory went to."""
    if "train_steps" not in metrics:
        return []
    lanes = [
        f"{name.removeprefix('busy_share_')} {share:.0%}"
        for name, share in metrics.items()
        if name.startswith("busy_share_")
    ]
    told = [
        f"training: {_rate(metrics)}, the first {shown_seconds(metrics['first_train_step_s'])}",
        f"time: {shown_times(metrics)}; lanes busy: {', '.join(lanes)}",
    ]
    if "peak_gpu0_used_bytes" in metrics:
        there = {part: metrics.get(f"fullest_gpu0_{part}_bytes", 0) for part in PARTS}
        used = shown_bytes(metrics["peak_gpu0_used_bytes"])
        told.append(f"device peak: {used}: {shown_parts(there)}")
    return told


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
        loss = "no loss, since nothing is computed"
    return f"{taken} a step, {rate:.4g} tokens/s, {loss}"


def _throughput(metrics: Mapping[str, Any]) -> str:
    return (
        f"{metrics.get('duration_s', 0):.3g} s, "
        f"{metrics.get('request_throughput', 0):.3g} requests/s, "
        f"{metrics.get('output_throughput', 0):.4g} output tokens/s"
    )


def _kept(metrics: Mapping[str, Any], of: str = "") -> str:
    """Who kept the SLO."""
    share, goodput = metrics[f"slo_attainment{of}"], metrics.get(f"goodput{of}", 0)
    return f"{share:.1%} within the SLO, goodput {goodput:.3g} requests/s"


def _class(metrics: Mapping[str, Any], name: str) -> str:
    """One SLO class."""
    of = f"{OF}{name}"
    parts = [f"{metrics[f'num_requests{of}']} requests"]
    parts += [_kept(metrics, of)] if f"slo_attainment{of}" in metrics else []
    for latency in ("ttft", "tpot"):
        p50, p99 = (metrics.get(f"{stat}_{latency}_s{of}") for stat in ("p50", "p99"))
        parts.append(f"{latency} p50 {shown_seconds(p50)}, p99 {shown_seconds(p99)}")
    return f"class {name}: {', '.join(parts)}"


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


def _balance(metrics: Mapping[str, Any]) -> str:
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
    if value is None:
        return "-"
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.3f} s"
