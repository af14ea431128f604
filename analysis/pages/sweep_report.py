"""The report of a sweep: the best points, every point, and figures with their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import verdicts
from analysis.figures.experiments.drawn import training_figures
from analysis.figures.run_figures import Shown
from analysis.figures.sweep_plots import drawn
from analysis.figures.sweep_points import capacity, points_of
from analysis.metric_names import BEST, classes_in, ties
from analysis.pages.cells import KEPT, Cell, HtmlTable, kept_cell
from analysis.pages.report import Facts, write_page, written
from analysis.pages.tables import CLASS_COLUMNS, NOTE, class_cells

SHARES = (0.9, 0.99)
MOST = (("goodput", "req/s"), ("request_throughput", "req/s"), ("train_tokens_per_s", "tok/s"))


def write_sweep_report(
    runs: pd.DataFrame, folder: Path, name: str, command: str, root: Path
) -> Path:
    """Writes report.html, points.csv and figures/ from the table of `tandem collect`.

    Args:
        runs: the table, a row per run.
        folder: a new folder, or one with an earlier report, which is replaced.
        name: name of the sweep.
        command: command that writes this page again.
        root: folder of the runs.

    Returns:
        The path of the page.

    Raises:
        ValueError: no run has finished.
    """
    points = points_of(runs)
    if not len(points):
        raise ValueError(f"{name}: none of its {len(runs)} runs has finished; run them again")

    def fill(aside: Path) -> None:
        figures = _figures(runs, points, root, aside / "figures")
        points.to_csv(aside / "points.csv", index=False)
        found = [_best(points), _capacity(points), _points(points), _classes(points)]
        found.append(_failed(runs))
        page = {
            "title": f"sweep {name}",
            "headline": headline(runs, points),
            "tables": [table for table in found if table.rows],
            "command": command,
        }
        write_page(aside, page, figures, {"sweep": _facts(points)})

    return written(folder, fill)


def _figures(runs: pd.DataFrame, points: pd.DataFrame, root: Path, folder: Path) -> list[Shown]:
    """Figures of serving; without serving, those of the training experiment."""
    if "train_steps" in points and "request_throughput" not in points:
        return training_figures(runs, root, folder)
    return drawn(points, folder)


def headline(runs: pd.DataFrame, points: pd.DataFrame) -> str:
    """The number of runs and commits, and the point with the most goodput (or throughput)."""
    metric, unit = next((pair for pair in MOST if pair[0] in points), MOST[-1])
    text = f"{len(points)} of {len(runs)} runs finished."
    if "made.commit" in points and (commits := points["made.commit"].nunique()) > 1:
        text += f" They were made by {commits} commits."
    best = _extreme(points, metric, True)
    if best is None:
        return text
    value, label = best
    return f"{text} Most {metric.replace('_', ' ')}: {verdicts.amount(value, unit)}, {label}."


def _extreme(points: pd.DataFrame, metric: str, is_more_better: bool) -> tuple[float, str] | None:
    """The best value of a metric and its point; None without any value."""
    if metric not in points:
        return None
    known = points.dropna(subset=[metric]).to_dict("records")
    rows = {float(row[metric]): row for row in reversed(known)}  # of equal ones the first
    if not rows:
        return None
    value = max(rows) if is_more_better else min(rows)
    label = _label({str(key): cell for key, cell in rows[value].items()})
    return value, label + ties([float(row[metric]) for row in known], value)


def _best(points: pd.DataFrame) -> HtmlTable:
    rows = []
    for metric, is_more_better in BEST.items():
        if best := _extreme(points, metric, is_more_better):
            value, label = best
            rows.append([Cell(metric), _cell(metric, value), Cell(label)])
    return HtmlTable("Best of each metric", "", ["metric", "value", "point"], rows)


def _capacity(points: pd.DataFrame) -> HtmlTable:
    if "slo_attainment" not in points or points["rate"].isna().all():
        return HtmlTable("Capacity", "", [], [])
    by_share = [capacity(points, share) for share in SHARES]
    rows = [[Cell(series), *(_rate(found[series]) for found in by_share)] for series in by_share[0]]
    note = "The highest rate tried at which, as at all lower ones, that share met the SLO."
    return HtmlTable("Capacity", note, ["series", *(f"at {s:.0%}" for s in SHARES)], rows)


def _rate(value: float) -> Cell:
    return Cell("none" if value != value else f"{value:g} req/s", 0.0 if value != value else value)


def _points(points: pd.DataFrame) -> HtmlTable:
    shown = [metric for metric in BEST if metric in points]
    rows = []
    for _, row in points.iterrows():
        rate = row["rate"]
        where = Cell("-" if rate != rate else f"{rate:g}", float(rate) if rate == rate else 0.0)
        cells = [Cell(str(row["series"])), where, Cell(str(row.get("config.seed", "-")))]
        rows.append([*cells, *(_cell(metric, row[metric]) for metric in shown), Cell(row["run"])])
    columns = ["series", "rate", "seed", *shown, "run"]
    return HtmlTable("All points", "A click on a heading sorts.", columns, rows)


def _classes(points: pd.DataFrame) -> HtmlTable:
    """Each SLO class of each point."""
    rows = []
    for point in points.to_dict("records"):
        known = {str(key): value for key, value in point.items() if value == value}
        rate = known.get("rate")
        shown = Cell("-" if rate is None else f"{rate:g}", rate or 0.0)
        where = [Cell(str(known["series"])), shown]
        rows += [[*where, *class_cells(known, name)] for name in classes_in(known)]
    return HtmlTable("SLO classes", NOTE, ["series", "rate", *CLASS_COLUMNS], rows)


def _failed(runs: pd.DataFrame) -> HtmlTable:
    left = runs[runs["status"].ne("ok")]
    rows = [
        [Cell(_point(row["overrides"])), Cell(str(row["status"])), Cell(_short(row["error"]))]
        for _, row in left.iterrows()
    ]
    return HtmlTable("Points without a result", "", ["point", "status", "why"], rows)


def _cell(metric: str, value: float) -> Cell:
    number = float(value)
    if number != number:
        return Cell("n/a", 0.0)
    if metric in KEPT:
        return kept_cell(metric, number)
    return Cell(verdicts.amount(number, verdicts.unit_of(metric)), number)


def _label(row: Mapping[str, Any]) -> str:
    rate = row["rate"]
    return str(row["series"]) + ("" if rate != rate else f" at {rate:g} requests/s")


def _point(overrides: str) -> str:
    return " ".join(json.loads(overrides))


def _short(error: object) -> str:
    text = " ".join(str(error or "-").split())
    return text if len(text) <= 160 else text[:160] + " ..."


def _facts(points: pd.DataFrame) -> Facts:
    facts = [("runs", str(len(points)))]
    for column in (name for name in points if str(name).startswith("made.")):
        values = sorted({str(value) for value in points[column].dropna()})
        shown = ", ".join(values[:6]) + (f" and {len(values) - 6} more" if len(values) > 6 else "")
        facts.append((str(column).removeprefix("made."), shown))
    return facts
