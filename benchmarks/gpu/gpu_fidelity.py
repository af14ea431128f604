"""Claim: a GPU serves 200 ShareGPT requests as predicted, at 50 and 80 % of its capacity.

An 8B-shape Llama in bf16 with random weights, calibrated once on synthetic requests; the capacity
is measured first. Judged at each load: throughput within 3 %, mean TPOT and E2E within 5 %, the
peak of KV pages equal in the replay of the measured plan log, the allocator's peak within 3 %.
TTFT, percentiles, the free-running peak and the drift of probes are published without a bar. The
value is the largest used share of a bar. One run per load, because GPU time is short. With --keep
an interrupted call resumes. Without a GPU it prints so and ends with 0; `--backend cpu --model
micro_llama --device cpu` tries it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analysis.distance import drift
from analysis.fidelity import kv_peak_pages
from analysis.metrics import summary
from analysis.run import Run, load
from benchmarks.fidelity.cases import keep, say
from benchmarks.gpu.gpu_batch import TRIED
from benchmarks.gpu_parts import CARRIED
from tandem.cli.calibrate import main as calibrate
from tandem.cli.compare import replay_of
from tandem.fidelity.protocol import capacity, cleared, run
from tandem.wiring.cost import COST

OUT = Path("benchmarks/results/gpu_fidelity.csv")
LOADS = (0.5, 0.8)
BARS: Mapping[str, float] = {
    "request_throughput": 0.03,
    "mean_tpot_s": 0.05,
    "mean_e2e_s": 0.05,
    "kv_peak_pages_replayed": 0.0,
    "allocator_peak_bytes": 0.03,
}
FIGURES = (
    "request_throughput",
    *(f"{stat}_{name}_s" for name in ("ttft", "tpot", "e2e") for stat in ("mean", "p50", "p99")),
)
COLUMNS = ["case", "figure", "measured", "error", "bar", "used"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--policy", default="chunked_restart")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--graph-rows", type=int, default=128, help="of the largest CUDA graph")
    parser.add_argument("--trace", type=Path, default=CARRIED if CARRIED.is_file() else None)
    parser.add_argument("--keep", type=Path, help="folder of profile and runs, to go on with")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(words)
    if chosen.backend == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    table = pd.DataFrame()
    with tempfile.TemporaryDirectory() as temporary:
        for case in cases(chosen, chosen.keep or Path(temporary)):
            table = pd.concat([table, case])
            keep(table, chosen.out)  # a call may be cut at the next load
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))
    worst = float(table["used"].max())
    verdict = "pass" if worst <= 1 else "fail"
    verdict = verdict if chosen.backend == "cuda" else TRIED
    print(f"gpu_fidelity_worst {worst:.3g} of_bar 1 {verdict}")
    return int(verdict == "fail")


def cases(chosen: argparse.Namespace, root: Path) -> Iterator[pd.DataFrame]:
    """One judged table per load."""
    settings = settings_of(chosen)
    backend, profile = (f"backend={chosen.backend}",), root / "profile"
    if not (profile / COST).is_file():
        say("calibrating")
        calibrate([*settings, *backend, "--out", str(profile)])
    rate = capacity(settings, backend, root / "capacity", replaces=True)
    say(f"capacity {rate:.3g} requests/s")
    for share in chosen.loads:
        at, folder = (*settings, f"arrival.rate={share * rate}"), root / f"{share:.0%}"
        measured = run((*at, *backend), folder / "measured", replaces=True)
        predicted = run((*at, f"profile={profile}"), folder / "predicted", replaces=True)
        cleared(folder / "replayed")
        replayed = load(replay_of(predicted, measured, folder / "replayed"))
        say(f"{share:.0%} of it done")
        yield judged(f"{chosen.policy}@{share:.0%}", measured, predicted, replayed)


def settings_of(chosen: argparse.Namespace) -> tuple[str, ...]:
    """Overrides of all runs: trace, model, device and policy."""
    trace = [f"trace.path={chosen.trace.absolute()}"] if chosen.trace else []
    on_gpu = ["budget.host_bytes=4294967296", f"budget.graph_rows={chosen.graph_rows}"]
    return (
        f"trace={'file' if trace else 'sample'}",
        *trace,
        f"limit={chosen.requests}",
        f"model={chosen.model}",
        f"device={chosen.device}",
        f"policy={chosen.policy}",
        *(on_gpu if chosen.backend == "cuda" else []),
    )


def judged(case: str, measured: Run, predicted: Run, replayed: Run) -> pd.DataFrame:
    """Figures of one load with their signed relative errors and the used shares of bars."""
    real, guessed = summary(measured), summary(predicted)
    pairs = [(name, float(real[name]), float(guessed[name])) for name in FIGURES]
    pages = kv_peak_pages(measured)
    pairs.append(("kv_peak_pages_replayed", pages, kv_peak_pages(replayed)))
    pairs.append(("kv_peak_pages", pages, kv_peak_pages(predicted)))
    pairs.append(("allocator_peak_bytes", allocator_peak(measured), allocator_peak(predicted)))
    pairs.append(("launch_peak_bytes", launch_peak(measured), launch_peak(predicted)))
    rows = [(name, value, guess / value - 1) for name, value, guess in pairs]
    if (moved := drift(measured)) is not None:
        rows.append(("probes_moved", 1.0, moved))
    table = pd.DataFrame(rows, columns=COLUMNS[1:4]).assign(case=case)
    table["bar"] = table["figure"].map(BARS)
    table["used"] = [used(*pair) for pair in zip(table["error"], table["bar"], strict=True)]
    return table[COLUMNS]


def used(error: float, bar: float) -> float:
    """The share of a bar that an error uses; NaN without a bar."""
    if np.isnan(bar):
        return np.nan
    if error == 0:
        return 0.0
    return abs(error) / bar if bar else np.inf


def allocator_peak(run: Run) -> float:
    """Most bytes of the device that clients of torch's allocator held.

    Measured: persistent bytes (weights, the whole arena, graphs) plus those of the largest launch.
    Predicted: the bytes booked for these, plus the formula of that launch.
    """
    rows, on_top = run.memory[run.memory["tier"].eq("gpu")], launch_peak(run)
    if run.is_measured:
        return float(rows["measured_bytes"].max()) + on_top
    reserve = run.provenance["memory_plan"]["reserve_bytes"]
    graphs = reserve - run.config["device"]["reserve_bytes"]
    return float(rows["capacity_bytes"].max()) + graphs + on_top


def launch_peak(run: Run) -> float:
    """Most workspace bytes of a launch: the part of the peak that is not reserved beforehand."""
    return float(run.steps["peak_bytes"].max())


if __name__ == "__main__":
    sys.exit(main())
