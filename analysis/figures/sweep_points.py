"""The runs of a sweep as points of figures: series, x, and replicates put together."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from analysis.swept import RATES, REPLICATES, SweptAxis, along_x, axis_of, key_of, number, varied

HALVES = ("scheduling", "memory")  # whose classes name a policy that has no name
KEYS = ["policy", "series", "setting", "x"]


def points_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs with `series`, `setting` and `x`.

    `setting` is the key of the numeric setting that varies (that with most values, if several do),
    "" without any; `x` is its value, NaN where a run has none. A series is the policy with all
    other overrides that vary, but replicates. The choice of a half of the policy stands in the
    place of its class.
    """
    done = runs[runs["status"].eq("ok")].copy()
    overrides = [list(json.loads(text)) for text in done["overrides"]]
    keys = varied(overrides)
    numbers = {key: _numbers(done, key) for key in dict.fromkeys([*RATES, *keys])}
    setting = along_x({key: list(found.dropna()) for key, found in numbers.items()})
    apart = {*keys} - {"policy", *REPLICATES, *RATES, setting}
    apart |= {key for key in RATES if key != setting and numbers[key].nunique() > 1}
    done["series"] = [
        _series(policy, [text for text in own if key_of(text) in apart])
        for policy, own in zip(done["policy"], overrides, strict=True)
    ]
    done["setting"] = setting or ""
    done["x"] = numbers[setting] if setting else float("nan")
    return done.sort_values(["series", "x"], kind="stable")


def _series(policy: str, apart: Sequence[str]) -> str:
    """`ChunkedPrefill+paged_swap depth=2` of `ChunkedPrefill+PagedSwap`: see `points_of`."""
    halves = policy.split("+")
    chosen = {key_of(text): text.partition("=")[2] for text in apart}
    if len(halves) == len(HALVES):
        policy = "+".join(chosen.pop(key, half) for key, half in zip(HALVES, halves, strict=True))
    return " ".join([policy, *(text.lstrip("+~") for text in apart if key_of(text) in chosen)])


def axis_in(points: pd.DataFrame) -> SweptAxis | None:
    """The setting along x, of points or of a frame made of them; None without one."""
    if not len(points) or not points["x"].notna().any():
        return None
    return axis_of(str(points["setting"].iloc[0]), float(points["x"].abs().max()))


def by_x(points: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Mean, low and high over replicates: metric, policy, series, setting, x, runs, ..."""
    rows = points.dropna(subset=[metric]) if metric in points else points[:0].assign(**{metric: 0})
    grouped = rows.groupby(KEYS, dropna=False)[metric]
    out = grouped.agg(runs="count", mean="mean", low="min", high="max").reset_index()
    out.insert(0, "metric", metric)
    return out


def capacity(points: pd.DataFrame, share: float) -> dict[str, float]:
    """Per series the last value of the setting up to which the SLO is attained in that share.

    Of a rate the highest, such that it and all lower ones attain it; of a resource the least, such
    that it and all larger ones do; NaN where there is none.
    """
    axis = axis_in(points)
    is_least = axis is not None and axis.is_resource
    found: dict[str, float] = {}
    for series, part in by_x(points, "slo_attainment").groupby("series"):
        ordered = part.dropna(subset=["x"]).sort_values("x", ascending=not is_least)
        kept = ordered["x"][ordered["mean"].cummin().ge(share)]
        found[str(series)] = float(kept.iloc[-1]) if len(kept) else float("nan")
    return found


def frontier(points: pd.DataFrame, gain: str, price: str) -> pd.DataFrame:
    """Points with columns policy, series, setting, x, gain, price, price_metric, is_best.

    `is_best` marks the Pareto frontier: no other point has at least the gain (more is better) and
    at most the price.
    """
    rows = points.dropna(subset=[gain, price]) if {gain, price} <= set(points) else points[:0]
    names = [name for name in (gain, price) if name in rows]
    out = rows.groupby(KEYS, dropna=False)[names].mean().reset_index()
    out = out.rename(columns={gain: "gain", price: "price"}).assign(price_metric=price)
    if not len(out):
        return out.assign(is_best=False)
    out = out.sort_values(["gain", "price"], ascending=[False, True], kind="stable")
    cheapest = out["price"].cummin().shift(fill_value=float("inf"))
    return out.assign(is_best=out["price"] < cheapest)


def _numbers(runs: pd.DataFrame, key: str) -> pd.Series:
    """The values of a setting; NaN for runs without a number, all NaN where some value is text."""
    if (column := f"config.{key}") not in runs:
        return pd.Series(float("nan"), runs.index)
    known = runs[column].dropna()
    found = [number(value) for value in known]
    if None in found:
        return pd.Series(float("nan"), runs.index)
    return pd.Series(found, known.index, dtype=float).reindex(runs.index)
