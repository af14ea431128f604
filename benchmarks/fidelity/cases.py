"""Shared parts of the fidelity claims: judged tables are kept beside their origin, and told.

The protocol is that of `tandem fidelity` (tandem/fidelity/protocol.py), its bars are those of
analysis/fidelity.py. Run a claim alone: with the other core busy, launches moved against the
reference work by 4 %.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from tandem.wiring.folder import commit, host

AT_PACE = "_at_pace_"  # in names of figures at another step time


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def keep(table: pd.DataFrame, out: Path) -> None:
    """Writes the CSV, and beside it the commit, machine and date of its figures."""
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    about = {**commit(), **host(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    out.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


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
