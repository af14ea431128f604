"""Claim: run-ahead 2 with the host's time costs at most 1.3 times the CPU of run-ahead 1 without.

Requests, tables, policy and pages are those of simulator_speed.py. The host takes 0.1 ms a plan and
5 us a slice, as conf/device assumes. Runs take turns in one process, and the median of the ratios
of a turn counts. Printed beside: run-ahead 1 with that host; of each run its CPU seconds, steps,
questions and jumps; and whether the tables of run-ahead 2 are those of a run step by step.
`--quick` takes 1,000 requests and fewer turns.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fidelity.vidur import LLAMA2_7B, read_requests
from benchmarks.speed.simulator_speed import simulate
from engine.contract.executor import Launch
from engine.fast_forward.fast_forward import FastForward
from engine.loop.engine import Engine
from sim.foreign.vidur import VidurCost
from tandem.compiled import form
from traces.serving.request import Request

BAR = 1.3
TURNS = 7
PLAN_NS, SLICE_NS = 100_000, 5_000


class HostedCost:
    """A cost, with a host that prepares plans. No subclass of the cost: that may be compiled."""

    def __init__(self, cost: VidurCost) -> None:
        for name in dir(cost):
            if not name.startswith("_") and name != "host_ns":
                setattr(self, name, getattr(cost, name))

    def host_ns(self, launches: Sequence[Launch]) -> int:
        """Host time of a plan, in ns."""
        slices = 0
        for launch in launches:  # plain Python beside an engine that may be compiled: kept lean
            slices += len(launch.pieces)
        return PLAN_NS + SLICE_NS * slices


def timed_s(requests: list[Request], cost: VidurCost, depth: int) -> tuple[float, Engine]:
    """CPU seconds of a replay."""
    gc.collect()
    began = time.process_time()
    engine = simulate(requests, cost, depth=depth)
    return time.process_time() - began, engine


def jumps(engine: Engine) -> int:
    """How often many steps, or one, were issued at once."""
    reuse = engine.reuse
    assert isinstance(reuse, FastForward) and reuse.jump is not None
    return reuse.jump.runs


def is_equal(requests: list[Request], cost: VidurCost) -> bool:
    """Whether all tables equal those of a step-by-step run, at run-ahead 2."""
    fast, slow = (simulate(requests, cost, f, depth=2) for f in (True, False))
    return fast.recorder.tables() == slow.recorder.tables()


def main() -> int:
    is_quick = "--quick" in sys.argv[1:]
    peers = Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data" / "peers"
    requests = read_requests(peers / "inputs/sharegpt_n4000_qps2_seed42.csv")
    requests = requests[:1000] if is_quick else requests
    bare = VidurCost.load(peers / "cost_tables" / "llama2-7b_a100_tp1.npz", LLAMA2_7B)
    hosted: Any = HostedCost(bare)
    cases = {
        "run-ahead 1 without host": (bare, 1),
        "run-ahead 1 with host": (hosted, 1),
        "run-ahead 2 with host": (hosted, 2),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    told = {}
    for _ in range(3 if is_quick else TURNS):
        for name, (cost, depth) in cases.items():
            seconds, engine = timed_s(requests, cost, depth)
            taken[name].append(seconds)
            told[name] = f"{engine.steps} steps, {engine.asked} questions, {jumps(engine)} jumps"
    print(f"{form()}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    for name, seconds_each in taken.items():
        print(f"{name}: {statistics.median(seconds_each):.2f} CPU s, {told[name]}")
    alone, with_host, ahead = taken.values()
    ratio, beside = (
        statistics.median([a / b for a, b in zip(ahead, other, strict=True)])
        for other in (alone, with_host)
    )
    equal = is_equal(requests[:1000], hosted)
    print(
        f"{beside:.2f} times run-ahead 1 with host; tables are {'equal' if equal else 'DIFFERENT'}"
    )
    passed = ratio <= BAR and equal
    print(f"run_ahead_cost_ratio {ratio:.2f} ratio {BAR} {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
