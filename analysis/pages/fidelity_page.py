"""The report of a fidelity measurement: verdicts, percentiles, every rerun, and their figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.fidelity import (
    FIGURES,
    LATENCY_BAR,
    Fidelity,
    figure_name,
    judgement,
    percent_of,
    shown,
)
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, axes, legend
from analysis.pages.cells import Cell, HtmlTable
from analysis.pages.report import write_page, written

SERIES = tuple(zip((BLUE, RED, GREEN, ORANGE), ("o", "s", "^", "D"), strict=True))
TEXT = (
    "Errors of each rerun",
    "Prediction over measurement - 1. Dotted: the bar, which judges the median of a load (line "
    "through its reruns). Hollow: discarded, because the machine drifted meanwhile.",
)


def write_fidelity_report(
    fidelity: Fidelity, folder: Path, command: str, facts: Mapping[str, str]
) -> Path:
    """Writes report.html, errors.csv, reruns.csv, fidelity.json and figures/.

    Args:
        fidelity: The judged loads.
        folder: A new folder, or one with an earlier report, which is replaced as a whole.
        command: What writes this page again.
        facts: Where the figures come from, by name.
    """

    def fill(aside: Path) -> None:
        fidelity.table.to_csv(aside / "errors.csv", index=False)
        fidelity.reruns.to_csv(aside / "reruns.csv", index=False)
        text = json.dumps(as_dict(fidelity, facts), indent=1, allow_nan=False)
        (aside / "fidelity.json").write_text(text + "\n", encoding="utf-8")
        tables = [_judged(fidelity), _reruns(fidelity), _percentiles(fidelity)]
        page = {
            "title": "Fidelity: predictions beside measured reruns",
            "headline": headline(fidelity),
            "tables": [table for table in tables if table.rows],
            "command": command,
        }
        figures = [_errors(fidelity, aside / "figures")]
        write_page(aside, page, figures, {"measurement": list(facts.items())})

    return written(folder, fill)


def as_dict(fidelity: Fidelity, facts: Mapping[str, str]) -> dict[str, Any]:
    """The verdict and every judged row as plain values; what is undefined is null."""
    loads = []
    for load in fidelity.loads:
        table = load.table.assign(verdict=[judgement(used) for used in load.table["used"]])
        table = table.drop(columns=["case", "used"])
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        steady = int(load.reruns.groupby("rerun")["counts"].first().sum())
        about = {"load": load.share, "rate": load.rate, "steady_reruns": steady}
        loads.append({**about, "failed": load.failed, "figures": rows})
    return {
        "capacity": fidelity.capacity,
        "headline": headline(fidelity),
        "failed": fidelity.failed,
        "discarded": {name.replace(" ", "_"): n for name, n in fidelity.discarded.items()},
        "loads": loads,
        **facts,
    }


def headline(fidelity: Fidelity) -> str:
    """What was judged, how far off it was, what fails, and how much was discarded."""
    found = []
    for load in fidelity.loads:
        rows = [(figure, load.row(figure)) for figure in load.figures]
        errors = [f"{figure_name(f)} {percent_of(row['error'])}" for f, row in rows if row]
        found.append(f"At {load.name} of the capacity: {', '.join(errors) or 'no steady rerun'}.")
        if load.undefined:
            lacking = ", ".join(map(figure_name, load.undefined))
            found.append(f"Not judged, as no request has it: {lacking}.")
    failed = ", ".join(fidelity.failed)
    verdict = f"Beyond the bar: {failed}." if failed else "Every bar holds."
    text = f"{verdict} {' '.join(found)} Medians over reruns, prediction over measurement."
    counts = [f"{name} {count}" for name, count in fidelity.discarded.items() if count]
    return f"{text} Discarded on an unsteady machine: {', '.join(counts)}." if counts else text


def _judged(fidelity: Fidelity) -> HtmlTable:
    rows = []
    for load in fidelity.loads:
        for figure in load.figures:
            if (row := load.row(figure)) is not None:
                word = judgement(row["used"])
                rows.append(
                    [*_cells(load.name, figure, row), Cell("" if word else "-", None, word)]
                )
        rows += [
            [
                Cell(load.name),
                Cell(figure_name(figure)),
                *[Cell("-")] * 5,
                Cell("", None, "fail"),
            ]
            for figure in load.failed
            if figure not in load.figures
        ]
    widened = fidelity.table.query("figure in ('mean_tpot_s', 'mean_e2e_s')")["rerun_iqr"].gt(
        LATENCY_BAR
    )
    note = (
        "Medians over the reruns that count. Spread: interquartile range of the measured reruns "
        "over their median. A figure without a bar is not judged: TTFT above 50 % load, where a "
        "queue amplifies small errors."
    )
    if widened.any():
        note += " A bar above 5 % of mean TPOT or E2E is that spread: measurements vary by more."
    return HtmlTable("Verdicts", note, [*COLUMNS, "verdict"], rows)


COLUMNS = ("load", "figure", "measured", "median error", "worst rerun", "spread", "bar")


def _cells(load: str, figure: str, row: Mapping[str, Any]) -> list[Cell]:
    value = float(row["measured"])
    signed = [_percent(row[key]) for key in ("error", "worst_rerun")]
    plain = [_percent(row[key], signed=False) for key in ("rerun_iqr", "bar")]
    return [
        Cell(load),
        Cell(figure_name(figure)),
        Cell(shown(figure, value), value),
        *signed,
        *plain,
    ]


def _percent(share: float | None, signed: bool = True) -> Cell:
    known = 0.0 if share is None or share != share else float(share)
    return Cell(percent_of(share, signed), known)


def _percentiles(fidelity: Fidelity) -> HtmlTable:
    rows = [
        _cells(load.name, figure, row)[:-1]
        for load in fidelity.loads
        for figure in FIGURES
        if figure not in load.figures and (row := load.row(figure)) is not None
    ]
    note = "Without bars: published as they are."
    return HtmlTable("Percentiles", note, COLUMNS[:-1], rows)


def _reruns(fidelity: Fidelity) -> HtmlTable:
    rows, figures = [], fidelity.figures
    for load in fidelity.loads:
        for number, part in load.reruns.groupby("rerun"):
            errors, first = part.set_index("figure")["error"], part.iloc[0]
            counts = bool(first["counts"])
            cells = [Cell(load.name), Cell(str(number), float(str(number)))]
            cells.append(_percent(float(first["moved"]), signed=False))
            cells += [_percent(errors.get(figure)) for figure in figures]
            rows.append([*cells, Cell("yes" if counts else "no: the machine drifted")])
    note = "In the order of measurement. Drift: how far the probes moved around the run."
    columns = ["load", "rerun", "drift", *map(figure_name, figures), "counts"]
    return HtmlTable("Every rerun", note, columns, rows)


def _errors(fidelity: Fidelity, folder: Path) -> Shown:
    """An axes per judged figure that a load has."""
    rows, table = fidelity.reruns, fidelity.table
    medians = table[["case", "figure", "error", "bar"]].rename(columns={"error": "median_error"})
    data = rows.merge(medians, on=["case", "figure"], how="left")
    known = set(data["figure"])
    parts = [data[data["figure"].eq(figure)] for figure in fidelity.figures if figure in known]
    return panel("errors", parts, plot_errors, (13, 3.0), folder, text=TEXT)


def plot_errors(data: pd.DataFrame, ax: Any = None) -> Any:
    """Errors of one figure in percent by rerun, a series per load."""
    ax = axes(ax)
    ax.axhline(0, color=BLACK, linewidth=0.8)
    for i, (case, part) in enumerate(data.groupby("case", sort=False)):
        color, marker = SERIES[i % len(SERIES)]
        ax.plot([], [], linestyle="none", marker=marker, color=color, label=f"{case} load")
        for counts, rows in part.groupby("counts"):
            style = {"marker": marker, "color": color, "linestyle": "none", "markersize": 5}
            fill = color if counts else "none"
            ax.plot(rows["rerun"], 100 * rows["error"], markerfacecolor=fill, **style)
        ax.axhline(100 * part["median_error"].iloc[0], color=color, linewidth=1.2, alpha=0.6)
    for bar in sorted(set(data["bar"].dropna())):
        for edge in (-bar, bar):
            ax.axhline(100 * edge, color=GREY, linewidth=1.2, linestyle=":")
    last = int(data["rerun"].max()) if len(data) else 0
    ax.set_xticks(range(0, last + 1, 1 + last // 8))
    ax.set_xlim(-0.5, last + 0.5)
    ax.set(xlabel="rerun, in order", ylabel="error, %")
    if len(data):
        ax.set_title(figure_name(str(data["figure"].iloc[0])))
    spec = ax.get_subplotspec()
    if spec is None or spec.is_last_col():
        legend(ax, loc="upper left", bbox_to_anchor=(1, 1))
    return ax
