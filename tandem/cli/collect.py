"""`tandem collect`: one table of all runs in a folder, from whatever is on disk.

Two files, with a row per run: runs.parquet is small, and COLUMNS says what is in it;
runs_all.parquet has every setting and every metric, and is written with --all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.swept import HEADLINES, varied
from analysis.yaml_text import yaml_value
from tandem.config.renamed import with_current_targets
from tandem.sweeps.point import points_in, superseded_in
from tandem.wiring.folder import OK, status_of
from traces.files import atomically, checked_text, is_sealed

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)
Points = Mapping[str, Sequence[str]]  # overrides by key
TABLE, ALL = "runs.parquet", "runs_all.parquet"
COLUMNS = {  # of runs.parquet, in this order; then those of HEADLINES that some run has
    "run": "folder of the run, below DIR",
    "status": "ok, does_not_fit, rejected, failed, interrupted, damaged (a file is not as it was "
    "written) or superseded (its overrides have a newer run)",
    "error": "why a run has no result",
    "policy": "name of the policy",
    "KEY, config.KEY": "each choice of a group, and each setting, that varies between the runs",
}
EVERY = (
    "runs_all.parquet has these and all others: overrides (as JSON), every choice of a group, "
    "settings as config.KEY, what they were made by as made.KEY, and every metric of metrics.json"
)
DAMAGED = "damaged"  # a finished run whose files are not as they were written
READ = ("config.yaml", "provenance.json", "metrics.json")
UNSEALED = (
    "%d of %d runs keep no hashes of their files, %s for one: made by an earlier version, they are "
    "taken as they are"
)
SUPERSEDED = "superseded"  # a status of the table alone: see tandem.sweeps.point
FACTS = (
    *("commit", "dirty", "version", "trace_hash", "model", "device", "cost_form", "depth", "seed"),
    *("parameters", "chunks", "state_bytes"),  # of what is trained
    "foretold_step_s",  # by a planner that searches
)


def main(words: Sequence[str]) -> int:
    """Writes runs.parquet and says how many runs of which status are in it."""
    parser = argparse.ArgumentParser(
        prog="tandem collect",
        description="Writes DIR/runs.parquet, a row per run below DIR: settings that vary and "
        "headline metrics. It can be called at any time, any number of times, also while runs go "
        "on.",
        epilog=_columns(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--all", action="store_true", help=f"write DIR/{ALL}, too: every column")
    chosen = parser.parse_args(words)
    found = Counter(write_runs(chosen.folder, chosen.all)["status"].to_pylist())
    counts = ", ".join(f"{n} {status}" for status, n in found.most_common())
    name = os.path.relpath(chosen.folder / (ALL if chosen.all else TABLE))
    print(f"{name}: {found.total()} runs ({counts})")
    return 0


def _columns() -> str:
    """The columns of the small table, for --help."""
    told = {**COLUMNS, **{name: about for name, (_, about) in HEADLINES.items()}}
    width = max(map(len, told)) + 2
    lines = [
        fill(
            f"{name:<{width}}{about}", 96, initial_indent="  ", subsequent_indent=" " * (width + 2)
        )
        for name, about in told.items()
    ]
    return "\n".join(["columns of runs.parquet:", *lines, "", fill(f"{EVERY}.", 96)])


def collect(root: Path) -> pd.DataFrame:
    """The whole table of `write_runs`, as a data frame."""
    table: pd.DataFrame = write_runs(root).to_pandas()
    return table


def write_runs(root: Path, with_all: bool = False) -> pa.Table:
    """Reads every run below the folder and writes the small table, whole or not at all.

    Returns the whole table, which `with_all` writes, too. Its columns: run (its folder), status (of
    the run; or damaged; or superseded, where its overrides have a newer run, by other code or on
    another trace), error, overrides (JSON), policy; other choices of groups by their names;
    settings as `config.KEY`, provenance as `made.KEY`, metrics by their own names.

    Raises:
        ValueError: No run lies below the folder.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is no folder: give that of a sweep, or one with runs in it")
    folders = run_folders(root)
    places = {folder.parent for folder in folders}
    sweeps = {place: (points_in(place), superseded_in(place)) for place in places}
    rows = [_row(root, folder, *sweeps[folder.parent]) for folder in folders]
    if old := [f for f in folders if status_of(f) == OK and not is_sealed(f)]:
        log.warning(UNSEALED, len(old), len(folders), old[0])
    if not rows:
        raise ValueError(f"{root}: no run lies there")
    names = dict.fromkeys(chain.from_iterable(rows))
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    files = {TABLE: table.select(_small(table)), **({ALL: table} if with_all else {})}
    for name, part in files.items():
        with atomically(root / name) as aside:
            pq.write_table(part, aside)
    return table


