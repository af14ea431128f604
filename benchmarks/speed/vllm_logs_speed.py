"""Claim: each of vLLM's logged runs is simulated within a second.

The two logs of vllm_logs.py, judged settings, 300 requests each. CPU seconds of the replay, from
built settings to every token's time; no table is written (tables need predicted workspace). Printed
beside: the time with composing settings and reading the profile, which does not grow with a run. A
simulation is deterministic, so the shortest of RUNS is the work and the rest is noise of the
machine. The value is the slower log's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fidelity.vllm_logs import CASES, Log, read_log, simulate
from tandem.compiled import form

RUNS, BAR_S = 3, 1.0


def cpu_s(log: Log) -> float:
    """The fewest CPU seconds of several replays of a log, each with a cost without look-ups."""
    taken, whole = [], []
    for _ in range(RUNS):
        begin = time.process_time()
        setting = log.run_spec()
        start = time.process_time()
        simulate(setting)
        end = time.process_time()
        taken.append(end - start)
        whole.append(end - begin)
    shown = ", ".join(f"{s:.2f}" for s in taken)
    print(f"{log.case.device}: {shown} CPU s; with its settings and profile {min(whole):.2f}")
    return min(taken)


def main() -> int:
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve() / "data"
    print(form())
    with tempfile.TemporaryDirectory() as folder:
        worst = max(cpu_s(read_log(data, case, Path(folder))) for case in CASES)
    passed = worst <= BAR_S
    print(f"vllm_logs_cpu_seconds {worst:.2f} s {BAR_S:g} {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
