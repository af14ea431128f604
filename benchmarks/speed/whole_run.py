"""Claim: `tandem run` is fast as a user types it, start-up and tables on disk included.

Each case is a process of its own, measured by the CPU time and the peak memory of its process. A
case is run three times after a run that fills caches, and its median counts. The cases:

- serve: 4,000 ShareGPT requests at 2/s, Vidur's tables of Llama-2-7B on an A100, Sarathi-512,
  run-ahead 1, 54,912 steps; at least 1,500 requests per CPU second (2,000 compiled) in 400 MB.
  Beside it stands what Vidur takes for these requests with its own output written: at least 6 times
  as long
- roofline: 1,000 first turns at 12/s, Llama-3-8B on an A100, vLLM's scheduling; at most 1.4 s
- default: 1,000 first turns at 4/s on the default device; at most 4 s
- train: PatrickStar trains GPT-2 20B for 50 steps; at most 3 s
- logs: 300 requests of a vLLM log by a kernel profile; at most 1 s
- start: `tandem run` of three requests; at most 0.8 s
- help: `tandem --help`; at most 0.1 s

Bars are those of a machine on which the engine alone served 4,000 requests a CPU second when they
were set. They are scaled by machine_speed.py. The value is
the largest share of a bar. `--quick` counts one run. The stages of the first case stand below.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.behaviour_runs import write_vidur
from benchmarks.fidelity.vllm_logs import CASES, read_log
from benchmarks.speed.machine_speed import machine_speed
from benchmarks.speed.training_planning_speed import WORDS as TRAINED
from tandem.compiled import form
from tandem.wiring.folder import ROOT
from traces.importing import import_trace

VIDUR_S = 2.1e-3 + 2.2e-3  # CPU seconds of a request there: its loop, and its own output
VIDUR = 6.0  # times as fast
MEGABYTES = 400.0  # of the case that serves
REQUESTS = 4000
RUNS = 3


@dataclass(frozen=True)
class WholeRun:
    """A process by its words behind `tandem`, and the most CPU seconds that it may take."""

    name: str
    words: tuple[str, ...]
    bar_s: float


def command(words: Sequence[str]) -> list[str]:
    """The command line of `tandem`, in the form that this process runs in."""
    compiled = ["-m", "tandem.compiled"] if form() == "compiled" else []
    return [sys.executable, *compiled, "-m", "tandem", *words]


def cases(data: Path, folder: Path) -> list[WholeRun]:
    """The cases; their traces are written into the folder."""
    write_vidur(data / "peers/inputs/sharegpt_n4000_qps2_seed42.csv", folder / "vidur.csv")
    source, lengths = (
        data / "lengths/sharegpt_v3_firstturn_llama2.parquet",
        folder / "first.parquet",
    )
    import_trace(source, lengths, limit=1000, max_total_tokens=2048)
    first = ("trace=file", f"trace.path={lengths}")
    log = read_log(data, CASES[0], folder)
    return [
        WholeRun(
            "serve",
            (
                *("run", "model=llama2_7b", "device=a100", "policy=sarathi", "depth=1"),
                f"profile='{data / 'peers/cost_tables/llama2-7b_a100_tp1.npz'}'",
                *("budget.kv_pages=7424", "trace=recorded", f"trace.path={folder / 'vidur.csv'}"),
            ),
            REQUESTS / (2000 if form() == "compiled" else 1500),
        ),
        WholeRun(
            "roofline",
            ("run", "model=llama3_8b", "device=a100", "policy=vllm_v1", "arrival.rate=12", *first),
            1.4,
        ),
        WholeRun("default", ("run", "arrival.rate=4", *first), 4.0),
        WholeRun("train", ("run", *TRAINED, "training.num_steps=50"), 3.0),
        WholeRun("logs", ("run", *log.words, f"budget.kv_pages={log.case.pages}"), 1.0),
        WholeRun("start", ("run", "limit=3"), 0.8),
        WholeRun("help", ("--help",), 0.1),
    ]


def measured(case: WholeRun, folder: Path) -> tuple[float, float]:
    """CPU seconds and peak MB of a process. SystemExit where it fails."""
    words = command(case.words)
    if case.words[0] == "run":
        words += ["hydra.run.dir=out", f"cache={folder / 'cache'}"]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as a user's are
        with (Path(own) / "said.txt").open("wb") as said:
            process = subprocess.Popen(words, cwd=own, env=env, stdout=said, stderr=said)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # Popen did not see its end
        if process.returncode:
            sys.exit(
                f"{' '.join(words)}\n{(Path(own) / 'said.txt').read_text(encoding='utf-8')[-2000:]}"
            )
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def stages(case: WholeRun, folder: Path) -> str:
    """The stages of a case, as run_stages prints them."""
    words = [*case.words, "hydra.run.dir=out", f"cache={folder / 'cache'}"]
    text = f"from benchmarks.speed.run_stages import main; main({words!r})"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=own, env=env, capture_output=True, text=True
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    return "\n".join(line for line in lines if "%" in line)


def main() -> int:
    """Prints a line for each case; the last line is the largest share of a bar."""
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve() / "data"
    runs, shares = 1 if "--quick" in sys.argv else RUNS, []
    speed = machine_speed()
    print(form())
    print(f"{speed:.2f} times as fast as the machine of the bars")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(data, Path(folder)):
            found = [measured(case, Path(folder)) for _ in range(runs + 1)][1:]  # caches are filled
            taken_s, peak_mb = (statistics.median(values) for values in zip(*found, strict=True))
            bar_s = case.bar_s / speed
            shares.append(taken_s / bar_s)
            told = f"{case.name}: {taken_s:.2f} CPU s (bar {bar_s:.2f})"
            if case.name == "serve":  # a small process would be told this one's own peak
                shares.append(peak_mb / MEGABYTES)
                told += f", {peak_mb:.0f} MB (bar {MEGABYTES:.0f}), "
                told += f"{REQUESTS / taken_s:.0f} requests per CPU second"
                times = VIDUR_S / speed * REQUESTS / taken_s
                shares.append(VIDUR / times)
                told += f"; {times:.1f} times as fast as Vidur (bar {VIDUR:g})"
            print(told)
        if form() == "interpreted":
            print("stages of the first case")
            print(stages(cases(data, Path(folder))[0], Path(folder)))
    worst = max(shares)
    print(f"whole_run_share_of_bar {worst:.2f} ratio 1 {'pass' if worst <= 1 else 'fail'}")
    return int(worst > 1)


if __name__ == "__main__":
    sys.exit(main())
