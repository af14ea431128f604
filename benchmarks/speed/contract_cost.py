"""Claim: to check every plan costs at most 3 % more CPU than the commit before the checks.

Two checkouts in turns, this one and BEFORE (from git, into a temporary folder), a process each, by
pairs whose order alternates; the value is the largest median ratio of three workloads: the
simulator (Sarathi on Vidur's tables, 1,000 requests, metrics included), an iteration of GPT-2 20B
under PatrickStar, and what the CPU runtime takes outside of forwards. Beside, without a bar, are
iterations for which the policy is asked each time, as only in the first steps of a job.
Instructions beside, as valgrind counts them (start-up taken off; no neighbour changes them), where
valgrind is installed. `python -m benchmarks.speed.contract_cost [--quick] [--pairs N] [--before
COMMIT]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("TANDEM_SHARED", ROOT.parent / "shared")).resolve()
BEFORE = "7f42b6e"  # the last commit that booked plans unchecked
BAR = 1.03

# What a child runs: it prints CPU seconds of the work alone. `N` is how much of it. In the commit
# before, the scripts lie in one folder.
SIMULATOR = """
import sys, time
try:
    from benchmarks.speed.simulator_speed import *
except ModuleNotFoundError:
    from benchmarks.simulator_speed import *
peers = Path(os.environ["TANDEM_SHARED"]) / "data" / "peers"
cost = VidurCost.load(peers / "cost_tables" / "llama2-7b_a100_tp1.npz", LLAMA2_7B)
requests = read_requests(peers / "inputs/sharegpt_n4000_qps2_seed42.csv")[: int(sys.argv[1])]
if int(sys.argv[2]):
    latencies_ns(simulate(requests[:200], cost))
began = time.process_time()
if requests:
    latencies_ns(simulate(requests, cost))
print(time.process_time() - began)
"""
ITERATION = """
import sys
from statistics import median
try:
    from benchmarks.speed import training_planning_speed as speed
except ModuleNotFoundError:
    from benchmarks import training_planning_speed as speed
setting = speed.setting_of(speed.composed(speed.WORDS))
times = []
for _ in range(int(sys.argv[1])):
    times += speed.simulate(setting)[1]
print(median(times) if times else 0)
"""
ASKED = ITERATION.replace(
    "times = []", "setting = speed.replace(setting, policy=speed.Asked(setting.policy))\ntimes = []"
)
RUNTIME = """
import sys
try:
    from benchmarks.speed import runtime_speed as speed
except ModuleNotFoundError:
    from benchmarks import runtime_speed as speed
work = speed.WORKLOADS[2]
requests = speed.requests_of(work)
model = speed.build_model(work.spec, seed=1, spread=speed.SPREAD)
if int(sys.argv[2]):
    speed.ours(model, work, requests[:4])
turn = speed.ours(model, work, requests[: int(sys.argv[1])])
print(turn.host * turn.took_s)
"""
UNBARRED = "20B iteration, asked each time"  # as in a job's first steps: told, without a bar
WORKLOADS = {  # program, how much, and how much where instructions are counted
    "simulator": (SIMULATOR, 1000, 300),
    "20B iteration": (ITERATION, 2, 1),
    "CPU runtime's bookkeeping": (RUNTIME, 16, 0),
    UNBARRED: (ASKED, 1, 0),
}


def main() -> int:
    """Prints each workload's ratio; the last line is the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--before", default=BEFORE)
    given = parser.parse_args()
    pairs = 3 if given.quick else given.pairs
    with tempfile.TemporaryDirectory(prefix="tandem-before-") as folder:
        before = Path(folder)
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", given.before], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(before)], input=archive.stdout, check=True)
        worst = 0.0
        for name, (program, size, counted) in WORKLOADS.items():
            ratios = []
            for i in tqdm(range(pairs), desc=name, disable=not sys.stderr.isatty()):
                order = (ROOT, before) if i % 2 else (before, ROOT)
                took_s = {where: seconds(where, program, size) for where in order}
                ratios.append(took_s[ROOT] / took_s[before])
            told = f"{min(ratios):.3f} to {max(ratios):.3f} in {pairs} pairs"
            print(f"{name}: median ratio {median(ratios):.3f}, {told}", end="", flush=True)
            print(instructions(before, program, counted) if counted and not given.quick else "")
            if name != UNBARRED:
                worst = max(worst, median(ratios))
    passed = worst <= BAR
    print(f"contract_cost_ratio {worst:.3f} x {BAR} {'pass' if passed else 'fail'}")
    return int(not passed)


def seconds(where: Path, program: str, size: int) -> float:
    """CPU seconds of a workload in a checkout."""
    return float(run(where, [sys.executable, "-c", program, str(size), "1"]))


def instructions(before: Path, program: str, size: int) -> str:
    """How many more instructions the work takes here, start-up taken off."""
    if shutil.which("valgrind") is None:
        return "; valgrind is not installed"
    counts = {}
    for where in (ROOT, before):
        run(where, [sys.executable, "-c", program, "0", "0"])  # bytecode is made
        whole, start = (counted(where, program, n) for n in (size, 0))
        counts[where] = whole - start
    return f"; {counts[ROOT] / counts[before] - 1:+.1%} instructions"


def counted(where: Path, program: str, size: int) -> int:
    """Instructions of a whole process."""
    words = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    told = run(where, [*words, sys.executable, "-c", program, str(size), "0"], stderr=True)
    line = next(line for line in told.splitlines() if "I" in line and "refs:" in line)
    return int(line.rsplit(maxsplit=1)[-1].replace(",", ""))


def run(where: Path, words: list[str], stderr: bool = False) -> str:
    """What a process that runs a checkout prints, one thread wide, on its last line (or all of its
    errors)."""
    own = {"PYTHONPATH": str(where), "TANDEM_SHARED": str(SHARED), "PYTHONHASHSEED": "0"}
    own |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(words, cwd=where, env={**kept, **own}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{where}: {done.stderr[-2000:]}")
    return done.stderr if stderr else done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
