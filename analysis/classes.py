"""Requests by SLO class, tenant and adapter: limits, attainment, latencies, service, loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.columns import Block, Lists, Mask, Named
from analysis.metric_names import FOR, OF, SLO_KEYS
from analysis.run import RunFacts

CUTS = {"p50": 50, "p99": 99}
TO_DEVICE, NO_OWNER = "host->gpu", -1  # the copies of adapters, which no job owns

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


def met(rows: Block, slo: Slo) -> Mask:
    """Whether each request finished within its class's limits, or the general ones without a class.

    `rows` come from `latencies`. A request of one token has a TPOT of 0, as in vLLM.
    """
    kept: Mask = rows["status"].is_("finished")
    named, classes = rows["slo"], slo.get("classes") or {}
    for key in SLO_KEYS:
        limits = [classes.get(name, {}).get(key, slo.get(key)) for name in named.names]
        limits = [np.inf if most is None else float(most) for most in (*limits, slo.get(key))]
        values = np.nan_to_num(rows[key]) if key == "tpot_s" else rows[key]
        kept = kept & (values <= np.array(limits)[named.chosen])  # the last is of no class
    return kept


def attained(rows: Block, kept: Mask, duration_s: float | None) -> dict[str, float]:
    """SLO attainment and goodput in requests per second of each named class."""
    out: dict[str, float] = {}
    for name, is_own in _classes(rows["slo"]):
        part = kept[is_own]
        out[f"slo_attainment{OF}{name}"] = float(part.mean())
        out |= {f"goodput{OF}{name}": float(part.sum()) / duration_s} if duration_s else {}
    return out


def class_figures(rows: Block) -> dict[str, float | int]:
    """The number of requests of each named class, and its latencies in seconds."""
    out: dict[str, float | int] = {}
    for name, is_own in _classes(rows["slo"]):
        out |= _figures(rows, is_own, f"{OF}{name}")
    return out


def tenant_figures(rows: Block) -> dict[str, float | int]:
    """The requests of each named tenant, their tokens, and their latencies in seconds."""
    out: dict[str, float | int] = {}
    for name, is_own in _classes(rows["tenant"]):
        out |= _figures(rows, is_own, f"{FOR}{name}")
        for tokens in ("prompt_tokens", "output_tokens"):
            out[f"{tokens}{FOR}{name}"] = int(rows[tokens][is_own].sum())
    return out


def adapter_figures(run: RunFacts) -> dict[str, float | int]:
    """Copies of adapters to devices, and their bytes; empty for a run without adapters."""
    if not run.keeps("requests", "adapter") or not run.rows("steps"):
        return {}
    loads = nbytes = 0
    for block in run.blocks("steps", ("lane", "nbytes", "jobs")):
        jobs: Lists = block["jobs"]
        owners = np.full(len(jobs.starts) - 1, NO_OWNER + 1)
        some = np.diff(jobs.starts) > 0
        owners[some] = jobs.values[jobs.starts[:-1][some]]
        own = block["lane"].is_(TO_DEVICE) & (owners == NO_OWNER)
        loads, nbytes = loads + int(own.sum()), nbytes + int(block["nbytes"][own].sum())
    return {"adapter_loads": loads, "adapter_loaded_bytes": nbytes}


def service_figures(run: RunFacts) -> dict[str, float | int]:
    """What each named tenant was charged, and its tokens of training; empty where none was."""
    if not run.rows("service"):
        return {}
    names = {"charged": "charged", "forward_tokens": "finetune_tokens"}
    rows, out = run.columns("service", ("tenant", *names)), dict[str, float | int]()
    for tenant, is_own in _classes(rows["tenant"]):
        for column, name in names.items():
            out[f"{name}{FOR}{tenant}"] = float(rows[column][is_own].sum())
    return out


def _figures(rows: Block, is_own: Mask, suffix: str) -> dict[str, float | int]:
    """The number of some requests, and their latencies in seconds."""
    out: dict[str, float | int] = {f"num_requests{suffix}": int(is_own.sum())}
    for latency_s in SLO_KEYS:
        values: NDArray[np.float64] = rows[latency_s][is_own]
        values = values[~np.isnan(values)]
        if len(values):
            out[f"mean_{latency_s}{suffix}"] = float(values.mean())
            cuts = {stat: float(np.percentile(values, cut)) for stat, cut in CUTS.items()}
            out |= {f"{stat}_{latency_s}{suffix}": value for stat, value in cuts.items()}
    return out


def _classes(named: Named) -> list[tuple[str, Mask]]:
    """The classes or tenants that requests name, sorted, and whose requests are theirs."""
    return [(name, named.is_(name)) for name in sorted({*named.names} - {""})]
