"""The engine as a queue with known theory: one job a step, service as long as we say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray

from engine.engine import Engine
from engine.executor import Launch
from engine.plan import PageSize, Tier
from engine.policy import Composed
from engine.recorder import Recorder
from policies.chunked_prefill import ChunkedPrefill
from policies.paged_restart import PagedRestart
from sim.executor import SimExecutor
from traces.arrivals import Poisson
from traces.request import Request

Times = NDArray[np.int64]
SERVICE_NS = 10_000_000
PAGE = PageSize(16, 1024)
GPU = (Tier.GPU, 0)


@dataclass(frozen=True)
class Constant:
    """Every launch takes the same time; the host takes none."""

    duration_ns: int
    form: str = "table"
    provenance: str = "queueing theory"

    def compute_ns(self, launch: Launch) -> int:
        return self.duration_ns

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        raise AssertionError("a queue copies nothing")

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 0

    def peak_bytes(self, launch: Launch) -> int | None:
        return None


class Queue(NamedTuple):
    """What a run recorded: requests in order of their ids, steps with the jobs in each."""

    arrival_ns: Times
    scheduled_ns: Times
    finish_ns: Times
    step_jobs: Times
    step_ns: Times


def run_queue(
    arrival_ns: Times, depth: int = 1, max_jobs: int = 1, output_tokens: int = 1
) -> Queue:
    """Serves prompts of a page each through the real engine, at most `max_jobs` in service.

    The token budget has room for all of them, so that a job in service is in every step.
    """
    env, recorder = simpy.Environment(), Recorder()
    scheduling = ChunkedPrefill(max_jobs * PAGE.tokens, max_jobs)
    policy = Composed(scheduling, PagedRestart(watermark=0.0))
    capacity = {GPU: 64 * PAGE.nbytes}
    executor = SimExecutor(env, Constant(SERVICE_NS))
    engine = Engine(env, policy, executor, capacity, PAGE, depth=depth, recorder=recorder)
    prompt_tokens = PAGE.tokens - output_tokens + 1  # so that a job never needs a second page
    engine.replay(
        Request(i, int(at), prompt_tokens, output_tokens) for i, at in enumerate(arrival_ns)
    )
    tables = recorder.tables()
    requests, steps = tables["requests"].sort_by("request_id"), tables["steps"]
    stays = (requests[c].to_numpy() for c in ("arrival_ns", "scheduled_ns", "finish_ns"))
    step_jobs = np.array([len(jobs) for jobs in steps["jobs"].to_pylist()])
    return Queue(*stays, step_jobs, steps["end_ns"].to_numpy() - steps["start_ns"].to_numpy())


def poisson_ns(load: float, count: int, seed: int) -> Times:
    """Arrivals that keep one server of SERVICE_NS busy for a share `load` of the time."""
    return Poisson(rate=load / (SERVICE_NS / 1e9)).times_ns(count, seed)


def lindley_ns(arrival_ns: Times, service_ns: int) -> Times:
    """Waits of a first-come-first-served queue: max(0, wait before + service - gap)."""
    waits = np.zeros(len(arrival_ns), dtype=np.int64)
    for i in range(1, len(arrival_ns)):
        gap = arrival_ns[i] - arrival_ns[i - 1]
        waits[i] = max(0, waits[i - 1] + service_ns - gap)
    return waits


def md1_wait(load: float) -> float:
    """Mean wait of M/D/1 in service times (Pollaczek-Khinchine without variance of service)."""
    return load / (2 * (1 - load))


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float

    def deviation(self, truth: float) -> float:
        """Distance from the truth in standard errors."""
        return abs(self.mean - truth) / self.error


def batch_means(values: Sequence[float] | Times, batches: int = 20) -> Estimate:
    """Mean of a stationary series by means of long batches; the first tenth is left out.

    Waits of neighbours are alike, so their plain standard error is far too small. Batches much
    longer than the memory of the queue have nearly independent means.
    """
    settled = np.asarray(values, dtype=float)[len(values) // 10 :]
    length = len(settled) // batches
    means = settled[: length * batches].reshape(batches, length).mean(axis=1)
    return Estimate(float(means.mean()), float(means.std(ddof=1) / batches**0.5))


def jobs_integral_ns(starts: Times, ends: Times) -> int:
    """Integral over time of how many [start, end) intervals are open, swept event by event."""
    events = sorted([(int(t), 1) for t in starts] + [(int(t), -1) for t in ends])
    area, inside, before = 0, 0, 0
    for at, change in events:
        area += inside * (at - before)
        inside, before = inside + change, at
    return area
