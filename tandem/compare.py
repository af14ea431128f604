"""`tandem compare`: two runs of one trace, how far apart they are and why."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from analysis.compare import Comparison, check_same_trace, compare
from analysis.run import Run, load


def main(words: Sequence[str]) -> int:
    """Prints the table and the path of the report."""
    parser = argparse.ArgumentParser(
        prog="tandem compare",
        description="Compares a predicted run with a measured one (or any two runs of one trace). "
        "The measured plan log is replayed in the simulator to tell errors of time from decisions "
        "that diverged.",
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="folder of the report; default: beside the runs")
    parser.add_argument("--no-replay", action="store_true", help="leave the replay out")
    chosen = parser.parse_args(words)
    first, second = chosen.runs
    comparison, page = compare_folders(first, second, chosen.out, not chosen.no_replay)
    from analysis.words import table

    print(table(comparison))
    print(f"report: {page}")
    return 0


def compare_folders(
    first: Path, second: Path, out: Path | None = None, replays: bool = True
) -> tuple[Comparison, Path]:
    """Compares and writes the report; the measured run is the yardstick whatever the order."""
    from analysis.report import write_report

    a, b = load(first), load(second)
    if a.is_measured and not b.is_measured:
        a, b = b, a
    check_same_trace(a, b)
    out = out or b.folder.with_name(f"{a.name}-against-{b.name}")
    replay = None
    if replays and b.is_measured and not a.is_measured:
        replay = load(replay_of(a, b, out.with_name(f"{out.name}-replay")))
    comparison = compare(a, b, replay)
    return comparison, write_report(comparison, out)


def replay_of(prediction: Run, measurement: Run, folder: Path) -> Path:
    """Simulates the measured run's plan log in the predicted run's configuration."""
    from tandem.compose import Composed
    from tandem.experiment import run_experiment

    if (folder / "status.json").is_file():
        shutil.rmtree(folder)  # an earlier comparison of the same two runs
    recorded = {"scheduling": None, "memory": None, "replayed": str(measurement.folder)}
    folders = [Path(name) for name in prediction.provenance.get("config_folders", ())]
    config = {**prediction.config, **recorded}
    run_experiment(Composed(config, ("policy=recorded",), tuple(folders)), folder)
    return folder
