"""The runs of a sweep as points of figures: series, rate, and replicates put together."""

from __future__ import annotations

import json

import pandas as pd

REPLICATES = ("seed",)  # keys that repeat a point rather than make another
RATES = ("arrival.rate", "trace.rate")  # of made-up arrivals; of a recording that is stretched


def points_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs with `policy`, `series` and `rate` (NaN where no rate is swept).

    A series is the policy with whatever else the sweep changes, besides rate and replicates.
    """
    done = runs[runs["status"].eq("ok")].copy()
    words = [list(json.loads(text)) for text in done["overrides"]]
    varied = _varied(words)
    done["series"] = [
        " ".join([policy, *(w for w in own if _key(w) in varied)])
        for policy, own in zip(done["policy"], words, strict=True)
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
    """Per series the highest rate up to which every rate tried attains the SLO in that share."""
    found: dict[str, float] = {}
    for series, part in by_rate(points, "slo_attainment").groupby("series"):
        ordered = part.sort_values("rate")
        kept = ordered["rate"][ordered["mean"].cummin().ge(share)]
        found[str(series)] = float(kept.max()) if len(kept) else float("nan")
    return found


def frontier(points: pd.DataFrame, gain: str, price: str) -> pd.DataFrame:
    """Columns policy, series, rate, gain, price, price_metric, is_best: points that none beats.

    One beats another if it has at least the gain (more is better) and at most the price.
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


def _varied(words: list[list[str]]) -> set[str]:
    """Keys of overrides that differ between runs, besides policy, rate and replicates."""
    apart = {"policy", *REPLICATES, *RATES}
    everywhere = set.intersection(*map(set, words)) if words else set()
    return {_key(w) for own in words for w in own if w not in everywhere} - apart


def _key(word: str) -> str:
    return word.partition("=")[0]
