"""Claim: of a co-serving replay on a CPU at most 5 % of the thread's time goes to the host.

The workload is that of the claim of fidelity at 80 % of the capacity of serving, on tiny_llama: 200
ShareGPT requests beside a LoRA job, under `budget`, `slo` and `temporal`, on the service clock. (On
micro_llama a launch takes two milliseconds, and the host has more than a fifth of serving alone.)
The host decides, checks and books plans, packs launches and settles them. Its share is that
of the host's and all launches' time together, so idle time does not count; of three replays the
median is taken, of the policies the worst. `slo` is quoted durations by the device's roofline.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from analysis.run import Run
from benchmarks.coserving.coserving_fidelity import POLICIES, REQUESTS, settings_of
from tandem.fidelity.protocol import capacity, run, serving_alone

BAR = 0.05
LOAD, REPLAYS = 0.8, 3
MODEL = ("model=tiny_llama", "budget.kv_pages=2048")  # KV for 48 of the longest requests
MEASURED = ("backend=cpu", "backend.workspace_every=0", "backend.probe_look_s=null")


def host_share(done: Run) -> float:
    """The host's time over that of host and launches."""
    steps = done.steps
    host_ns = float(steps["host_ns"].sum())
    return host_ns / (host_ns + float((steps["end_ns"] - steps["start_ns"]).sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 requests, one replay")
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    parser.add_argument("--load", type=float, default=LOAD)
    chosen = parser.parse_args()
    requests, replays = (20, 1) if chosen.quick else (REQUESTS, REPLAYS)
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for policy in chosen.policies:
            words = [*settings_of(policy), *MODEL, f"limit={requests}"]
            rate = chosen.load * capacity(words, MEASURED, root / policy / "capacity")
            words += [*MEASURED, f"arrival.rate={rate}"]
            alone = run(serving_alone(words), root / policy / "alone")
            done = [run(words, root / policy / f"run{i}") for i in range(replays)]
            share = median(map(host_share, done))
            plans = sum([len(one.plans) for one in done])
            each_us = sum([one.steps["host_ns"].sum() for one in done]) / plans / 1e3
            print(
                f"{policy}: {rate:.3g} requests/s, host {share:.2%} "
                f"({', '.join(f'{host_share(one):.2%}' for one in done)}), {each_us:.0f} us a "
                f"plan; serving alone {host_share(alone):.2%}"
            )
            worst = max(worst, share)
    print(f"coserving_host_share {worst:.4f} share {BAR} {'pass' if worst <= BAR else 'fail'}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
