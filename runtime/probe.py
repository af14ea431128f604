"""Has the machine drifted? Three fixed launches, timed before and after a measured run."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import simpy

from engine.executor import Executor
from runtime.driver import driving
from runtime.machine import Machine
from runtime.shapes import probes

WARM_UP = 20  # rounds that are not kept


def probe(
    env: simpy.Environment, executor: Executor, machine: Machine, repeats: int = 150
) -> dict[str, float]:
    """Median seconds of each probe launch over `repeats` rounds, after a few to warm up.

    The shapes take turns, as launches do in a replay: one shape alone, back to back, runs up to
    twice as fast from its caches and then says little about the machine. Takes an executor of the
    replay's own kind over the same machine, but on a clock of its own: a replay starts at time 0.
    Its pages are free before and after. So many rounds take some 0.3 s for a small model: a
    shared machine's speed wanders within a tenth of that, and a short look would see mostly this.
    """
    with driving(env, executor, machine) as driver:
        shapes = probes(driver.limits, driver.page)
        rounds = [
            {name: driver.run(shape).compute_ns for name, shape in shapes.items()}
            for _ in range(WARM_UP + repeats)
        ]
    kept = rounds[WARM_UP:]
    return {name: median(taken_ns[name] for taken_ns in kept) / 1e9 for name in shapes}


def ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By what factor each probe took longer after the run than before it."""
    return {name: after[name] / before[name] for name in before}
