"""The table of SLO classes: who kept their limits, and how long they waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.cells import KEPT, Cell, Table, amount_cell, kept_cell
from analysis.classes import OF, classes_in

LATENCIES = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"))
COLUMNS = ("class", "requests", *KEPT, *(f"{stat} {name}" for name, stat in LATENCIES))
NOTE = "Each by the limits of its class; the share is of all its requests."


def class_table(metrics: Mapping[str, Any]) -> Table:
    """A row per class of a run's metrics; without rows where it has none."""
    rows = [class_cells(metrics, name) for name in classes_in(metrics)]
    return Table("SLO classes", NOTE, COLUMNS, rows)


def class_cells(metrics: Mapping[str, Any], name: str) -> list[Cell]:
    """What COLUMNS head, of one class; n/a where it is not known."""
    count, unknown = float(metrics[f"num_requests{OF}{name}"]), float("nan")
    cells = [Cell(name), Cell(f"{count:,.0f}", count)]
    kept = {metric: float(metrics.get(f"{metric}{OF}{name}", unknown)) for metric in KEPT}
    cells += [kept_cell(metric, value) for metric, value in kept.items()]
    known = (f"{stat}_{latency}_s{OF}{name}" for latency, stat in LATENCIES)
    return cells + [amount_cell(metrics.get(key, unknown), "s") for key in known]