def _small(table: pa.Table) -> list[str]:
    """The columns of the small table: see COLUMNS."""
    names = table.column_names
    keys = varied(words for text in table["overrides"].to_pylist() if (words := json.loads(text)))
    apart = [
        name for name in names for key in keys if name in (key, f"config.{key}") and key != "policy"
    ]
    first = [name for name in COLUMNS if name in names]
    return [*first, *apart, *(name for name in HEADLINES if name in names)]


def run_folders(root: Path) -> list[Path]:
    """Folders of runs that have ended, in the order of their paths."""
    found = sorted(path.parent for path in root.rglob("status.json"))
    return [folder for folder in found if not folder.name.endswith(".running")]


def policy_name(config: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The stack as it was named on the command line, else the classes of its halves."""
    for word in overrides:
        if word.startswith("policy="):
            return word.partition("=")[2]
    if config.get("replayed"):
        return "recorded"
    halves = [config.get(name) or {} for name in ("scheduling", "memory")]
    return "+".join(str(half.get("_target_", "?")).rpartition(".")[2] for half in halves)


def _row(root: Path, folder: Path, points: Points, superseded: Points) -> dict[str, Any]:
    status, state = _json(folder / "status.json"), status_of(folder) or DAMAGED
    error, is_ok = status.get("error"), state == OK
    try:
        config, facts, metrics = (_parsed(folder / name, is_ok) for name in READ)
    except ValueError as fault:
        config, facts, metrics = {}, {}, {}
        state, error = DAMAGED, str(fault)
        log.warning("left out: %s", error)
    config = with_current_targets(config)  # runs of all versions share names
    if state == OK and not metrics:
        state = DAMAGED
    words = list(facts.get("overrides") or {**superseded, **points}.get(folder.name, ()))
    row: dict[str, Any] = {
        "run": str(folder.relative_to(root)),
        "status": SUPERSEDED if folder.name in superseded else state,
        "error": error,
        "overrides": json.dumps(words),
        "policy": policy_name(config, words),
    }
    flat = dict(_scalars(config))
    for word in words:  # choices of groups are names that the configuration no longer holds
        key, _, value = word.lstrip("+~").partition("=")
        if key not in flat:
            row.setdefault(key, value)
    row |= {f"config.{key}": value for key, value in flat.items()}
    row |= {f"made.{key}": facts[key] for key in FACTS if key in facts}
    return row | {key: value for key, value in metrics.items() if key not in row}


def _scalars(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", json.dumps(value)
        else:
            yield f"{prefix}{key}", value


def _column(values: Sequence[Any]) -> pa.Array:
    """Values of one type, null where there is none: mixed ones (10 and 'auto') become text."""
    known = [None if value != value else value for value in values]  # NaN: undefined
    kinds = {type(value) for value in known if value is not None}
    is_float = any(isinstance(value, float) for value in values)
    with suppress(OverflowError, pa.ArrowException):  # a number beyond 64 bits is text, too
        if is_float and kinds <= {int, float}:
            return pa.array([None if value is None else float(value) for value in known])
        if len(kinds) <= 1:
            return pa.array(known, pa.float64() if is_float and not kinds else None)
    return pa.array([None if value is None else str(value) for value in known], pa.string())


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, is_checked=False)


def _parsed(path: Path, is_checked: bool) -> dict[str, Any]:
    """What a file of a run holds, nothing where there is none. ValueError where it is checked, and
    not as it was written."""
    is_checked = is_checked and is_sealed(path.parent)
    try:
        text = checked_text(path) if is_checked else path.read_text(encoding="utf-8")
        found = yaml_value(text, path) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if is_checked and isinstance(error, ValueError):
            raise
        return {}
    return found if isinstance(found, dict) else {}
