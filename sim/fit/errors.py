"""Errors of a cost model over recorded steps, by class of shapes and by table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pandas as pd

from engine.contract.regions import Work
from sim.cost.contract import ShapeCost
from sim.cost.tables import TableCost
from sim.cost.training_launch import Trained
from sim.fit.fit_tables import terms
from sim.fit.recorded_shapes import Copied, Launched, Observed, Planned, Shape, Windowed, observed

ALL = "all launches"  # the class that sums all launches up
OPERATOR = "operator "  # before the name of a table, where errors are listed by table


def errors(cost: ShapeCost, *tables: Any) -> pd.DataFrame:
    """Errors of a cost model over recorded steps: a row per class of shapes, and all launches.

    Args:
        cost: the cost model.
        tables: a STEPS table per run (Arrow or pandas).

    Returns:
        Columns rows, mape, p90 (of the absolute error), bias (mean signed error) and total (of the
        sum), all relative to the measurement.
    """
    return errors_of(cost, chain.from_iterable(map(observed, tables)))


def errors_of(cost: ShapeCost, found: Iterable[Observed]) -> pd.DataFrame:
    """Errors of a cost model over shapes with durations, see `errors`."""
    frame = _frame((shape.group, _predict(cost, shape), ns) for shape, ns in found)
    launches = frame[~frame["class"].str.match("copy|host")].assign(**{"class": ALL})
    return _summary(pd.concat([frame, launches]))


def operator_errors(cost: TableCost, found: Iterable[Observed]) -> pd.DataFrame:
    """Errors with one row per table of a cost model, over the shapes that the table dominates.

    An operator is never timed alone, so its error is that of whole launches which are mostly its
    own. A table that dominates no shape has 0 rows and NaN for errors.
    """
    ruled = ((ruling(cost, shape), _predict(cost, shape), ns) for shape, ns in found)
    table = _summary(_frame((OPERATOR + name, *times) for name, *times in ruled if name))
    table = table.reindex(pd.Index([OPERATOR + name for name in cost.tables], name="class"))
    return table.assign(rows=table["rows"].fillna(0).astype(int))


def ruling(cost: TableCost, shape: Shape) -> str | None:
    """The table that makes up half or more of a shape's predicted time.

    None without one, and for a shape that is priced by a table of a similar kind of work.
    """
    shares: dict[str, float] = defaultdict(float)
    for name, point in terms(shape):
        if name in cost.tables:
            shares[name] += cost.tables[name].value(point)
    name, ns = max(shares.items(), key=lambda share: share[1], default=("", 0.0))
    return name if 2 * ns >= sum(shares.values()) > 0 else None


def _predict(cost: ShapeCost, shape: Shape) -> int:
    if isinstance(shape, Planned):
        return cost.plan_ns(*shape)
    if isinstance(shape, Copied):
        return cost.transfer_ns(*shape)
    if isinstance(shape, Trained):
        return cost.trained_ns(shape)
    if isinstance(shape, Windowed):
        launched, window = shape
        if window.work == Work.BACKWARD:
            return cost.back_ns(window)
        samples = launched.samples + window.labels
        return _served(cost, launched._replace(samples=samples)) + cost.extra_ns(window)
    return _served(cost, shape)


def _served(cost: ShapeCost, shape: Launched) -> int:
    tokens, contexts = [n for n, _ in shape.slices], [context for _, context in shape.slices]
    adapters_ns = sum([cost.through_ns(rows) for rows in shape.adapters])
    recorded_ns = sum([cost.extra_ns(window) for window in shape.recorded])
    return cost.shape_ns(tokens, contexts, shape.samples) + adapters_ns + recorded_ns


def _frame(judged: Iterable[tuple[Any, ...]]) -> pd.DataFrame:
    frame = pd.DataFrame(judged, columns=["class", "predicted", "measured"])
    frame = frame[frame["measured"] > 0]
    return frame.assign(error=frame["predicted"] / frame["measured"] - 1.0)


def _summary(frame: pd.DataFrame) -> pd.DataFrame:
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
