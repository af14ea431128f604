"""The config node `slo`: limits, of all requests or of a class, and shares of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.conform import conform, did_you_mean


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
