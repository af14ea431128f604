"""Claim: swapping on real threads is predicted, by the wall clock and over a slow link.

KV is too small for the load, so jobs are copied to the host and back while other jobs compute. The
measurement has a thread per lane in real time (backend=cpu, clock=wall) at 80 % of the measured
capacity; the bars are those of analysis/fidelity.py. The machine must be idle otherwise:
the wall clock sees every other process. Time is counted in reference works, because the machine's
speed drifts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.fidelity import COLUMNS, Pair, judged, steady_pairs, table_of
from analysis.run import Run
from analysis.usage import copied_bytes
from benchmarks.fidelity.cases import finish, say
from tandem.fidelity.protocol import PACE, Case, calibrated, capacity, clock_of, reruns

OUT = Path("benchmarks/results/swap_fidelity.csv")
MEASURED = (
    "backend=cpu",
    "backend.clock=wall",
    "backend.probe_look_s=5",
    "backend.workspace_every=0",
)
REPLAYS = 2  # of the calibration; more follow between the runs
LOAD = 0.8
HOST_BYTES = 64 * 2**20  # room for all; each reading of the meter walks the whole arena


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--reruns", type=int, default=5)
    parser.add_argument("--pages", type=int, default=200, help="KV pages: the pressure")
    parser.add_argument("--link-mb-per-s", type=float, default=100.0)
    parser.add_argument("--quick", action="store_true", help="30 requests, 2 reruns")
    parser.add_argument("--keep", type=Path, help="folder for all runs; default: temporary")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.requests, chosen.reruns = 30, 2
    with tempfile.TemporaryDirectory() as temporary:
        table = measured_table(chosen, chosen.keep or Path(temporary))
    out = OUT if not chosen.quick else OUT.with_name("swap_fidelity_part.csv")
    return finish("swap_fidelity_worst", table, out)


def measured_table(chosen: argparse.Namespace, root: Path) -> pd.DataFrame:
    """Calibrates on the wall clock, measures the capacity, then the reruns."""
    rate = chosen.link_mb_per_s * 1e6
    settings: tuple[str, ...] = (
        "experiment=fidelity_chunked_swap",
        "model=micro_llama",  # as cpu_fidelity: smaller, so that reruns are many and short
        f"limit={chosen.requests}",
        f"device.to_host_bytes_per_s={rate}",
        f"device.to_device_bytes_per_s={rate}",
        "scheduling.max_jobs=32",
        f"budget.host_bytes={HOST_BYTES}",
        f"budget.kv_pages={chosen.pages}",  # calibrated in the arena that is judged
    )
    auto = (*MEASURED, f"{PACE}auto")
    profile = calibrated([*settings, *auto], root / "profile", REPLAYS, say)
    backend = (*MEASURED, clock_of(profile))
    ceiling = capacity(settings, backend, root / "capacity")
    say(f"capacity {ceiling:.3g} requests/s")
    settings = (*settings, f"arrival.rate={LOAD * ceiling}")
    case = Case(f"chunked_swap@{LOAD:.0%} wall", settings, root / "runs", profile)
    pairs = steady_pairs(reruns(case, backend, chosen.reruns, say))
    table = table_of(case.name, pairs, chosen.reruns)
    return judged(pd.concat([table, swapped(case, pairs)]), judges_ttft=False)


def swapped(case: Case, pairs: Sequence[Pair]) -> pd.DataFrame:
    """Swaps and copied bytes, and two rows that must hold so that the claim tests swapping.

    Every run of every pair swapped, and the replay of the measured plan log copied equal bytes.
    Free-running decisions may swap at other moments: their figures have no bar.
    """
    runs = [run for pair in pairs for run in (pair.measured, pair.predicted)]
    copies = [(copied_bytes(pair.replayed), copied_bytes(pair.measured)) for pair in pairs]
    held = {
        "swapped_in_every_run": bool(runs) and all(swaps(run) > 0 for run in runs),
        "bytes_copied_replayed_equal": bool(runs) and all(a == b for a, b in copies),
    }
    rows: list[tuple[str, str, float, float, float, float]] = []
    for name, figure in (("swaps", swaps), ("bytes_copied", copied_bytes)) if runs else ():
        real, predicted = (
            float(np.median([figure(getattr(pair, role)) for pair in pairs]))
            for role in ("measured", "predicted")
        )
        error = predicted / real - 1 if real else float("nan")  # of medians, not of pairs
        rows.append((case.name, name, real, error, float("nan"), 0.0))
    rows += [(case.name, name, float(holds), 0.0, 0.0, 0.0) for name, holds in held.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def swaps(run: Run) -> int:
    """The number of swaps of all requests."""
    return int(run.requests["swaps"].sum())


if __name__ == "__main__":
    sys.exit(main())
