"""Swapping on real threads: wall clock, a throttled link, copies that really take time.

Too little KV for the load, so jobs are copied to the host and back while others compute. Measured
with a thread per lane in real time (backend=cpu, clock=wall) at 80 % of the measured capacity;
the bars are those of benchmarks/fidelity.py. Needs an otherwise idle machine: the wall clock sees
every neighbour. Its rate is that of the reference work, since the machine's speed wanders.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd

from benchmarks.fidelity import (
    COLUMNS,
    PACE,
    Case,
    Pair,
    calibrated,
    capacity,
    clock_of,
    finish,
    judged,
    reruns,
    say,
    table_of,
)

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
    parser.add_argument("--requests", type=int, default=100)
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
    profile = calibrated("the wall clock", settings, auto, root / "profile", REPLAYS)
    backend = (*MEASURED, clock_of(profile))
    ceiling = capacity(settings, backend, root / "capacity")
    say(f"capacity {ceiling:.3g} requests/s")
    settings = (*settings, f"arrival.rate={LOAD * ceiling}")
    case = Case(f"chunked_swap@{LOAD:.0%} wall", settings, root / "runs", profile)
    pairs = reruns(case, backend, chosen.reruns)
    return judged(
        pd.concat([table_of(case, pairs, chosen.reruns), swapped(case, pairs)]), judges_ttft=False
    )


def swapped(case: Case, pairs: list[Pair]) -> pd.DataFrame:
    """How many swaps there were, and the share of copies in the run: the test of the test."""
    rows = []
    for name, value in (("swaps", "swaps"), ("bytes_copied", "nbytes")):
        counts = [
            float((pair.measured.requests if name == "swaps" else pair.measured.steps)[value].sum())
            for pair in pairs
        ]
        predicted = [
            float(
                (pair.predicted.requests if name == "swaps" else pair.predicted.steps)[value].sum()
            )
            for pair in pairs
        ]
        middle = sorted(counts)[len(counts) // 2]
        error = sorted(predicted)[len(predicted) // 2] / middle - 1 if middle else float("nan")
        rows.append((case.name, name, middle, error, float("nan"), 0.0))  # of medians, not of pairs
    return pd.DataFrame(rows, columns=COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
