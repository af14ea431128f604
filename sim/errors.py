"""How far a cost model is from recorded steps, by class of shapes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pandas as pd

from engine.model import ModelSpec
from engine.plan import PageSize
from sim.cost import ShapeCost
from sim.fit import fit_observed, terms
from sim.shapes import Copied, Launched, Planned, Shape, observed
from sim.tables import TableCost

ALL = "all launches"  # the class that sums all launches up


def errors(cost: ShapeCost, rows: Any) -> pd.DataFrame:
    """How far a cost model is from recorded steps: one row per class of shapes, and all launches.

    Columns: rows, mape, p90 (of the absolute error), bias (mean signed error), total (of the sum),
    all relative to the measurement.
    """
    return _summary((shape.group, _predict(cost, shape), ns) for shape, ns in observed(rows))


def held_out(
    rows: Any, model: ModelSpec, page: PageSize, folds: int = 5, seed: int = 0
) -> pd.DataFrame:
    """The errors of tables fitted without the shapes they are judged on, as `errors`.

    Shapes, not rows, are dealt to the folds, so that no repeat of a judged shape was seen.
    """
    found = observed(rows)
    shapes = list(dict.fromkeys(shape for shape, _ in found))
    random.Random(seed).shuffle(shapes)
    fold = {shape: i % folds for i, shape in enumerate(shapes)}
    judged = []
    for k in range(folds):
        cost = fit_observed([o for o in found if fold[o[0]] != k], model, page, "other folds")
        mine = [o for o in found if fold[o[0]] == k and _is_known(o[0], cost)]
        judged += [(shape.group, _predict(cost, shape), ns) for shape, ns in mine]
    return _summary(judged)


def _is_known(shape: Shape, cost: TableCost) -> bool:
    return isinstance(shape, Launched) or terms(shape)[0][0] in cost.tables


def _predict(cost: ShapeCost, shape: Shape) -> int:
    if isinstance(shape, Planned):
        return cost.plan_ns(shape.items)
    if isinstance(shape, Copied):
        return cost.transfer_ns(*shape)
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
