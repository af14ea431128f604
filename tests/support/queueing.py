"""The engine as a queue with known theory: one job a step, service as long as we say."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import poisson

from engine.contract.executor import Launch
from engine.contract.policy import Router
from engine.contract.regions import PageSize, Tier
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from sim.cost.contract import LaunchCost
from sim.executor import SimExecutor
from traces.serving.arrivals import Poisson
from traces.serving.request import Request

Times = NDArray[np.int64]
SERVICE_NS = 10_000_000
TOKEN_NS = 10_000
PAGE = PageSize(16, 1024)


@dataclass(frozen=True)
class Constant(LaunchCost):
    """Every launch takes the same time, or so much for each token; the host takes none."""

    duration_ns: int
    token_ns: int = 0
    form: str = "table"
    provenance: str = "queueing theory"

    def compute_ns(self, launch: Launch) -> int:
        return self.duration_ns + self.token_ns * sum(p.tokens for p in launch.pieces)

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
    device: Times


def run_queue(
    arrival_ns: Times,
    depth: int = 1,
    max_jobs: int = 1,
    output_tokens: int = 1,
    replicas: int = 1,
    router: Router | None = None,
    prompts: Times | None = None,
) -> Queue:
    """Serves prompts of a page each through the real engine, at most `max_jobs` in service.

    The token budget has room for all of them, so that a job in service is in every step. With
    `prompts` (tokens of each) a launch takes TOKEN_NS for each token instead of SERVICE_NS.
    """
    env, recorder = VirtualClock(), Recorder()
    longest = PAGE.tokens if prompts is None else int(prompts.max())
    scheduling = ChunkedPrefill(max_jobs * longest, max_jobs)
    policy = Composed(scheduling, PagedRestart(watermark=0.0))
    pages = 64 if prompts is None else 2 * PAGE.count(longest)
    capacity = {(Tier.GPU, i): pages * PAGE.nbytes for i in range(replicas)}
    cost = Constant(SERVICE_NS) if prompts is None else Constant(0, TOKEN_NS)
    engine = Engine(
        env,
        policy,
        SimExecutor(env, cost),
        capacity,
        PAGE,
        devices=replicas,
        depth=depth,
        recorder=recorder,
        router=router,
    )
    # so that a job never needs a second page
    sizes = (
        np.full(len(arrival_ns), PAGE.tokens - output_tokens + 1) if prompts is None else prompts
    )
    engine.replay(
        Request(i, int(at), int(size), output_tokens)
        for i, (at, size) in enumerate(zip(arrival_ns, sizes, strict=True))
    )
    tables = recorder.tables()
    requests, steps = tables["requests"].sort_by("request_id"), tables["steps"]
    stays = (requests[c].to_numpy() for c in ("arrival_ns", "scheduled_ns", "finish_ns"))
    step_jobs = np.array([len(jobs) for jobs in steps["jobs"].to_pylist()])
    step_ns = steps["end_ns"].to_numpy() - steps["start_ns"].to_numpy()
    return Queue(*stays, step_jobs, step_ns, requests["device"].to_numpy())


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


def central_queue_ns(arrival_ns: Times, servers: int, service_ns: int) -> Times:
    """Waits of one first-come-first-served line before so many servers."""
    free = [0] * servers  # a heap: when each server is free
    waits = np.zeros(len(arrival_ns), dtype=np.int64)
    for i, at in enumerate(arrival_ns):
        start = max(int(at), heappop(free))
        waits[i] = start - at
        heappush(free, start + service_ns)
    return waits


def own_lines_ns(arrival_ns: Times, service_ns: Times, servers: int, joins_shortest: bool) -> Times:
    """Waits where each arrival joins one server's line at once: in turn, or the shortest.

    Between equally short lines, the one that fewest have joined so far, then the first.
    """
    ends: list[list[int]] = [[] for _ in range(servers)]  # of all that ever joined
    waits = np.zeros(len(arrival_ns), dtype=np.int64)
    for i, (at, service) in enumerate(zip(arrival_ns.tolist(), service_ns.tolist(), strict=True)):
        lengths = [(len(line) - bisect_right(line, at), len(line)) for line in ends]
        line = ends[lengths.index(min(lengths)) if joins_shortest else i % servers]
        start = max(at, line[-1] if line else 0)
        waits[i] = start - at
        line.append(start + service)
    return waits


def mdn_wait(load: float, servers: int) -> float:
    """Mean wait of M/D/N in service times (Crommelin 1932), `load` per server."""
    wait, offered = 0.0, load * servers
    for i in range(1, 10_000):
        term = poisson.sf(i * servers - 1, i * offered)
        term -= poisson.sf(i * servers, i * offered) / load
        wait += term
        if term < 1e-12:
            break
    return float(wait)


def mmn_wait(load: float, servers: int) -> float:
    """Mean wait of M/M/N in mean service times (Erlang C), `load` per server."""
    offered = load * servers
    terms = [offered**k / factorial(k) for k in range(servers)]
    last = offered**servers / factorial(servers) / (1 - load)
    return last / (sum(terms) + last) / (servers * (1 - load))


def enm1_wait(load: float, stages: int) -> float:
    """Mean wait of E_N/M/1, each N-th arrival of a Poisson stream, in mean service times.

    GI/M/1: sigma / (1 - sigma) where sigma is the root below 1 of the transform of the gaps.
    """
    rate = stages * load
    sigma = brentq(lambda s: (rate / (rate + 1 - s)) ** stages - s, 0.0, 1 - 1e-9)
    return float(sigma / (1 - sigma))


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
