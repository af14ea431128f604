"""The page of a comparison of settings: which is better, by how much, and for which requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from analysis.ab import told
from analysis.ab.differences import Against
from analysis.ab.groups import RunGroup, letter
from analysis.figures.ab_figures import drawn
from analysis.pages.cells import Cell, HtmlTable
from analysis.pages.report import Facts, write_page, written
from analysis.run import Run, RunFacts, load

SHOWN = ("commit", "backend", "cost_form", "model", "device", "seed", "trace_hash")
TITLE_LETTERS = 100


def write_ab_report(found: Sequence[Against], folder: Path, command: str) -> Path:
    """Writes report.html, differences.csv, classes.csv, requests.csv and figures/.

    Args:
        found: each group against the baseline.
        folder: a new folder, or one with an earlier report, which is replaced as a whole.
        command: command that writes this page again.

    Returns:
        The path of the page.

    Raises:
        ValueError: the folder holds something else.
    """
    groups = [found[0].a, *(pair.b for pair in found)]
    shown = {group.name: whole for group in groups if (whole := _whole(group)) is not None}

    def fill(aside: Path) -> None:
        figures = drawn(groups, shown, aside / "figures")
        _frame(found, differences).to_csv(aside / "differences.csv", index=False)
        _frame(found, lambda pair: pair.classes).to_csv(aside / "classes.csv", index=False)
        _frame(found, lambda pair: pair.requests).to_csv(aside / "requests.csv", index=False)
        tables = [table for pair in found for table in _tables(pair, len(found) > 1)]
        page = {
            "title": title(groups),
            "headline": "\n\n".join([*_headlines(found), *left_out(groups)]),
            "tables": tables,
            "lead": len(tables),
            "command": command,
        }
        facts = {f"{letter(i)} = {g.name}": _facts(g) for i, g in enumerate(groups)}
        write_page(aside, page, figures, facts)

    return written(folder, fill)


def title(groups: Sequence[RunGroup]) -> str:
    """The title of a page; names that are too long for one stand in its headline."""
    first, *others = (group.name for group in groups)
    one = others[0] if len(others) == 1 else f"{len(others)} settings"
    text = f"{one} against {first}"
    return text if len(text) <= TITLE_LETTERS else f"{len(groups)} settings compared"


def first_run(group: RunGroup) -> RunFacts:
    """The run of a group that timelines show."""
    return next(iter(group.runs.values()))


def _whole(group: RunGroup) -> Run | None:
    first = first_run(group)
    return load(first.folder) if first.has("steps") else None


def left_out(groups: Sequence[RunGroup]) -> list[str]:
    """One sentence where runs have kept requests alone."""
    if all(first_run(group).has("steps") for group in groups):
        return []
    return ["Runs that keep requests alone (record=requests) have no batches and memory to show."]


def _headlines(found: Sequence[Against]) -> list[str]:
    """A paragraph per pair; several share the one that names the baseline."""
    if len(found) == 1:
        return [f"{told.headline(found[0])} {told.losers(found[0])}".strip()]
    lines = [
        f"{pair.letter} is {pair.b.name}. {told.findings(pair)} {told.losers(pair)}".strip()
        for pair in found
    ]
    return [f"A is {found[0].a.name}, the baseline.", *lines]


def differences(pair: Against) -> pd.DataFrame:
    """Every figure as a row of numbers."""
    return pd.DataFrame(
        [
            {
                **{"metric": row.metric, "stat": row.stat, "unit": row.unit},
                **{"a": row.a, "b": row.b, "difference": row.interval.value},
                **{"relative": row.relative, "low": row.interval.low, "high": row.interval.high},
                **{"method": row.interval.method, "verdict": row.verdict, "few": row.has_few},
            }
            for row in pair.rows
        ]
    )


def _frame(found: Sequence[Against], of: Callable[[Against], pd.DataFrame]) -> pd.DataFrame:
    parts = [of(pair).assign(baseline=pair.a.name, group=pair.b.name) for pair in found]
    return pd.concat(parts, ignore_index=True)


def _tables(pair: Against, has_many: bool) -> list[HtmlTable]:
    of = f": {pair.letter}" if has_many else ""
    note = f"A is {pair.a.name}, {pair.letter} is {pair.b.name}. {told.method(pair)} "
    note += f"The largest load is {100 * pair.load:.0f} % ({told.LOAD})."
    if any(row.has_few for row in pair.rows):
        note += f" {told.FEW}."
    columns = ["metric", "A", pair.letter, f"{pair.letter} - A", "%", "95 % interval", "verdict"]
    rows = [
        [
            Cell(told.metric_name(row)),
            Cell(told.figure(row.a, row.unit), row.a),
            Cell(told.figure(row.b, row.unit), row.b),
            Cell(told.difference(row), row.interval.value),
            Cell(told.share(row.relative), row.relative if row.relative == row.relative else 0.0),
            Cell(told.interval(row), row.interval.low if row.interval.is_known else 0.0),
            Cell(told.verdict(row, pair)),
        ]
        for row in pair.rows
    ]
    found = [HtmlTable(f"Differences{of}", note, columns, rows, True)]
    if len(pair.classes):
        found.append(_classes(pair, of))
    return found


def _classes(pair: Against, of: str) -> HtmlTable:
    columns = ["class", "requests"]
    for name in told.CLASS_LATENCIES.values():
        columns += [f"{name} faster", "slower", "median", "mean"]
    rows = []
    for row in pair.classes.to_dict("records"):
        count = float(row["requests"])
        cells = [Cell(str(row["class"])), Cell(f"{count:,.0f}", count)]
        for metric in told.CLASS_LATENCIES:
            cells += [_share(row.get(f"{metric}_{part}")) for part in ("faster", "slower")]
            cells += [_seconds(row.get(f"{metric}_{part}_s")) for part in ("median", "mean")]
        rows.append(cells)
    note = (
        f"Shares of the requests that are faster and slower in {pair.letter}, the rest being "
        f"equal; median and mean of {pair.letter} - A per request. {told.losers(pair)}"
    )
    return HtmlTable(f"Requests that are faster{of}", note, columns, rows)


def _share(value: float | None) -> Cell:
    return Cell("-", 0.0) if value is None or value != value else Cell(told.part_of(value), value)


def _seconds(value: float | None) -> Cell:
    if value is None or value != value:
        return Cell("-", 0.0)
    return Cell(told.seconds(value), value)


def _facts(group: RunGroup) -> Facts:
    facts: Facts = [("runs", str(len(group.runs)))]
    for key in SHOWN:
        values = dict.fromkeys(str(run.provenance.get(key, "-")) for run in group.runs.values())
        facts.append((key, _shortened([*values])))
    folders = [str(run.folder) for run in group.runs.values()]
    return [*facts, ("folders", _shortened(folders))]


def _shortened(values: Sequence[str]) -> str:
    more = f" and {len(values) - 6} more" if len(values) > 6 else ""
    return ", ".join(values[:6]) + more
