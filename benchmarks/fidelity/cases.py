"""Shared parts of the fidelity claims: judged tables are kept beside their origin, and told.

The protocol is that of `tandem fidelity` (tandem/fidelity/protocol.py), its bars are those of
analysis/fidelity.py. Run a claim alone: with the other core busy, launches moved against the
reference work by 4 %.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from tandem.wiring.folder import commit, host

CASE, COMMIT = "case", "commit"  # columns of a table that is measured in parts
AT_PACE = "_at_pace_"  # in names of figures at another step time


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keep(table: pd.DataFrame, out: Path) -> None:
    """Writes the CSV, and beside it the commit, machine and date of its figures."""
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    about = {**commit(), **host(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    out.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


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
