"""Claim: one calibration, then predictions and measurements, as the guide tells it, come close.

A model, a policy and conversations that no claim of cpu_fidelity has, at 50 and 80 % of the
capacity. `tandem calibrate --stream` at the load's rate, then `tandem run` in the simulator and,
twice, on this CPU, with the clock of reference works. Nothing is measured in turns and no run is
discarded, so the bars are wider than those of `tandem fidelity`: 10 % of mean TPOT and E2E, 3 % of
throughput, 5 % of peak KV, for every single run. Run it alone.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from analysis.fidelity import KV_PEAK, THROUGHPUT, figures_of
from analysis.run import load
from benchmarks.fidelity.cases import finish, say
from benchmarks.fidelity.fidelity_command import CONF, WORKLOADS, unseen_trace
from tandem.cli.__main__ import main as tandem
from tandem.fidelity.protocol import capacity

OUT = Path("benchmarks/results/calibrated_once.csv")
BARS = {THROUGHPUT: 0.03, "mean_tpot_s": 0.10, "mean_e2e_s": 0.10, KV_PEAK: 0.05}
PRINTED = ("mean_ttft_s", "p50_tpot_s", "p90_tpot_s", "p99_tpot_s", "p90_e2e_s", "p99_e2e_s")
LOADS, RUNS, REQUESTS = (0.5, 0.8), 2, 200
CLOCK = ("backend=cpu", "backend.reference_ns=auto")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="80 %% alone, 20 requests, one run")
    parser.add_argument("--keep", type=Path, help="folder for all runs")
    chosen = parser.parse_args()
    loads, runs, requests = (LOADS[1:], 1, 20) if chosen.quick else (LOADS, RUNS, REQUESTS)
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        rows = [*measured(root, loads, runs, requests)]
    columns = ["case", "figure", "measured", "error", "bar", "used"]
    table = pd.DataFrame(rows, columns=columns)
    out = OUT.with_stem(f"{OUT.stem}_part") if chosen.quick else OUT
    return finish("calibrated_once_worst", table, out)


def measured(
    root: Path, loads: Sequence[float], runs: int, requests: int
) -> Iterator[tuple[str, str, float, float, float, float]]:
    """Rows of every measured run."""
    workload, trace = WORKLOADS[0], unseen_trace(root, requests)
    words = [*workload.settings, "trace=file", f"trace.path={trace}"]
    settings = [word for word in words if not word.startswith("--")]
    most = capacity(settings, ("backend=cpu",), root / "capacity", config_dir=str(CONF))
    for load_share in loads:
        case, folder = f"{workload.name}@{load_share:.0%}", root / f"load-{100 * load_share:.0f}"
        own = [*words, f"arrival.rate={load_share * most:.4g}"]
        say(f"{case}: calibrating")
        _done(["calibrate", "--stream", *own, *CLOCK, f"--out={folder / 'profile'}"])
        priced = [*own, f"profile={folder / 'profile'}"]
        _done(["run", *priced, f"hydra.run.dir={folder / 'predicted'}"])
        predicted = figures_of(load(folder / "predicted"))
        for number in range(runs):
            say(f"{case}: run {number}")
            where = folder / f"measured-{number}"
            _done(["run", *priced, *CLOCK, f"hydra.run.dir={where}"])
            found = figures_of(load(where))
            for figure in (*BARS, *PRINTED):
                bar = BARS.get(figure, math.nan)
                error = predicted[figure] / found[figure] - 1
                assert math.isfinite(error), f"{case}: {figure} is not known"
                yield f"{case} run {number}", figure, found[figure], error, bar, abs(error) / bar


def _done(words: Sequence[str]) -> None:
    """Runs a command of tandem; AssertionError where it fails."""
    code = tandem([*words])
    assert code == 0, f"tandem {' '.join(words)}: {code}"


if __name__ == "__main__":
    sys.exit(main())
