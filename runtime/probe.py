"""Has the machine drifted? Three fixed launches, timed before and after a measured run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import simpy
import torch

from engine.executor import Executor
from runtime.driver import driving
from runtime.machine import Machine
from runtime.shapes import probes

LOOK_S = 0.5  # a shared machine's speed wanders within a tenth of it: less would see mostly this
LEAST = 16  # rounds, however long they take


def probe(
    env: simpy.Environment,
    executor: Executor,
    machine: Machine,
    look_s: float = LOOK_S,
    least: int = LEAST,
) -> dict[str, float]:
    """Median seconds of each probe launch over `look_s` of rounds; their first eighth warms up.

    The shapes take turns, as launches do in a replay: one shape alone, back to back, runs up to
    twice as fast from its caches and then says little about the machine. Takes an executor of the
    replay's own kind over the same machine, but on a clock of its own: a replay starts at time 0.
    Its pages are free before and after.
    """
    rounds, until_s = list[dict[str, int]](), time.perf_counter() + look_s
    with driving(env, executor, machine) as driver:
        shapes = probes(driver.limits, driver.page)
        while len(rounds) < least or time.perf_counter() < until_s:
            rounds.append({name: driver.run(shape).compute_ns for name, shape in shapes.items()})
    kept = rounds[len(rounds) // 8 :]
    return {name: median(taken_ns[name] for taken_ns in kept) / 1e9 for name in shapes}


def probe_plainly(look_s: float = LOOK_S, least: int = LEAST) -> dict[str, float]:
    """The same where nothing is served: a product and a copy of fixed sizes, beyond any cache."""
    rows = torch.zeros(512, 1024)
    square, far = torch.zeros(1024, 1024), torch.zeros(1 << 22)
    works = {"product": lambda: rows @ square, "copy": far.clone}
    rounds, until_s = list[dict[str, float]](), time.perf_counter() + look_s
    while len(rounds) < least or time.perf_counter() < until_s:
        rounds.append({name: _taken_s(work) for name, work in works.items()})
    kept = rounds[len(rounds) // 8 :]
    return {name: median(taken[name] for taken in kept) for name in works}


def _taken_s(work: Callable[[], object]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began_ns) / 1e9


def ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By what factor each probe took longer after the run than before it."""
    return {name: after[name] / before[name] for name in before}
