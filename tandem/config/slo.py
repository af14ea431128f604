"""The config nodes `slo`, `tenants` and `decoding`: classes, shares, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from models.spec import ModelSpec
from tandem.config.check import conform, did_you_mean


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


BY_CLASS = ("priority", "deadline_s", "mean_tokens")  # mappings in `scheduling`, at any depth


def limits_of(slo: Mapping[str, Any]) -> dict[str, Any]:
    """The limits, in seconds, and those of `classes` where they differ. ValueError if unknown."""
    plain = {key: value for key, value in slo.items() if key not in ("shares", "classes")}
    limits = {key: limit for key, limit in _checked(plain, "slo").items() if limit is not None}
    classes = _named(slo, "classes")
    if not classes:
        return limits
    own = {name: _checked(_mapping(node, name), f"slo.classes.{name}") for name, node in classes}
    return {**limits, "classes": own}


def shares_of(slo: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the classes that requests are drawn into; empty: as the trace says."""
    return {name: conform(x, float, f"slo.shares.{name}") for name, x in _named(slo, "shares")}


def tenant_shares_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the tenants that requests are drawn into; empty: as the trace says."""
    node = config.get("tenants") or {}  # earlier versions' runs have none
    if wrong := [key for key in node if key != "shares"]:
        raise ValueError(f"tenants.{wrong[0]}: no such setting{did_you_mean(wrong[0], ['shares'])}")
    named = _named(node, "shares", "tenants")
    return {name: conform(x, float, f"tenants.shares.{name}") for name, x in named}


def check_classes(config: Mapping[str, Any], traced: Collection[str]) -> None:
    """ValueError where the scheduling goes by an SLO class that no request can have.

    `traced` are those of the whole trace, whatever the run takes of it; shares replace them.
    """
    slo = config["slo"]
    known = {*(shares_of(slo) or traced), *(name for name, _ in _named(slo, "classes"))} - {""}
    there = (
        f"there are {', '.join(sorted(known))}" if known else "there is none: slo.shares draws them"
    )
    for where, name in _gone_by(config.get("scheduling") or {}, "scheduling"):
        if name not in known:
            raise ValueError(f"{where}.{name}: the trace and slo have no such class; {there}")


def _gone_by(node: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """The classes that settings are given for, each with the setting."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            inner = f"{where}.{key}"
            yield from (
                ((inner, str(n)) for n in value) if key in BY_CLASS else _gone_by(value, inner)
            )


def _named(node: Mapping[str, Any], key: str, where: str = "slo") -> list[tuple[str, Any]]:
    found = conform(node.get(key), Mapping[str, Any] | None, f"{where}.{key}")
    return [(str(name), value) for name, value in (found or {}).items()]


def _mapping(node: Any, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = conform(node, Mapping[str, Any], f"slo.classes.{name}")
    return found


def _checked(node: Mapping[str, Any], where: str) -> dict[str, float | None]:
    from analysis.metric_names import SLO_KEYS

    limits = {key: conform(value, float | None, f"{where}.{key}") for key, value in node.items()}
    for key, limit in limits.items():
        if key not in SLO_KEYS:
            raise ValueError(f"{where}.{key}: no such limit{did_you_mean(key, SLO_KEYS)}")
        if limit is not None and not limit > 0:
            raise ValueError(
                f"{where}.{key}={limit}: it must be above 0 seconds, or null for no limit"
            )
    return limits
