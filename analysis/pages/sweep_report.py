"""The report of a sweep: the best points, every point, and figures with their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import units, verdicts
from analysis.figures.experiments.drawn import training_figures
from analysis.figures.run_figures import Shown
from analysis.figures.sweep_plots import SHARES, drawn, drawn_training
from analysis.figures.sweep_points import axis_in, capacity, points_of
from analysis.metric_names import BEST, classes_in
from analysis.pages.cells import KEPT, Cell, HtmlTable, kept_cell
from analysis.pages.report import Facts, write_page, written
from analysis.pages.tables import CLASS_COLUMNS, NOTE, class_cells
from analysis.swept import METRICS, BestPoint, SweptAxis, best_points

SHOWN = (  # columns of the table of points
    *BEST,
    "finetune_tokens_per_s",
    "mean_train_step_s",
    "peak_gpu0_used_bytes",
)
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
        first = [table for table in (_best(points), _capacity(points)) if table.rows]
        last = [table for table in (_points(points), _classes(points), _failed(runs)) if table.rows]
        page = {
            "title": f"sweep {name}",
            "headline": headline(runs, points),
            "tables": [*first, *last],
            "lead": len(first),
            "command": command,
        }
        write_page(aside, page, figures, {"sweep": _facts(points)})

    return written(folder, fill)


def _figures(runs: pd.DataFrame, points: pd.DataFrame, root: Path, folder: Path) -> list[Shown]:
    """Figures of serving, and of training: those of its experiment, else over the setting."""
    shown = drawn(points, folder) if "request_throughput" in points else []
    if "train_steps" not in points:
        return shown or drawn(points, folder)
    return shown + (training_figures(runs, root, folder) or drawn_training(points, folder))


def headline(runs: pd.DataFrame, points: pd.DataFrame) -> str:
    """The number of runs and commits, and the point with the most goodput (or throughput)."""
    metric, unit = next((pair for pair in MOST if pair[0] in points), MOST[-1])
    text = f"{len(points)} of {len(runs)} runs finished."
    if "made.commit" in points and (commits := points["made.commit"].nunique()) > 1:
        text += f" They were made by {commits} commits."
    best = _best_points(points).get(metric)
    if best is None:
        return text
    return f"{text} Most {METRICS[metric][0]}: {units.amount(best.value, unit)}, {best.point}."


def _best_points(points: pd.DataFrame) -> dict[str, BestPoint]:
    """The best mean over seeds of each metric, by metric."""
    axis = axis_in(points)
    rows = [{str(key): value for key, value in row.items()} for row in points.to_dict("records")]
    return {found.metric: found for found in best_points((_label(row, axis), row) for row in rows)}


def _best(points: pd.DataFrame) -> HtmlTable:
    rows = [
        [Cell(METRICS[metric][0]), _cell(metric, found.value), Cell(found.point)]
        for metric, found in _best_points(points).items()
    ]
    is_repeated = points.duplicated(["series", "x"]).any()
    note = "Means over seeds." if is_repeated else ""
    return HtmlTable("Best of each metric", note, ["metric", "value", "point"], rows)


def _capacity(points: pd.DataFrame) -> HtmlTable:
    axis = axis_in(points)
    if "slo_attainment" not in points or axis is None:
        return HtmlTable("Capacity", "", [], [])
    if axis.is_rate:
        title, note = "Capacity", "The highest rate tried at which, as at all lower ones, "
    elif axis.is_resource:
        title, note = f"Least {axis.name}", "The least tried at which, as at all above it, "
    else:
        return HtmlTable("Capacity", "", [], [])
    by_share = [capacity(points, share) for share in SHARES]
    rows = [
        [Cell(series), *(_where(found[series], axis, "none") for found in by_share)]
        for series in by_share[0]
    ]
    columns = ["series", *(f"at {s:.0%}" for s in SHARES)]
    return HtmlTable(title, f"{note}that share of requests met the SLO.", columns, rows)


def _where(value: float, axis: SweptAxis | None, unknown: str = "-") -> Cell:
    """The value of the setting along x, with its unit."""
    if axis is None or value != value:
        return Cell(unknown, 0.0)
    return Cell(axis.text(value), value)


def _points(points: pd.DataFrame) -> HtmlTable:
    axis = axis_in(points)
    shown = [metric for metric in SHOWN if metric in points and points[metric].notna().any()]
    rows = []
    for _, row in points.iterrows():
        cells = [Cell(str(row["series"]))]
        cells += [_where(float(row["x"]), axis)] if axis else []
        cells.append(Cell(str(row.get("config.seed", "-"))))
        rows.append([*cells, *(_cell(metric, row[metric]) for metric in shown)])
    where = [axis.name] if axis else []
    columns = ["series", *where, "seed", *(METRICS[name][0] for name in shown)]
    note = "A click on a heading sorts. points.csv has the folder of each run, and every column."
    return HtmlTable("All points", note, columns, rows)


def _classes(points: pd.DataFrame) -> HtmlTable:
    """Each SLO class of each point."""
    axis = axis_in(points)
    rows = []
    for point in points.to_dict("records"):
        known = {str(key): value for key, value in point.items() if value == value}
        where = [Cell(str(known["series"]))]
        where += [_where(float(point["x"]), axis)] if axis else []
        rows += [[*where, *class_cells(known, name)] for name in classes_in(known)]
    along = [axis.name] if axis else []
    return HtmlTable("SLO classes", NOTE, ["series", *along, *CLASS_COLUMNS], rows)


def _failed(runs: pd.DataFrame) -> HtmlTable:
    left = runs[runs["status"].ne("ok")]
    rows = [
        [Cell(_point(row["overrides"])), Cell(str(row["status"])), Cell(_whole(row["error"]))]
        for _, row in left.iterrows()
    ]
    return HtmlTable("Points without a result", "", ["point", "status", "why"], rows)


def _cell(metric: str, value: float) -> Cell:
    number = float(value)
    if number != number:
        return Cell("n/a", 0.0)
    if metric in KEPT:
        return kept_cell(metric, number)
    unit = "bytes" if metric.endswith("_bytes") else verdicts.unit_of(metric)
    return Cell(units.amount(number, unit), number)


def _label(row: Mapping[str, Any], axis: SweptAxis | None) -> str:
    x = row["x"]
    return str(row["series"]) + ("" if x != x or axis is None else f" {axis.said(x)}")


def _point(overrides: str) -> str:
    return " ".join(json.loads(overrides))


def _whole(error: object) -> str:
    return " ".join(str(error or "-").split())


def _facts(points: pd.DataFrame) -> Facts:
    facts = [("runs", str(len(points)))]
    for column in (name for name in points if str(name).startswith("made.")):
        values = sorted({str(value) for value in points[column].dropna()})
        shown = ", ".join(values[:6]) + (f" and {len(values) - 6} more" if len(values) > 6 else "")
        facts.append((str(column).removeprefix("made."), shown))
    return facts
