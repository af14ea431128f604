"""Distribution of work over the replicas of a run."""

from __future__ import annotations

import pandas as pd

from analysis.run import Run
from analysis.usage import devices, kv_usage_of, lane_shares


def replicas(run: Run) -> pd.DataFrame:
    """One row per replica: requests routed to it, their tokens, busy share, KV usage.

    Empty for a run with one device. `busy` is the compute lane's share of the run.
    """
    found = devices(run)
    if len(found) < 2:
        return pd.DataFrame()
    shares = lane_shares(run)
    rows = []
    for device in found:
        own = run.requests[run.requests["device"].eq(device)]
        peak, mean = kv_usage_of(run, device) or (0.0, 0.0)
        rows.append(
            {
                "replica": device,
                "requests": len(own),
                "prompt_tokens": int(own["prompt_tokens"].sum()),
                "output_tokens": int(own["output_tokens"].sum()),
                "restarts": int(own["restarts"].sum()),
                "busy": shares.get(f"{device}:compute", 0.0),
                "peak_kv": peak,
                "mean_kv": mean,
            }
        )
    return pd.DataFrame(rows)


def imbalance(run: Run) -> dict[str, float | int]:
    """Largest over mean of the replicas' requests and busy time: 1 is even, their number the worst.

    Empty for a run with one device.
    """
    rows = replicas(run)
    if rows.empty:
        return {}
    out: dict[str, float | int] = {"replicas": len(rows)}
    for name, values in (("request", rows["requests"]), ("busy", rows["busy"])):
        if values.mean() > 0:
            out[f"{name}_imbalance"] = float(values.max() / values.mean())
    return out
