"""Claim: a run of a million requests needs 2 GiB, and a request costs what it costs in a small run.

The 4,000 requests of whole_run.py are repeated up to a million, and up to 10,000. Both are whole
runs with every table written, as processes of their own. Then a run is killed in the middle:
nothing that it left may be taken as a run. The value is the larger of two shares: of the peak of
2 GiB, and of 1.15 times the CPU time of a request among 10,000. `--quick` takes 40,000 requests
in the place of a million.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from analysis.run import load
from benchmarks.speed.whole_run import WholeRun, cases, command, measured
from tandem.wiring.folder import running_folder

MANY, QUICK, FEW = 1_000_000, 40_000, 10_000
BAR_MB, BAR_COST = 2 * 2**30 / 1e6, 1.15
LONGEST_S, LOOK_S = 300.0, 0.05  # for rows of a run that will be killed


def repeated(case: WholeRun, trace: Path, count: int) -> WholeRun:
    """The case on so many requests: those of its trace again and again, each time later."""
    with trace.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    longer, last_s = trace.with_name(f"repeated{count}.csv"), float(rows[-1][0])
    with longer.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for i in range(count):
            turn, at = divmod(i, len(rows))
            arrival_s, *lengths = rows[at]
            writer.writerow([repr(float(arrival_s) + turn * last_s), *lengths])
    words = [f"trace.path={longer}" if w.startswith("trace.path=") else w for w in case.words]
    return replace(case, words=tuple(words))


def is_nothing_when_killed(case: WholeRun, folder: Path) -> bool:
    """Whether a run that is killed while it writes leaves no run."""
    out = folder / "killed"
    words = command([*case.words, f"hydra.run.dir={out}", f"cache={folder / 'cache'}"])
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    left, until_s, began = running_folder(out), time.monotonic() + LONGEST_S, False
    while process.poll() is None and time.monotonic() < until_s and not began:
        time.sleep(LOOK_S)
        began = any(path.stat().st_size for path in left.glob(".steps.parquet*"))
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    print(f"killed while it ran: {was_running}, with rows written: {began}")
    try:
        load(left)
    except ValueError as error:
        print(f"what it left is refused: {error}")
        return was_running and began and not (out / "status.json").exists()
    return False


def main() -> int:
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve() / "data"
    count = QUICK if "--quick" in sys.argv else MANY
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = cases(data, folder)[0]
        many, few = (repeated(case, folder / "vidur.csv", n) for n in (count, FEW))
        few_s, few_mb = measured(few, folder)
        many_s, many_mb = measured(many, folder)
        is_nothing = is_nothing_when_killed(many, folder)
    for n, taken_s, peak_mb in ((FEW, few_s, few_mb), (count, many_s, many_mb)):
        print(
            f"{n} requests: {taken_s:.1f} CPU s, {taken_s / n * 1e6:.0f} us each, {peak_mb:.0f} MB"
        )
    worst = max(many_mb / BAR_MB, many_s / count / (few_s / FEW) / BAR_COST)
    passed = worst <= 1 and is_nothing
    print(f"many_requests_share_of_bar {worst:.2f} ratio 1 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
