"""Where the time of training goes: parts that add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.run import Run

WORKS = ("forward", "again", "backward", "update")
WAITING = "waiting"  # nothing is computed: copies or collectives are on their way, or plans made
TIMES = (*WORKS, "mixed", "serving", WAITING)
SERVED = {"serve": "serving"}  # what the table calls it


def time_shares(run: Run) -> dict[str, float]:
    """Shares of the time from the first issue to the last end of training, by TIMES; their sum is
    one.

    What the compute lane does counts as that. While it rests, what the host updates is `update`:
    its updates beside the device take no time of a step.
    """
    start, end = run.training["start_ns"].min(), run.training["end_ns"].max()
    rows = run.steps[run.steps["lane"].isin(("compute", "cpu"))]
    rows = rows[rows["end_ns"].gt(start) & rows["start_ns"].lt(end)]
    rows = rows.assign(**{name: rows[name].clip(start, end) for name in ("start_ns", "end_ns")})
    device = rows[rows["lane"].eq("compute")]
    busy_ns = alone_ns(device).groupby(device["work"]).sum()
    parts_ns = {SERVED.get(str(work), str(work)): float(ns) for work, ns in busy_ns.items()}
    host_ns = float(alone_ns(rows).sum() - alone_ns(device).sum())
    parts_ns["update"] = parts_ns.get("update", 0.0) + host_ns
    parts_ns[WAITING] = float(end - start) - sum(parts_ns.values())
    return {part: parts_ns[part] / float(end - start) for part in TIMES if parts_ns.get(part)}


def alone_ns(rows: pd.DataFrame) -> pd.Series:
    """Per operation, how long it ran behind all that began before it: a device's clock may let one
    begin a little before the other's end."""
    rows = rows.sort_values("start_ns")
    starts, ends = rows["start_ns"].to_numpy(float), rows["end_ns"].to_numpy(float)
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
    return pd.Series(np.maximum(ends - np.maximum(starts, reached), 0.0), index=rows.index)


def shares_in(metrics: Mapping[str, float | int | str]) -> dict[str, float]:
    """The same from the figures of a run; nothing where it trained nothing."""
    names = {part: f"train_{part}_share" for part in TIMES}
    return {part: float(metrics[name]) for part, name in names.items() if name in metrics}


def percents(shares: Mapping[str, float], decimals: int = 0) -> dict[str, str]:
    """Shares as text, such as 27 %, rounded so that they still add up: what is left goes to those
    that lost most."""
    units = {part: share * 10 ** (2 + decimals) for part, share in shares.items()}
    whole = {part: int(value) for part, value in units.items()}
    left = round(sum(units.values())) - sum(whole.values())
    for part in sorted(units, key=lambda part: whole[part] - units[part])[:left]:
        whole[part] += 1
    return {part: f"{value / 10**decimals:.{decimals}f}" for part, value in whole.items()}
