"""The config node `slo`: limits, of all requests or of a class, and the classes there are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tandem.conform import conform, did_you_mean

BY_CLASS = ("priority", "deadline_s", "mean_tokens")  # mappings in `scheduling`, at any depth


def limits_of(slo: Mapping[str, Any]) -> dict[str, Any]:
    """The limits, in seconds, and those of `classes` where they differ. ValueError for others."""
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


def _named(slo: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    node = conform(slo.get(key), Mapping[str, Any] | None, f"slo.{key}")
    return [(str(name), value) for name, value in (node or {}).items()]


def _mapping(node: Any, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = conform(node, Mapping[str, Any], f"slo.classes.{name}")
    return found


def _checked(node: Mapping[str, Any], where: str) -> dict[str, float | None]:
    from analysis.classes import SLO_KEYS

    limits = {key: conform(value, float | None, f"{where}.{key}") for key, value in node.items()}
    for key, limit in limits.items():
        if key not in SLO_KEYS:
            raise ValueError(f"{where}.{key}: no such limit{did_you_mean(key, SLO_KEYS)}")
        if limit is not None and not limit > 0:
            raise ValueError(
                f"{where}.{key}={limit}: it must be above 0 seconds, or null for no limit"
            )
    return limits
