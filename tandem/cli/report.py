"""`tandem report`: the page of one run, or of all runs in a folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.collect import SUPERSEDED, collect

if TYPE_CHECKING:
    import pandas as pd

LIMITS = ("ttft", "tpot", "e2e")


def main(words: Sequence[str]) -> int:
    """Writes the page and prints where it is."""
    parser = argparse.ArgumentParser(
        prog="tandem report",
        description="Of a run: latencies, memory, lanes. Of a sweep, or any folder with runs in "
        "it: goodput, attainment and latency, or the rate of training, over the numeric setting "
        "that varies (that with most values, if several do), frontier, heat map; each with its "
        "numbers.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder, or a sweep's")
    parser.add_argument("--out", type=Path, help="folder of the report")
    for name in LIMITS:
        about = f"a sweep's goodput under this limit of {name}, instead of the runs' own slo"
        parser.add_argument(f"--{name}", type=float, metavar="SECONDS", help=about)
    chosen = parser.parse_args(words)
    slo = {f"{n}_s": getattr(chosen, n) for n in LIMITS if getattr(chosen, n) is not None}
    if (chosen.folder / "status.json").is_file():
        from tandem.cli.compare import report_of

        page = report_of(chosen.folder, chosen.out)
    else:
        page = sweep_report(chosen.folder, chosen.out, slo)
    print(f"report: {page}")
    return 0


def sweep_report(root: Path, out: Path | None, slo: Mapping[str, float]) -> Path:
    """The report of all runs below a folder that none supersedes, by default in its `report`."""
    from analysis.pages.sweep_report import write_sweep_report

    runs = collect(root)
    runs = runs[runs["status"].ne(SUPERSEDED)]
    if slo:
        runs = judged(root, runs, slo)
    flags = "".join(f" --{key.removesuffix('_s')} {limit:g}" for key, limit in slo.items())
    command = f"tandem report {root.resolve()}{flags}"
    return write_sweep_report(runs, out or root / "report", root.resolve().name, command, root)


def judged(root: Path, runs: pd.DataFrame, slo: Mapping[str, float]) -> pd.DataFrame:
    """The table with goodput and attainment under other limits than the runs were made with."""
    from analysis.metrics import goodput
    from analysis.run import load_files

    runs = runs.copy()
    for name in runs:
        if str(name).startswith(("goodput", "slo_attainment")):
            runs[name] = float("nan")
    for key in LIMITS:
        runs[f"config.slo.{key}_s"] = slo.get(f"{key}_s", float("nan"))
    for at in runs.index[runs["status"].eq("ok")]:
        for name, value in goodput(load_files(root / str(runs.loc[at, "run"])), slo).items():
            runs.loc[at, name] = value
    return runs
