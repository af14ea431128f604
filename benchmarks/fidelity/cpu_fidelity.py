"""CPU fidelity: 200 ShareGPT requests at 50, 80 and 120 % of the measured capacity, two policies.

The protocol is that of `tandem fidelity`, the bars are those of analysis/fidelity.py. The effect of
+-2 % step time on TTFT and on the peak of KV is published beside them, because near saturation a
queue amplifies so small an error.
The capacity is the throughput of all requests at once, drain included, which is less than the rate
of a steady stream that can be served: at 120 % of it no request queues for long.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from analysis.fidelity import COLUMNS, TTFT_UP_TO, judged, kv_peak_pages, steady_pairs, table_of
from analysis.metrics import summary
from benchmarks.fidelity.cases import AT_PACE, finish, keep, say, verdict_of
from tandem.fidelity.protocol import PACE, Case, calibrated, capacity, clock_of, reruns, run

OUT = Path("benchmarks/results/cpu_fidelity.csv")
POLICIES = ("continuous_restart", "chunked_restart")
LOADS = (0.5, 0.8, 1.2)
KV_PAGES = 4096  # room for 48 jobs of 1,365 tokens; each reading of the meter walks the whole arena
REPLAYS = 2  # of the calibration; more follow between the runs
MEASURED = (
    "backend=cpu",
    "backend.workspace_every=0",  # no sampling of workspace: only time
    "backend.probe_look_s=5",  # a shorter look sees bursts of other processes, not the drift
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--reruns", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--quick", action="store_true", help="60 requests, 2 reruns, 80 %% load")
    parser.add_argument("--model", default="micro_llama")
    parser.add_argument("--max-jobs", type=int, default=48)
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    parser.add_argument("--judge", action="store_true", help="judge the last figures, measure none")
    chosen = parser.parse_args()
    if chosen.judge:
        return judged_again()
    if chosen.quick:
        chosen.requests, chosen.reruns, chosen.loads = 60, 2, [0.8]
    is_whole = not chosen.quick and set(chosen.policies) >= set(POLICIES)
    is_whole = is_whole and set(chosen.loads) >= set(LOADS)
    out = OUT if is_whole else OUT.with_name("cpu_fidelity_part.csv")
    with tempfile.TemporaryDirectory() as temporary:
        root = chosen.keep or Path(temporary)
        table = pd.DataFrame()
        for part in points(chosen, root):  # written as it grows: it takes long
            table = pd.concat([table, part])
            keep(table, out.with_stem("cpu_fidelity_part"))
    out.with_stem("cpu_fidelity_part").unlink()
    return finish("cpu_fidelity_worst", table, out)


def judged_again() -> int:
    """Judges the last measured figures by the present bars; figures and origin stay unchanged.

    For a change of bars: a whole measurement takes more than an hour.
    """
    print("measured before:", OUT.with_suffix(".json").read_text(encoding="utf-8"))
    table = pd.read_csv(OUT)[COLUMNS]
    low = table["case"].str.endswith(f"@{min(LOADS):.0%}")
    table = pd.concat([judged(table[low], True), judged(table[~low], False)]).sort_index()
    table.to_csv(OUT, index=False)
    return verdict_of("cpu_fidelity_worst", table)


def points(chosen: argparse.Namespace, root: Path) -> Iterator[pd.DataFrame]:
    """One judged table per policy and load."""
    common = (
        "experiment=fidelity_chunked",
        f"model={chosen.model}",
        f"limit={chosen.requests}",
        f"scheduling.max_jobs={chosen.max_jobs}",
        f"budget.kv_pages={KV_PAGES}",
    )
    backend = (*MEASURED, f"{PACE}auto")
    for policy in chosen.policies:
        settings, folder = (*common, f"policy={policy}"), root / policy
        profile = calibrated([*settings, *backend], folder / "profile", REPLAYS, say)
        backend = (*MEASURED, clock_of(profile))
        rate = capacity(settings, backend, folder / "capacity")
        say(f"{policy}: capacity {rate:.3g} requests/s")
        for load in chosen.loads:
            at = (*settings, f"arrival.rate={load * rate}")
            case = Case(f"{policy}@{load:.0%}", at, folder / f"{load:.0%}", profile)
            pairs = steady_pairs(reruns(case, backend, chosen.reruns, say))
            table = table_of(case.name, pairs, chosen.reruns)
            yield judged(pd.concat([table, sensitivity(case)]), load <= TTFT_UP_TO)


def sensitivity(case: Case) -> pd.DataFrame:
    """The effect of +-2 % step time on the predicted mean TTFT and peak of KV."""
    figures = {}
    for pace in (0.98, 1.0, 1.02):
        done = run((*case.predicted, f"pace={pace}"), case.folder / f"pace{pace}")
        figures["mean_ttft_s", pace] = float(summary(done)["mean_ttft_s"])
        figures["kv_peak_pages", pace] = float(kv_peak_pages(done))
    rows = []
    for (figure, pace), value in figures.items():
        if pace != 1:
            own = figures[figure, 1.0]
            rows.append((case.name, f"{figure}{AT_PACE}{pace}", own, *[value / own - 1] * 2, 0.0))
    return pd.DataFrame(rows, columns=COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
