"""Shared parts of the fidelity claims: judged tables are kept beside their origin, and told.

The protocol is that of `tandem fidelity` (tandem/fidelity/protocol.py), its bars are those of
analysis/fidelity.py. Run a claim alone: with the other core busy, launches moved against the
reference work by 4 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from tandem.cli.__main__ import main as tandem
from tandem.cli.fidelity import REPORT
from tandem.wiring.folder import commit, host

CASE, COMMIT = "case", "commit"  # columns of a table that is measured in parts
COLUMNS = [CASE, "figure", "measured", "error", "worst_rerun", "bar", "used"]
REQUESTS, RERUNS = 200, 5
QUICK_REQUESTS, QUICK_RERUNS = 20, 2
# Judged tables of some cases, from their names, a count of requests and of reruns, and a folder.
Parts = Callable[[Sequence[str], int, int, Path], Iterator[pd.DataFrame]]
RESULTS = Path("benchmarks/results")
AT_PACE = "_at_pace_"  # in names of figures at another step time


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keep(table: pd.DataFrame, out: Path) -> None:
    """Writes the CSV, and beside it the commit, machine and date of its figures."""
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    about = {**commit(), **host(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    out.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def measured_in_parts(
    claim: str, about: str | None, cases: Sequence[str], quick: str, parts: Parts
) -> int:
    """A claim of several cases, some of which may be measured at a time: its command line.

    The table, results/CLAIM.csv, keeps the other cases as they were, with their commits. It is
    written behind each part.

    Args:
        claim: Name of the claim.
        about: What `--help` says.
        cases: All cases, in their order.
        quick: The case of `--quick`, whose table goes elsewhere.
        parts: Measures some of the cases.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=about)
    told = f"{quick} alone, {QUICK_REQUESTS} requests, twice".replace("%", "%%")
    parser.add_argument("--quick", action="store_true", help=told)
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    parser.add_argument("--only", nargs="+", choices=[*cases], help="measure these cases anew")
    chosen = parser.parse_args()
    only = [quick] if chosen.quick else chosen.only or [*cases]
    counts = (QUICK_REQUESTS, QUICK_RERUNS) if chosen.quick else (REQUESTS, RERUNS)
    out = RESULTS / f"{claim}.csv"
    table = pd.DataFrame(columns=COLUMNS)
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        for part in parts(only, *counts, root):
            table = part if table.empty else pd.concat([table, part], ignore_index=True)
            if not chosen.quick:
                keep(with_earlier(table, cases, out), out)
    if chosen.quick:
        return finish(f"{claim}_worst", table, out.with_stem(f"{claim}_part"))
    return finish(f"{claim}_worst", with_earlier(table, cases, out), out)


def reported(
    name: str, words: Sequence[str], loads: Sequence[float], reruns: int, folder: Path
) -> dict[str, Any]:
    """The report of `tandem fidelity` of some loads; more loads go on in its folder.

    Args:
        name: What is told of it.
        words: Settings of the command.
        loads: Shares of the capacity.
        reruns: Measured runs of each.
        folder: Of all runs.

    Returns:
        The content of its fidelity.json; empty where there is none.

    Raises:
        SystemExit: The command was told to end.
    """
    listed = ",".join(map(str, loads))
    words = [*words, f"--load={listed}", f"--reruns={reruns}"]
    say(f"{name}: tandem fidelity {' '.join(words)}")
    code = tandem(["fidelity", *words, f"--out={folder}"])
    if code > 128:
        raise SystemExit(code)
    page = folder / REPORT / "fidelity.json"
    return json.loads(page.read_text(encoding="utf-8")) if page.is_file() else {}


def with_earlier(table: pd.DataFrame, cases: Sequence[str], out: Path) -> pd.DataFrame:
    """A table that is measured in parts: cases that were not measured now stand as they were.

    Each row gets the commit that it was measured at.

    Args:
        table: Rows of now, with a column `case`.
        cases: All that the claim has, in their order.
        out: The CSV of earlier.

    Returns:
        Rows of all cases; one that no part has measured yet uses up any bar.
    """
    made = commit()
    now = table.assign(**{COMMIT: f"{str(made['commit'])[:7]}{'+' if made['dirty'] else ''}"})
    before = pd.read_csv(out) if out.is_file() else now.iloc[:0]
    before = before[~before[CASE].isin(now[CASE])] if COMMIT in before else now.iloc[:0]
    found = now if before.empty else before if now.empty else pd.concat([before, now])
    lacks = [case for case in cases if case not in {*found[CASE]}]
    rows = [{CASE: case, "figure": "not measured", "used": math.inf} for case in lacks]
    whole = found if not rows else pd.concat([found, pd.DataFrame(rows)], ignore_index=True)
    whole = whole[whole[CASE].isin(cases)]
    return whole.sort_values(
        CASE, key=lambda c: c.map(cases.index), kind="stable", ignore_index=True
    )


def finish(name: str, table: pd.DataFrame, out: Path) -> int:
    """Writes the CSV, prints the table and the claim; returns the exit status."""
    keep(table, out)
    return verdict_of(name, table)


def verdict_of(name: str, table: pd.DataFrame) -> int:
    """Prints the table and the claim; returns the exit status."""
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))
    worst = float(table["used"].max())
    verdict = "pass" if worst <= 1 else "fail"
    print(f"{name} {worst:.3g} of_bar 1 {verdict}")
    return int(verdict == "fail")
