"""The runs of a sweep as points of figures: series, rate, and replicates put together."""

from __future__ import annotations

import json

import pandas as pd

REPLICATES = ("seed",)  # keys that repeat a point rather than make another
RATES = ("arrival.rate", "trace.rate")  # of synthetic arrivals; of a stretched recording


def points_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs with `policy`, `series` and `rate` (NaN unless the sweep varies it).

    A series is the policy with all overrides that vary, but rate and replicates.
    """
    done = runs[runs["status"].eq("ok")].copy()
    overrides = [list(json.loads(text)) for text in done["overrides"]]
    varied = _varied(overrides)
    done["series"] = [
        " ".join([policy, *(text for text in own if _key(text) in varied)])
        for policy, own in zip(done["policy"], overrides, strict=True)
    ]
    rates = pd.Series(float("nan"), done.index)
    for name in RATES:
        if (column := f"config.{name}") in done:
            rates = rates.fillna(pd.to_numeric(done[column]))
    done["rate"] = rates if rates.nunique() > 1 else float("nan")
    return done.sort_values(["series", "rate"], kind="stable")


def by_rate(points: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Mean, low and high over replicates: columns metric, policy, series, rate, runs, ..."""
    keys = ["policy", "series", "rate"]
    rows = points.dropna(subset=[metric]) if metric in points else points[:0].assign(**{metric: 0})
    grouped = rows.groupby(keys, dropna=False)[metric]
    out = grouped.agg(runs="count", mean="mean", low="min", high="max").reset_index()
    out.insert(0, "metric", metric)
    return out


def capacity(points: pd.DataFrame, share: float) -> dict[str, float]:
    """Per series the highest rate such that it and all lower ones attain the SLO in that share."""
    found: dict[str, float] = {}
    for series, part in by_rate(points, "slo_attainment").groupby("series"):
        ordered = part.sort_values("rate")
        kept = ordered["rate"][ordered["mean"].cummin().ge(share)]
        found[str(series)] = float(kept.max()) if len(kept) else float("nan")
    return found


def frontier(points: pd.DataFrame, gain: str, price: str) -> pd.DataFrame:
    """Points with columns policy, series, rate, gain, price, price_metric, is_best.

    `is_best` marks the Pareto frontier: no other point has at least the gain (more is better) and
    at most the price.
    """
    rows = points.dropna(subset=[gain, price]) if {gain, price} <= set(points) else points[:0]
    keys = ["policy", "series", "rate"]
    names = [name for name in (gain, price) if name in rows]
    out = rows.groupby(keys, dropna=False)[names].mean().reset_index()
    out = out.rename(columns={gain: "gain", price: "price"}).assign(price_metric=price)
    if not len(out):
        return out.assign(is_best=False)
    out = out.sort_values(["gain", "price"], ascending=[False, True], kind="stable")
    cheapest = out["price"].cummin().shift(fill_value=float("inf"))
    return out.assign(is_best=out["price"] < cheapest)


def _varied(overrides: list[list[str]]) -> set[str]:
    """Keys of overrides that differ between runs, but policy, rate and replicates."""
    apart = {"policy", *REPLICATES, *RATES}
    common = set.intersection(*map(set, overrides)) if overrides else set()
    return {_key(text) for own in overrides for text in own if text not in common} - apart


def _key(override: str) -> str:
    return override.partition("=")[0]
