"""What a sweep varies: settings that differ between points, and the one to draw along x."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from analysis.metric_names import BEST, ties

REPLICATES = ("seed",)  # keys that repeat a point rather than make another
RATES = ("arrival.rate", "trace.rate")  # of synthetic arrivals; of a stretched recording
NAMES = {
    "arrival.rate": ("arrivals", "requests/s"),
    "trace.rate": ("arrivals", "requests/s"),
    "replicas": ("replicas", ""),
    "budget.kv_pages": ("KV of a device", "pages"),
    "budget.kv_bytes": ("KV of a device", "B"),
    "budget.device_bytes": ("device budget", "B"),
    "budget.host_bytes": ("host budget", "B"),
    "budget.fraction": ("budget", "share of the device"),
    "device.memory_bytes": ("device memory", "B"),
    "device.to_device_bytes_per_s": ("link to the device", "B/s"),
    "device.to_host_bytes_per_s": ("link to the host", "B/s"),
    "limit": ("requests", ""),
}
UNITS = (  # by the end of a key
    ("_bytes_per_s", "B/s"),
    ("_bytes", "B"),
    ("_flops_per_s", "FLOP/s"),
    ("_ns", "ns"),
    ("_ms", "ms"),
    ("_s", "s"),
    ("_tokens", "tokens"),
    ("token_budget", "tokens"),
    ("min_window", "tokens"),
    ("from_token", "tokens"),
    ("max_positions", "tokens"),
    ("_pages", "pages"),
    ("_elements", "numbers"),
)
PER = re.compile(r"(?:^|[._])([a-z]+)_per_([a-z]+)$")  # tokens_per_ms
HEADLINES = {  # what is told of a point: the metric, its heading, and what it is
    "output_throughput": ("tokens/s", "output tokens per second, of all devices"),
    "request_throughput": ("requests/s", "finished requests per second"),
    "mean_ttft_s": ("mean ttft", "mean time to the first token, seconds"),
    "p99_ttft_s": ("p99 ttft", "its 99th percentile over requests, seconds"),
    "mean_tpot_s": ("mean tpot", "mean time per output token after the first, seconds"),
    "p99_tpot_s": ("p99 tpot", "its 99th percentile over requests, seconds"),
    "slo_attainment": ("in slo", "share of requests that met every limit of the SLO"),
    "goodput": ("goodput", "requests per second that did"),
    "restarts": ("restarts", "preemptions whose KV is computed again"),
    "swaps": ("swaps", "preemptions whose KV is copied to the host and back"),
    "train_tokens_per_s": ("train tok/s", "tokens trained per second, after the first step"),
    "mean_train_step_s": ("train step", "mean time of a step after the first, seconds"),
    "finetune_tokens_per_s": ("finetune tok/s", "tokens of samples that went forward per second"),
    "finetune_trained_tokens_per_s": ("trained tok/s", "tokens of finished samples per second"),
    "record_hit_rate": ("hits", "share of records of prompts that a sample has used"),
    "finetune_share": ("of alone", "that rate over the one of finetuning alone"),
    "peak_gpu0_used_bytes": ("peak used", "most bytes that the first device held"),
}
METRICS = {  # a metric in words, and the unit of its axis
    "goodput": ("goodput", "requests/s"),
    "request_throughput": ("throughput", "requests/s"),
    "output_throughput": ("output", "tokens/s"),
    "slo_attainment": ("requests within the SLO", "%"),
    "p50_ttft_s": ("p50 TTFT", "s"),
    "p99_ttft_s": ("p99 TTFT", "s"),
    "p99_tpot_s": ("p99 TPOT", "s"),
    "p99_e2e_s": ("p99 E2E", "s"),
    "train_tokens_per_s": ("trained", "tokens/s"),
    "mean_train_step_s": ("mean training step", "s"),
    "finetune_tokens_per_s": ("finetuned", "tokens/s"),
    "finetune_trained_tokens_per_s": ("samples trained", "tokens/s"),
    "record_hit_rate": ("records used", "%"),
    "peak_gpu0_used_bytes": ("peak device memory", "GiB"),
}
RESOURCES = re.compile(r"replicas|budget\.|device\.(memory|.*_per_s)")  # keys of which more helps
BINARY = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class SweptAxis:
    """A numeric setting as an axis: its key, what it is, its unit, and that unit's size."""

    key: str
    name: str
    unit: str
    size: float = 1.0

    @property
    def label(self) -> str:
        """The label of the axis."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def is_rate(self) -> bool:
        """Whether it is the load."""
        return self.key in RATES

    @property
    def is_resource(self) -> bool:
        """Whether more of it can only help: replicas, memory, bandwidth."""
        return RESOURCES.match(self.key) is not None

    def text(self, value: float) -> str:
        """A value with its unit, such as 24 GiB."""
        return f"{value / self.size:.4g} {self.unit}".rstrip()

    def said(self, value: float) -> str:
        """A value in a sentence: `at 4 requests/s`, `with replicas=4`."""
        if self.is_rate:
            return f"at {self.text(value)}"
        return f"with {self.key}={self.text(value)}"


def axis_of(key: str, largest: float) -> SweptAxis:
    """The setting with a unit that suits its largest value."""
    name, unit = NAMES.get(key, (key, _unit_by_end(key)))
    size, prefix = 1.0, unit
    if unit == "B":
        size, prefix = next((step for step in BINARY if largest >= step[0]), (1.0, "bytes"))
    elif unit in ("B/s", "FLOP/s"):
        size, head = next((step for step in DECIMAL if largest >= step[0]), (1.0, ""))
        prefix = f"{head}{unit}"
    return SweptAxis(key, name, prefix, size)


def _unit_by_end(key: str) -> str:
    """The unit that the end of a key tells; counts and shares have none."""
    rate = PER.search(key)
    if rate is not None and rate[0].lstrip("._") not in ("bytes_per_s", "flops_per_s"):
        return f"{rate[1]}/{rate[2]}"
    return next((unit for end, unit in UNITS if key.endswith(end)), "")


def key_of(override: str) -> str:
    """The key of an override, without Hydra's marks: `arrival.rate` of `+arrival.rate=8`."""
    return override.lstrip("+~").partition("=")[0]


