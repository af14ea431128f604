"""Cells and tables of a page: text, numbers to sort by and marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.units import amount, scale_of

KEPT = ("slo_attainment", "goodput")


@dataclass(frozen=True)
class Cell:
    """Text of a cell; `sort` is the number behind it, `mark` a verdict."""

    text: str
    sort: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class HtmlTable:
    """A table of a page, with a heading and a note on how to read it."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_unbroken: bool = False  # names and numbers keep to a line, words to a piece


def amount_cells(values: Sequence[Any], unit: str) -> list[Cell]:
    """Numbers that are read together, in one unit."""
    scale = scale_of(map(float, values), unit)
    return [Cell(scale.text(float(value)), float(value)) for value in values]


def amount_cell(value: Any, unit: str) -> Cell:
    """A number with a unit that suits its size."""
    return Cell(amount(float(value), unit), float(value))


def kept_cell(metric: str, value: float) -> Cell:
    """The attainment of an SLO, or its goodput."""
    if value != value:
        return Cell("n/a", 0.0)
    is_share = metric == "slo_attainment"
    return Cell(f"{100 * value:.1f} %" if is_share else amount(value, "req/s"), value)
