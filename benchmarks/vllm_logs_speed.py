"""Claim: each of vLLM's logged runs is simulated within a second.

The two logs of vllm_logs.py, judged settings, 300 requests each. CPU seconds of the replay, from
built settings to every token's time; no table is written (which predicts workspace). A simulation
is deterministic, so the least of RUNS is the work and the rest is the machine. The value is the
slower log's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.vllm_logs import CASES, Log, read_log, simulate
from tandem.compiled import form

RUNS, BAR_S = 3, 1.0


def cpu_s(log: Log) -> float:
    """The least CPU seconds of several replays of a log, each with costs that nobody has asked."""
    taken = []
    for _ in range(RUNS):
        setting = log.setting()
        start = time.process_time()
        simulate(setting)
        taken.append(time.process_time() - start)
    print(f"{log.case.device}: {', '.join(f'{s:.2f}' for s in taken)} CPU s")
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