def varied(points: Iterable[Sequence[str]]) -> list[str]:
    """Keys of overrides that differ between points, in the order of their appearance."""
    words = [list(own) for own in points]
    common = set.intersection(*map(set, words)) if words else set()
    return list(dict.fromkeys(key_of(text) for own in words for text in own if text not in common))


@dataclass(frozen=True)
class BestPoint:
    """The best mean of a metric over replicates, and its point with the number of those equal."""

    metric: str
    value: float
    point: str


def best_points(runs: Iterable[tuple[str, Mapping[str, object]]]) -> list[BestPoint]:
    """The best point of each metric that ranks points.

    Args:
        runs: the name of a run's point, equal for its replicates, and its metrics.
    """
    known = list(runs)
    rows = []
    for metric, is_more_better in BEST.items():
        values: dict[str, list[float]] = {}
        for point, metrics in known:
            if (value := number(metrics.get(metric))) is not None:
                values.setdefault(point, []).append(value)
        if means := {point: fmean(own) for point, own in values.items()}:
            point = (max if is_more_better else min)(means, key=lambda name: means[name])
            best = means[point]
            rows.append(BestPoint(metric, best, point + ties(means.values(), best)))
    return rows


def along_x(values: Mapping[str, Sequence[float]]) -> str | None:
    """The key to draw along x: that with most values, a rate before others of as many.

    Args:
        values: numbers of each varied numeric key.

    Returns:
        The key; None where none has two values.
    """
    counts = {key: len(set(found)) for key, found in values.items() if key not in REPLICATES}
    apart = [key for key, count in counts.items() if count > 1]
    return max(apart, key=lambda key: (counts[key], key in RATES), default=None)


def number(value: object) -> float | None:
    """A setting's value as a number; None for text, switches and what is not a number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if found == found else None
