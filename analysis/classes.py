"""Requests by SLO class: limits, attainment and latencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.metric_names import OF, SLO_KEYS

CUTS = {"p50": 0.5, "p99": 0.99}

Slo = Mapping[str, Any]  # limits in seconds by SLO_KEYS; `classes`: such limits by class


def limits_in(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The limits of a run's configuration; None without any."""
    slo = config.get("slo") or {}
    limits = {key: slo[key] for key in (*SLO_KEYS, "classes") if slo.get(key) is not None}
    return limits if has_limits(limits) else None


def has_limits(slo: Slo | None) -> bool:
    """Whether any class has any limit. ValueError for an unknown one."""
    plain = {key: limit for key, limit in (slo or {}).items() if key != "classes"}
    for limits in (own := [plain, *((slo or {}).get("classes") or {}).values()]):
        if wrong := [key for key in limits if key not in SLO_KEYS]:
            raise ValueError(f"unknown SLO {wrong[0]!r}: known are {', '.join(SLO_KEYS)}")
    return any(limit is not None for limits in own for limit in limits.values())


def met(rows: pd.DataFrame, slo: Slo) -> pd.Series:
    """Whether each request finished within its class's limits, or the general ones without a class.

    `rows` come from `per_request`. A request of one token has a TPOT of 0, as in vLLM.
    """
    kept = rows["status"].eq("finished")
    classes = slo.get("classes") or {}
    for key in SLO_KEYS:
        limit = {name: own.get(key, slo.get(key)) for name, own in classes.items()}
        limits = [limit.get(name, slo.get(key)) for name in rows["slo"]]
        most = pd.Series(limits, index=rows.index, dtype="float64").fillna(float("inf"))
        values = rows[key].fillna(0.0) if key == "tpot_s" else rows[key]
        kept &= values <= most
    return kept


def attained(rows: pd.DataFrame, kept: pd.Series, duration_s: float | None) -> dict[str, float]:
    """SLO attainment and goodput in requests per second of each named class."""
    out: dict[str, float] = {}
    for name in _named(rows):
        part = kept[rows["slo"].eq(name)]
        out[f"slo_attainment{OF}{name}"] = float(part.mean())
        out |= {f"goodput{OF}{name}": float(part.sum()) / duration_s} if duration_s else {}
    return out


def class_figures(rows: pd.DataFrame) -> dict[str, float | int]:
    """The number of requests of each named class, and its latencies in seconds."""
    out: dict[str, float | int] = {}
    for name in _named(rows):
        part = rows[rows["slo"].eq(name)]
        out[f"num_requests{OF}{name}"] = len(part)
        for latency_s in SLO_KEYS:
            values = part[latency_s].dropna()
            if len(values):
                out[f"mean_{latency_s}{OF}{name}"] = float(values.mean())
                cuts = {stat: float(values.quantile(cut)) for stat, cut in CUTS.items()}
                out |= {f"{stat}_{latency_s}{OF}{name}": value for stat, value in cuts.items()}
    return out


def _named(rows: pd.DataFrame) -> list[str]:
    """The classes that requests name, sorted."""
    return sorted({str(name) for name in rows["slo"]} - {""})
