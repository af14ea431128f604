"""A server's gauges from the text of its /metrics, under one name for all servers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

# field of Gauges -> names in vLLM (v1, v0) and SGLang
NAMES = {
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
MAX_COUNT = 2**40  # of anything; more is no count
LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*+)"')
CACHE = "vllm:cache_config_info"  # its labels hold the number of blocks and their tokens


@dataclass(frozen=True)
class Gauges:
    """A server's gauges at one time; None where it gives no such gauge.

    `kv_usage` is a share of 1, the mean over engines; counts are sums over engines.
    """

    at_ns: int
    kv_usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    kv_blocks: int | None = None
    block_tokens: int | None = None


def read_gauges(text: str, at_ns: int) -> Gauges:
    """The gauges in a Prometheus text; lines of other metrics are passed over."""
    values: dict[str, list[float]] = {}
    labels: dict[str, str] = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            name, inside, value = found.groups()
            values.setdefault(name, []).append(_number(value))
            if name == CACHE and inside:
                labels = dict(LABEL.findall(inside))
    said = {field: _first(values, names) for field, names in NAMES.items()}
    usage = said.pop("kv_usage")
    counts: dict[str, Any] = {name: _count(values) for name, values in said.items()}
    return Gauges(
        at_ns,
        _share(usage),
        **counts,
        kv_blocks=_whole(labels.get("num_gpu_blocks")),
        block_tokens=_whole(labels.get("block_size")),
    )


def _first(values: dict[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    return next((values[name] for name in names if name in values), None)


def _number(text: str) -> float:
    number = float(text)
    return number if number == number else 0.0


def _share(values: list[float] | None) -> float | None:
    """The mean of values; None where it is no share of 1."""
    mean = math.nan if values is None else sum(values) / len(values)
    return mean if 0 <= mean <= 1 else None


def _count(values: list[float] | None) -> int | None:
    """The sum of values; None where it is no count."""
    total = math.nan if values is None else sum(values)
    return round(total) if 0 <= total <= MAX_COUNT else None


def _whole(text: str | None) -> int | None:
    is_count = text is not None and re.fullmatch(r"\d{1,9}", text, re.ASCII)
    return int(text) if text is not None and is_count else None
