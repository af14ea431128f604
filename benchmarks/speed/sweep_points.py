"""Claim: what a point of a sweep costs is its simulation.

200 points (policy x arrival rate x pages of KV) of 1,000 first turns each, Llama-3-8B on an A100 by
the roofline. Two bars: CPU seconds of `tandem sweep` in two processes, start-up, workers and tables
included; and the median CPU seconds of a point beside its replay by the engine, of POINTS points in
this process. Bars are scaled by machine_speed.py. The value is the larger
share of a bar. `--quick` takes 20 points.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.speed.machine_speed import machine_speed
from benchmarks.speed.sweep import children_s
from engine.loop.engine import Engine
from tandem.sweeps.grid import grid_of
from tandem.sweeps.point import points_in, run_point, task_of
from traces.importing import import_trace

BAR_S, BESIDE_S = 100.0, 0.05
POINTS = 8  # priced beside their replay, of those of the grid
FIXED = ("model=llama3_8b", "device=a100", "trace=file")
GRID = (
    "policy=chunked_restart,continuous_swap,vllm_v1,sarathi",
    "arrival.rate=2,4,8,12,16,20,24,28,32,40",
    "budget.kv_pages=2000,4000,8000,16000,27000",
)
QUICK = ("policy=chunked_restart,vllm_v1", "arrival.rate=4,16", "budget.kv_pages=2000,4000,8000")


def sweep_s(words: Sequence[str], out: Path) -> tuple[float, int]:
    """CPU seconds of `tandem sweep` and its workers, and the points. SystemExit if it fails."""
    before = children_s()
    command = [sys.executable, "-m", "tandem", "sweep", *words, "--jobs", "2", "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    return children_s() - before, len(points_in(out))


def beside_s(words: Sequence[str], out: Path) -> float:
    """Median CPU seconds of a point beside its replay; the first one also imports."""
    points = list(grid_of(words).points())
    found: list[float] = []
    replay = Engine.replay

    def timed(engine: Engine, *given: Any) -> None:
        begun = time.process_time()
        replay(engine, *given)
        inside.append(time.process_time() - begun)

    with patch.object(Engine, "replay", timed):
        for point in points[:: max(1, len(points) // (POINTS + 1))]:
            inside: list[float] = []
            begun = time.process_time()
            outcome = run_point(task_of(point, out))
            assert outcome.error is None, outcome.error
            found.append(time.process_time() - begun - sum(inside))
    return statistics.median(found[1:])


def main() -> int:
    """Prints both figures; the last line is the larger share of a bar."""
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve() / "data"
    scale = 1 / machine_speed()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = folder / "first.parquet"
        source = data / "lengths/sharegpt_v3_firstturn_llama2.parquet"
        import_trace(source, lengths, limit=1000, max_total_tokens=2048)
        axes = QUICK if "--quick" in sys.argv else GRID
        words = [*FIXED, f"trace.path={lengths}", f"cache={folder / 'cache'}", *axes]
        one_s = beside_s(words, folder / "points")
        all_s, count = sweep_s(words, folder / "sweep")
    bar_s = scale * BAR_S * count / 200
    print(f"a point beside its replay: {one_s:.3f} CPU s (bar {scale * BESIDE_S:.3f})")
    print(f"{count} points in 2 processes: {all_s:.1f} CPU s (bar {bar_s:.1f})")
    worst = max(one_s / (scale * BESIDE_S), all_s / bar_s)
    print(f"sweep_points_share_of_bar {worst:.2f} ratio 1 {'pass' if worst <= 1 else 'fail'}")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main())
