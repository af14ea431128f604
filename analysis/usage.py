"""Resources of a run: memory by kind, busy lanes and host, and operations by class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.metric_names import KINDS, PARTS
from analysis.run import Run

OVERALL = ("used", "measured", "process")


def pools(run: Run) -> dict[str, pd.DataFrame]:
    """Memory rows per pool, in time order, with `used_bytes`, `held_bytes` and `pending_bytes`.

    Used is capacity - free: held bytes of all kinds, and pending ones.
    """
    used = run.memory["capacity_bytes"] - run.memory["free_bytes"]
    held = run.memory[[f"{kind}_bytes" for kind in KINDS]].sum(axis=1)
    rows = run.memory.assign(used_bytes=used, held_bytes=held, pending_bytes=used - held)
    rows = rows.sort_values("at_ns", kind="stable")
    return {f"{tier}:{device}": part for (tier, device), part in rows.groupby(["tier", "device"])}


def fullest(rows: pd.DataFrame) -> dict[str, int]:
    """Contents of a pool when it is first fullest: `used`, and its PARTS.

    Empty for a pool without used bytes, such as a server's (backend=openai).
    """
    rows = rows[rows["used_bytes"].notna()]
    if rows.empty:
        return {}
    row = rows.iloc[int(rows["used_bytes"].to_numpy().argmax())]
    parts = {part: int(row[f"{part}_bytes"]) for part in PARTS if row[f"{part}_bytes"] > 0}
    return {"used": int(row["used_bytes"]), **parts}


def window_ns(run: Run) -> tuple[float, float]:
    """First arrival and last finish of requests, the drain included as in vLLM; (nan, nan) without
    any."""
    finish = run.requests["finish_ns"].where(run.requests["status"].eq("finished"))
    return float(run.requests["arrival_ns"].min()), float(finish.max())


def working_ns(run: Run) -> tuple[float, float]:
    """The window of means over time: `window_ns`, extended to the first and last training step."""
    first, last = window_ns(run)
    starts = pd.Series([first, run.training["start_ns"].min()], dtype="float64")
    ends = pd.Series([last, run.training["end_ns"].max()], dtype="float64")
    return float(starts.min()), float(ends.max())


def time_mean(at_ns: pd.Series, values: pd.Series, start_ns: float, end_ns: float) -> float:
    """Mean of a step function over a window, from its first known value on.

    Of several values at one time the last holds.
    """
    known = values.notna().to_numpy()
    at = np.clip(at_ns.to_numpy(float)[known], start_ns, end_ns)
    if not len(at):
        return float("nan")
    weights = np.diff(np.append(at, end_ns))
    total = weights.sum()
    held = values.to_numpy(float)[known]
    return float((held * weights).sum() / total) if total > 0 else float(held[-1])


def memory_use(run: Run, kinds: Sequence[str] = (*PARTS, *OVERALL)) -> pd.DataFrame:
    """Bytes per pool and kind: columns pool, kind, peak, mean, fullest.

    `mean` is over time. `fullest` is the kind's bytes when the pool is fullest; those of PARTS add
    up to those of `used`. Kinds that the run never held are left out. `used` is the ledger's sum,
    `measured` the meter's persistent bytes, `process` the operating system's figure.
    """
    start, end = working_ns(run)
    rows = []
    for pool, part in pools(run).items():
        then = fullest(part)
        for kind in kinds:
            values = part[f"{kind}_bytes"]
            if values.notna().any() and values.max() > 0:
                mean = time_mean(part["at_ns"], values, start, end)
                known = 0 if kind in PARTS else None
                rows.append((pool, kind, float(values.max()), mean, then.get(kind, known)))
    columns = ["pool", "kind", "peak", "mean", "fullest"]
    return pd.DataFrame(rows, columns=columns).astype({"fullest": float})


def kv_usage(run: Run) -> dict[str, float]:
    """Share of the KV room in use on the GPU tier: peak and time-weighted mean, over all devices.

    The room is the bytes of KV, free bytes and coming ones. Weights do not count, as in vLLM's
    kv_cache_usage.
    """
    found = [use for device in devices(run) if (use := kv_usage_of(run, device))]
    if not found:
        return {}
    return {
        "peak_kv_usage": max(peak for peak, _ in found),
        "mean_kv_usage": sum(mean for _, mean in found) / len(found),
    }


def devices(run: Run) -> list[int]:
    """The devices of a run: all with memory, used or not."""
    return sorted(int(d) for d in run.memory.loc[run.memory["tier"].eq("gpu"), "device"].unique())


def kv_usage_of(run: Run, device: int) -> tuple[float, float] | None:
    """Peak and mean KV usage of one device; None without a known room."""
    part = pools(run)[f"gpu:{device}"]
    room = part["kv_bytes"] + part["free_bytes"] + part["coming_bytes"]
    share = part["kv_bytes"] / room.where(room > 0)
    mean = time_mean(part["at_ns"], share, *working_ns(run))
    return (float(share.max()), mean) if mean == mean else None


def span_ns(run: Run) -> float:
    """Time from the first issue to the last end: the denominator of shares of lanes and host."""
    if run.steps.empty:
        return 0.0
    return float(run.steps["end_ns"].max() - run.steps["issue_ns"].min())


def lane_shares(run: Run) -> dict[str, float]:
    """Busy share of each lane of each device over the run."""
    total = span_ns(run)
    if not total:
        return {}
    return {
        f"{device}:{lane}": float((part["end_ns"] - part["start_ns"]).sum()) / total
        for (device, lane), part in run.steps.groupby(["device", "lane"])
    }


def host_share(run: Run) -> float:
    """Share of the run that the host spent on deciding, booking and preparing plans."""
    total = span_ns(run)
    return float(run.steps["host_ns"].sum()) / total if total else 0.0


def copied_bytes(run: Run) -> int:
    """Bytes moved between tiers."""
    return int(run.steps.loc[run.steps["lane"].str.contains("->"), "nbytes"].sum())


def operations(run: Run) -> pd.DataFrame:
    """The steps table with `duration_s`, `host_s`, `order` within step and lane, `group`.

    Groups of serving: decode (only), prefill (only), mixed, other (compute without tokens). The
    group of training is its work: forward, again, backward, update. A copy's group is its lane,
    such as gpu->host.
    """
    rows = run.steps.assign(
        duration_s=(run.steps["end_ns"] - run.steps["start_ns"]) / 1e9,
        host_s=run.steps["host_ns"] / 1e9,
        order=run.steps.groupby(["step", "device", "lane"]).cumcount(),
    )
    prefill, decode = rows["prefill_tokens"] > 0, rows["decode_tokens"] > 0
    names = np.select([prefill & decode, prefill, decode], ["mixed", "prefill", "decode"], "other")
    groups = rows["work"].where(rows["part"].notna(), pd.Series(names, rows.index))
    return rows.assign(group=rows["lane"].where(rows["lane"].str.contains("->"), groups))
