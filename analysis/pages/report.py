"""The report of a run or a comparison: one self-contained HTML page, figures, and their numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import verdicts
from analysis.classes import limits_in
from analysis.compare import Comparison
from analysis.figures.run_figures import Shown, compared, single
from analysis.metrics import summary
from analysis.pages.tables import compared_tables, single_tables
from analysis.run import Run

PAGE = "report.html"
TABLES = ("errors", "distances", "request_errors", "training", "memory", "steps", "split", "shares")
Facts = list[tuple[str, str]]


def write_report(comparison: Comparison, folder: Path | str) -> Path:
    """Writes report.html, comparison.json, two CSVs and figures/.

    Args:
        comparison: the comparison.
        folder: a new folder, or one with an earlier report, which is replaced as a whole.

    Returns:
        The path of the page.

    Raises:
        ValueError: the folder holds something else.
    """
    a, b = comparison.prediction, comparison.measurement
    more = {"replay": comparison.replay, "corrected": comparison.corrected}
    runs = {"prediction": a, "measurement": b} | {name: run for name, run in more.items() if run}

    def fill(aside: Path) -> None:
        figures = compared(comparison, aside / "figures")
        comparison.errors.to_csv(aside / "errors.csv", index=False)
        comparison.memory.to_csv(aside / "memory.csv", index=False)
        _dump(as_dict(comparison), aside / "comparison.json")
        page = {
            "title": f"{a.name} against {b.name}",
            "headline": verdicts.headline(comparison),
            "tables": compared_tables(comparison),
            "command": f"tandem compare {a.folder} {b.folder}",
        }
        write_page(aside, page, figures, {name: _facts(run) for name, run in runs.items()})

    return written(Path(folder), fill)


def write_run_report(run: Run, folder: Path | str) -> Path:
    """Writes the report of one run: latencies, memory, lanes. See `write_report`."""

    def fill(aside: Path) -> None:
        figures = single(run, aside / "figures")
        metrics = summary(run, limits_in(run.config))
        _dump(metrics, aside / "metrics.json")
        page: dict[str, Any] = {
            "title": run.name,
            "headline": verdicts.run_headline(run, metrics),
            "tables": single_tables(run, metrics),
        }
        page["command"] = f"tandem report {run.folder}"
        write_page(aside, page, figures, {"run": _facts(run)})

    return written(Path(folder), fill)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values, for JSON: runs, headline, plans and every small table."""
    runs = (comparison.prediction, comparison.measurement, comparison.replay, comparison.corrected)
    plans = comparison.plans
    out: dict[str, Any] = {
        "runs": [{"folder": str(r.folder), **r.provenance} for r in runs if r is not None],
        "headline": verdicts.headline(comparison),
        "plans": {**plans.__dict__, "share": plans.share},
        "losses": comparison.losses.__dict__,
        "within_spread": comparison.within_spread,
    }
    for name in TABLES:
        frame: pd.DataFrame = getattr(comparison, name)
        out[name] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return out


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_page(
    aside: Path, page: Mapping[str, Any], figures: Sequence[Shown], facts: Mapping[str, Facts]
) -> None:
    """Writes report.html from title, headline, tables and command, with figures inline."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("analysis", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [{**figure.__dict__, "svg": _inline(figure)} for figure in figures]
    text = environment.get_template(PAGE).render(**page, figures=drawn, facts=facts)
    (aside / PAGE).write_text(text, encoding="utf-8")


def _inline(figure: Shown) -> str:
    """The SVG element alone, with ids of its own: several figures share a page."""
    text = figure.svg.read_text(encoding="utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{figure.name}-", text)
    return re.sub(r"[ \t]*\n[ \t]*", "\n", text)


def _facts(run: Run) -> Facts:
    facts = {"folder": str(run.folder), **run.provenance}
    shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}
    return [
        (key, value if len(value) <= 400 else value[:400] + " ...") for key, value in shown.items()
    ]


def written(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Fills a folder aside and puts it in place as a whole; returns the path of its page."""
    with _renamed_at_end(folder) as aside:
        fill(aside)
    return folder / PAGE


@contextmanager
def _renamed_at_end(folder: Path) -> Iterator[Path]:
    """A folder beside the final one, which takes its place only when all is written."""
    if folder.exists() and not (folder / PAGE).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something other than a report: give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{x}") for x in ("new", "old"))
    aside.mkdir()
    try:
        yield aside
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    finally:
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)
