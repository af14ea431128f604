"""How far a cost model is from recorded steps, by class of shapes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pandas as pd

from sim.cost import ShapeCost
from sim.shapes import Copied, Observed, Planned, Shape, observed
from sim.trained import Trained

ALL = "all launches"  # the class that sums all launches up


def errors(cost: ShapeCost, *tables: Any) -> pd.DataFrame:
    """How far a cost model is from recorded steps: one row per class of shapes, and all launches.

    Each of `tables` is of one run: a STEPS table (Arrow or pandas).

    Columns: rows, mape, p90 (of the absolute error), bias (mean signed error), total (of the sum),
    all relative to the measurement.
    """
    return errors_of(cost, chain.from_iterable(map(observed, tables)))


def errors_of(cost: ShapeCost, found: Iterable[Observed]) -> pd.DataFrame:
    """The same of shapes with durations."""
    return _summary((shape.group, _predict(cost, shape), ns) for shape, ns in found)


def _predict(cost: ShapeCost, shape: Shape) -> int:
    if isinstance(shape, Planned):
        return cost.plan_ns(*shape)
    if isinstance(shape, Copied):
        return cost.transfer_ns(*shape)
    if isinstance(shape, Trained):
        return cost.trained_ns(shape)
    tokens, contexts = [n for n, _ in shape.slices], [context for _, context in shape.slices]
    return cost.shape_ns(tokens, contexts, shape.samples)


def _summary(judged: Iterable[tuple[str, int, int]]) -> pd.DataFrame:
    frame = pd.DataFrame(judged, columns=["class", "predicted", "measured"])
    frame = frame[frame["measured"] > 0]
    launches = frame[~frame["class"].str.match("copy|host")].assign(**{"class": ALL})
    frame = pd.concat([frame, launches])
    frame["error"] = frame["predicted"] / frame["measured"] - 1.0
    groups = frame.groupby("class", sort=True)
    return pd.DataFrame(
        {
            "rows": groups.size(),
            "mape": groups["error"].apply(lambda e: float(e.abs().mean())),
            "p90": groups["error"].apply(lambda e: float(e.abs().quantile(0.9))),
            "bias": groups["error"].mean(),
            "total": groups["predicted"].sum() / groups["measured"].sum() - 1.0,
        }
    )
