"""Small replays for tests: random traces, a made-up cost, and every law checked afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import simpy

from engine.contract.executor import Executor, Lanes, Launch, Span
from engine.contract.layout import Layout
from engine.contract.plan import Op, Plan
from engine.contract.policy import Policy, Router
from engine.contract.regions import PageSize, Tier
from engine.contract.rules import BrokenLaw
from engine.laws.check_replay import check_capacity, check_inputs, check_lanes
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.plan_log import LoggedPlan, encode
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.static_batching import StaticBatching
from traces.serving.request import Request, TrainingJob

PAGE = PageSize(tokens=4, nbytes=4000)

SCHEDULING = {
    "static": StaticBatching(max_jobs=6),
    "continuous": ContinuousBatching(token_budget=128, max_jobs=12),
    "chunked": ChunkedPrefill(token_budget=48, max_jobs=12),
}
MEMORY = {
    "restart": PagedRestart(),
    "swap": PagedSwap(),
    "reservation": MaxReservation(max_tokens=120),
}
COMBINATIONS = [(scheduling, memory) for scheduling in SCHEDULING for memory in MEMORY]


def random_requests(seed: int, count: int = 24, rate: float | None = None) -> list[Request]:
    """Prompts of 1-80 tokens, outputs of 1-40; all at once, or Poisson at `rate` per second."""
    rng, now_ns, requests = random.Random(seed), 0, []
    for i in range(count):
        if rate:
            now_ns += int(rng.expovariate(rate) * 1e9)
        requests.append(Request(i, now_ns, rng.randint(1, 80), rng.randint(1, 40)))
    return requests


def duration_ns(launch: Launch) -> int:
    """Made up: 50 us and 1 us a token for a launch, 20 ns a byte for a copy (a slow link)."""
    return 50_000 + 1_000 * sum(p.tokens for p in launch.pieces) + 20 * launch.nbytes


class ToyExecutor(Executor):
    """Virtual time with made-up durations; `noise` varies each by up to that share."""

    def __init__(
        self,
        env: simpy.Environment,
        noise: float = 0.0,
        seed: int = 0,
        host_ns: int = 0,
        duration: Callable[[Launch], int] = duration_ns,
    ) -> None:
        self._lanes, self._rng, self._noise = Lanes(env), random.Random(seed), noise
        self._host_ns, self._duration = host_ns, duration

    def prepare(self, launches: Sequence[Launch]) -> int:
        return int(self._host_ns * self._vary())

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        self._lanes.place(launch, max(1, int(self._duration(launch) * self._vary())), done)

    def release(self, pool: object, pages: Sequence[int]) -> None:
        pass

    def _vary(self) -> float:
        return self._rng.uniform(1 - self._noise, 1 + self._noise)


@dataclass
class Replay:
    """A finished run with all that its laws are checked from."""

    engine: Engine
    recorder: Recorder
    journal: Journal
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @cached_property
    def plans(self) -> list[Plan]:
        return [row[-1] for row in self.recorder.plans]

    @cached_property
    def spans(self) -> dict[Op, Span]:
        return {span.op: span for span in self.recorder.spans}

    def log(self) -> list[tuple[int, str]]:
        """What was decided, without when."""
        return [(device, encode(plan)) for _, device, _, _, plan in self.recorder.plans]

    def plan_log(self) -> tuple[LoggedPlan, ...]:
        """What the `recorded` policy plays back."""
        plans = self.recorder.plans
        return tuple(LoggedPlan(device, back, encode(plan)) for _, device, _, back, plan in plans)

    def launches(self) -> list[Launch]:
        """Those with slices, in issue order; a slice knows its page table."""
        rows = sorted(self.recorder.steps, key=lambda row: row[0])
        return [row[-1] for row in rows if row[-1].pieces]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table."""
        if name not in self._rows:
            self._rows[name] = self._tables[name].to_pylist()
        return self._rows[name]

    @cached_property
    def _tables(self) -> Mapping[str, Any]:
        return self.recorder.tables()

    def booked(self) -> list[tuple[Any, ...]]:
        """Bytes and pages of KV at each issue."""
        names, rows = ("step", "tier", "kv_bytes", "kv_pages"), self.rows("memory")
        return [tuple(row[n] for n in names) for row in rows if row["cause"] == "issue"]

    def files(self, folder: Path) -> dict[str, bytes]:
        """The tables as they lie on disk."""
        folder.mkdir()
        self.recorder.write(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def check(self) -> Replay:
        """Laws 1, 2, 4, 5, 6 and 11b."""
        plans, spans = self.plans, self.spans
        check_lanes(plans, spans)
        check_capacity(self.journal.lives, spans, self.engine.ledger.capacity_bytes)
        check_inputs(plans, spans)
        for outcome in self.recorder.outcomes.values():
            times = [outcome.arrival_ns, *outcome.token_ns]
            if times != sorted(times):
                raise BrokenLaw("law 4: a token before its arrival or out of order")
        for op, span in spans.items():
            for piece in getattr(op, "slices", ()):
                if span.start_ns < piece.job.arrival_ns:
                    raise BrokenLaw("law 4: work before its arrival")
        return self


def replay(
    policy: Policy,
    work: Iterable[Request | TrainingJob],
    *,
    pages: int = 60,
    host_pages: int = 30,
    depth: int = 2,
    devices: int = 1,
    noise: float = 0.0,
    seed: int = 0,
    host_ns: int = 0,
    page: PageSize = PAGE,
    layout: Layout | None = None,
    returns_memory: bool = True,
    duration: Callable[[Launch], int] = duration_ns,
    fast_forward: bool = True,
    router: Router | None = None,
) -> Replay:
    """Runs a policy over a trace on toy hardware."""
    env, recorder = VirtualClock(), Recorder()
    journal = Journal(lambda: int(env.now))
    capacity = {(Tier.GPU, d): pages * page.nbytes for d in range(devices)}
    hosts = 1 if router is None else devices  # each replica has its own
    capacity |= {(Tier.HOST, d): host_pages * page.nbytes for d in range(hosts)}
    engine = Engine(
        env,
        policy,
        ToyExecutor(env, noise, seed, host_ns, duration),
        capacity,
        page,
        devices=devices,
        depth=depth,
        layout=layout,
        recorder=recorder,
        journal=journal,
        returns_memory=returns_memory,
        fast_forward=fast_forward,
        router=router,
    )
    engine.replay(work)
    return Replay(engine, recorder, journal)


def composed(scheduling: str, memory: str) -> Composed:
    return Composed(SCHEDULING[scheduling], MEMORY[memory])
