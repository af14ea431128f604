"""Distribution of work over the replicas of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from analysis.run import RunFacts
from analysis.usage import PoolUse, kv_usages, lane_shares, pool_uses

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, float | int]
SUMMED = ("prompt_tokens", "output_tokens", "restarts")


def replicas(run: RunFacts) -> pd.DataFrame:
    """One row per replica, see `replica_rows`."""
    import pandas as pd

    return pd.DataFrame(replica_rows(run, pool_uses(run), lane_shares(run)))


def replica_rows(
    run: RunFacts, uses: Mapping[tuple[str, int], PoolUse], shares: Mapping[str, float]
) -> list[Row]:
    """A row for each replica: requests routed to it, their tokens, busy share, KV usage.

    Empty for a run with one device. `busy` is the compute lane's share of the run.
    """
    found = [device for tier, device in uses if tier == "gpu"]
    if len(found) < 2:
        return []
    kv, columns = kv_usages(uses), run.columns("requests", ("device", *SUMMED))
    rows = []
    for device in found:
        own = columns["device"] == device
        peak, mean = kv.get(device, (0.0, 0.0))
        row: Row = {"replica": device, "requests": int(own.sum())}
        row |= {name: int(columns[name][own].sum()) for name in SUMMED}
        row |= {"busy": shares.get(f"{device}:compute", 0.0), "peak_kv": peak, "mean_kv": mean}
        rows.append(row)
    return rows


def imbalance(rows: list[Row]) -> dict[str, float | int]:
    """Largest over mean of the replicas' requests and busy time: 1 is even, their number the worst.

    Empty for a run with one device.
    """
    if not rows:
        return {}
    out: dict[str, float | int] = {"replicas": len(rows)}
    for name, key in (("request", "requests"), ("busy", "busy")):
        values = [row[key] for row in rows]
        if (mean := sum(values) / len(values)) > 0:
            out[f"{name}_imbalance"] = float(max(values) / mean)
    return out
