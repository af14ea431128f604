"""Has the machine drifted? Three fixed launches, timed before and after a measured run."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import simpy

from engine.executor import Executor
from runtime.driver import driving
from runtime.machine import Machine
from runtime.shapes import probes


def probe(
    env: simpy.Environment, executor: Executor, machine: Machine, repeats: int = 9
) -> dict[str, float]:
    """Median seconds of each probe launch, the first of `repeats` + 1 left out.

    Takes an executor of the replay's own kind over the same machine, but on a clock of its own:
    a replay starts at time 0. Its pages are free before and after.
    """
    with driving(env, executor, machine) as driver:
        times = {
            name: [driver.run(shape).compute_ns for _ in range(repeats + 1)]
            for name, shape in probes(driver.limits, driver.page).items()
        }
    return {name: median(taken_ns[1:]) / 1e9 for name, taken_ns in times.items()}


def ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By what factor each probe took longer after the run than before it."""
    return {name: after[name] / before[name] for name in before}
