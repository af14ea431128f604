"""How tokens are chosen, and what ends a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from engine.model import ModelSpec
from tandem.conform import conform


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen and what ends a request: the trace's length, or a sampled end."""

    temperature: float
    top_k: int
    top_p: float
    forced: bool
    eos_ids: tuple[int, ...]


def decoding_of(config: Mapping[str, Any], spec: ModelSpec) -> Decoding:
    """ValueError where ends of sequence cannot end a request."""
    lengths = conform(config["lengths"], str, "lengths")
    if lengths not in ("forced", "sampled"):
        raise ValueError(f"lengths={lengths}: it is forced or sampled")
    eos_ids = tuple(conform(config["eos_ids"], list[int], "eos_ids"))
    if lengths == "sampled" and not eos_ids:
        raise ValueError("lengths=sampled: name the ends of sequence with eos_ids=[...]")
    if wrong := [i for i in eos_ids if not 0 <= i < spec.vocab_size]:
        raise ValueError(f"eos_ids: {wrong[0]} is no token of {spec.name} ({spec.vocab_size} ids)")
    return Decoding(*_sampling(config["sampling"]), lengths == "forced", eos_ids)


def _sampling(node: Mapping[str, Any]) -> tuple[float, int, float]:
    """Temperature, top_k and top_p. A simulation draws nothing, but would not be measurable."""
    temperature = conform(node["temperature"], float, "sampling.temperature")
    top_k = conform(node["top_k"], int, "sampling.top_k")
    top_p = conform(node["top_p"], float, "sampling.top_p")
    for name, value in (("temperature", temperature), ("top_k", top_k)):
        if not 0 <= value < inf:
            raise ValueError(f"sampling.{name}={value}: it must be at least 0, and finite")
    if not 0 < top_p <= 1:
        raise ValueError(f"sampling.top_p={top_p}: it must be above 0 and at most 1")
    return temperature, top_k, top_p
