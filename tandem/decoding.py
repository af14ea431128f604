"""How tokens are chosen, and what ends a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    sampling = config["sampling"]
    return Decoding(
        conform(sampling["temperature"], float, "sampling.temperature"),
        conform(sampling["top_k"], int, "sampling.top_k"),
        conform(sampling["top_p"], float, "sampling.top_p"),
        lengths == "forced",
        eos_ids,
    )
