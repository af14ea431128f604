"""Law 11: the same policy object decides the same in every backend, down to the page ids."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import simpy

from engine.checks import check_capacity, check_inputs, check_lanes
from engine.engine import Engine
from engine.executor import Launch
from engine.journal import Journal
from engine.plan import PageSize
from engine.planlog import LoggedPlan, encode
from engine.policy import Composed
from engine.recorder import Recorder
from policies.recorded import Recorded
from runtime.clock import WallClock
from runtime.executor import CpuExecutor, LockstepExecutor
from runtime.link import Link
from runtime.machine import GPU, Machine
from runtime.wall import WallExecutor
from sim.executor import SimExecutor
from tests.hand_made import FAMILIES, HOST, shared_model
from tests.serving import MEMORY, PAGE_TOKENS, SCHEDULING, short_requests
from traces.request import Request

SPEC = replace(FAMILIES["llama"], name="tiny-flat", num_layers=1)  # decisions know no layers
PAGE = PageSize(PAGE_TOKENS, PAGE_TOKENS * SPEC.kv_token_bytes)
PAGES = {GPU: 26, HOST: 104}
LINKS = {name: Link(200e6, 20_000) for name in ("gpu->host", "host->gpu")}
BACKENDS = ("sim", "lockstep", "cpu", "wall")


class MadeUp:
    """Durations for the virtual clocks; their size must not matter."""

    form, provenance = "made up", "a test"

    def compute_ns(self, launch: Launch) -> int:
        return 200_000 + 5_000 * sum(piece.tokens for piece in launch.pieces)

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return 20_000 + 5 * launch.nbytes

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 40_000

    def peak_bytes(self, launch: Launch) -> int | None:
        return None


def machine(requests: Sequence[Request]) -> Machine:
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    return Machine(shared_model(SPEC), SPEC, PAGE_TOKENS, PAGES, prompts)


@contextmanager
def world(backend: str, requests: Sequence[Request]) -> Iterator[tuple[simpy.Environment, Any]]:
    if backend == "wall":
        clock = WallClock()
        with WallExecutor(clock, machine(requests), LINKS) as executor:
            yield clock, executor
        return
    env = simpy.Environment()
    yield (
        env,
        {
            "sim": lambda: SimExecutor(env, MadeUp()),
            "lockstep": lambda: LockstepExecutor(machine(requests), SimExecutor(env, MadeUp())),
            "cpu": lambda: CpuExecutor(env, machine(requests), LINKS),
        }[backend](),
    )


def run(
    backend: str, policy: Any, requests: Sequence[Request], depth: int = 2, **kwargs: Any
) -> Recorder:
    """A replay with all checks; returns its facts."""
    with world(backend, requests) as (env, executor):
        recorder, journal = Recorder(), Journal(lambda: int(env.now))
        capacity = {pool: count * PAGE.nbytes for pool, count in PAGES.items()}
        engine = Engine(
            env,
            policy,
            executor,
            capacity,
            PAGE,
            depth=depth,
            recorder=recorder,
            journal=journal,
            **kwargs,
        )
        engine.replay(requests)
    plans, spans = [row[-1] for row in recorder.plans], {s.op: s for s in recorder.spans}
    check_lanes(plans, spans)
    check_inputs(plans, spans)
    check_capacity(journal.lives, spans, capacity)
    return recorder


def log(recorder: Recorder) -> list[str]:
    return [encode(row[-1]) for row in recorder.plans]


def pages(recorder: Recorder) -> list[tuple[int, list[int]]]:
    rows = sorted((row[0], row[-1]) for row in recorder.steps if row[-1].pieces)
    return [
        (piece.job_id, list(piece.pages[: PAGE.count(piece.context_tokens + piece.tokens)]))
        for _, launch in rows
        for piece in launch.pieces
    ]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_all_backends_issue_identical_plans(scheduling: str, memory: str, depth: int) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    requests = short_requests(8, SPEC.vocab_size)
    runs = {name: run(name, policy, requests, depth) for name in BACKENDS}
    taken = [o.restarts + o.swaps for o in runs["sim"].outcomes.values()]
    assert any(taken) or memory == "max_reservation", "no pressure"
    for name in BACKENDS[1:]:
        assert log(runs[name]) == log(runs["sim"]), f"{name} decides otherwise"
        assert pages(runs[name]) == pages(runs["sim"]), f"{name} has other pages"
        assert counters(runs[name], "return") == counters(runs["sim"], "return")


@pytest.mark.parametrize("measured", ["cpu", "wall"])
@pytest.mark.parametrize("memory", MEMORY)
def test_a_measured_plan_log_gives_identical_counters_in_sim(memory: str, measured: str) -> None:
    """Timed arrivals: decisions may differ, but the measured ones played back must not."""
    rng = random.Random(5)
    requests = [
        Request(
            r.request_id,
            rng.randrange(40_000_000),
            r.prompt_tokens,
            r.output_tokens,
            prompt_ids=r.prompt_ids,
        )
        for r in short_requests(10, SPEC.vocab_size)
    ]
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY[memory])
    real = run(measured, policy, requests)
    plans = tuple(LoggedPlan(d, back, encode(p)) for _, d, _, back, p in real.plans)
    played = run("sim", Recorded(plans), requests, returns_memory=False)
    assert counters(played) == counters(real)
    assert pages(played) == pages(real)


def counters(recorder: Recorder, cause: str = "issue") -> list[tuple[Any, ...]]:
    rows = recorder.tables()["memory"].to_pylist()
    names = ("step", "tier", "kv_bytes", "kv_pages")
    return [tuple(row[n] for n in names) for row in rows if row["cause"] == cause]


def test_real_ends_of_sequence_end_requests_early_and_keep_the_laws() -> None:
    """Sampled lengths need depth 1; whatever token ends a request is the last it delivers."""
    requests = short_requests(8, SPEC.vocab_size)
    free = machine(requests)
    env, recorder = simpy.Environment(), Recorder()
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_restart"])
    capacity = {pool: count * PAGE.nbytes for pool, count in PAGES.items()}
    Engine(env, policy, CpuExecutor(env, free), capacity, PAGE, recorder=recorder).replay(requests)
    first = free.outputs(0)
    ends = first[len(first) // 2]  # a token that is known to be sampled
    again = machine(requests)
    again.eos_ids = frozenset((ends,))
    env, recorder = simpy.Environment(), Recorder()
    Engine(
        env,
        policy,
        CpuExecutor(env, again),
        capacity,
        PAGE,
        depth=1,
        forced=False,
        recorder=recorder,
    ).replay(requests)
    for request in requests:
        forced, sampled = free.outputs(request.request_id), again.outputs(request.request_id)
        stop = forced.index(ends) + 1 if ends in forced else len(forced)
        assert sampled == forced[:stop]
        assert len(recorder.outcomes[request.request_id].token_ns) == stop


def test_sampled_lengths_refuse_run_ahead() -> None:
    with pytest.raises(ValueError, match="set depth=1"):
        Engine(simpy.Environment(), Recorded(()), None, {}, PAGE, depth=2, forced=False)  # type: ignore[arg-type]
