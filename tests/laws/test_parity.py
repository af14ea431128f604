"""Law 11: the same policy object decides the same in every backend, down to the page ids."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.policy import Policy
from engine.contract.regions import PageSize, Pool
from engine.laws.check_replay import check_capacity, check_inputs, check_lanes
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.plan_log import LoggedPlan, encode
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.scheduling.recorded import RecordedPlans
from runtime.executors.clock import WallClock
from runtime.executors.lockstep import CpuExecutor, LockstepExecutor
from runtime.executors.wall import WallExecutor
from runtime.serving.machine import GPU, ServingMachine
from sim.executor import SimExecutor
from tests.support.hand_made import HOST, shared_model
from tests.support.parity import BACKENDS, GPU_PAGES, LINKS, PAGE, SPEC, SyntheticCost
from tests.support.serving import MEMORY, PAGE_TOKENS, SCHEDULING, short_requests
from tests.support.strategies import SEEDS, cases
from traces.serving.request import Request


def machine(requests: Sequence[Request], gpu_pages: int = GPU_PAGES) -> ServingMachine:
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    pages = {GPU: gpu_pages, HOST: 4 * gpu_pages}
    return ServingMachine(shared_model(SPEC), SPEC, PageSize.of(SPEC, PAGE_TOKENS), pages, prompts)


def capacity(gpu_pages: int = GPU_PAGES) -> dict[Pool, int]:
    return {GPU: gpu_pages * PAGE.nbytes, HOST: 4 * gpu_pages * PAGE.nbytes}


@contextmanager
def world(
    backend: str, requests: Sequence[Request], gpu_pages: int
) -> Iterator[tuple[simpy.Environment, Any]]:
    if backend == "wall":
        clock = WallClock()
        with WallExecutor(clock, machine(requests, gpu_pages), LINKS) as executor:
            yield clock, executor
        return
    env = VirtualClock()
    yield (
        env,
        {
            "sim": lambda: SimExecutor(env, SyntheticCost()),
            "fast sim": lambda: SimExecutor(env, SyntheticCost(speed=20)),
            "lockstep": lambda: LockstepExecutor(
                machine(requests, gpu_pages), SimExecutor(env, SyntheticCost())
            ),
            "cpu": lambda: CpuExecutor(env, machine(requests, gpu_pages), LINKS),
        }[backend](),
    )


def run(
    backend: str,
    policy: Any,
    requests: Sequence[Request],
    depth: int = 2,
    gpu_pages: int = GPU_PAGES,
    returns_memory: bool = True,
) -> Recorder:
    """A replay with all checks; returns its facts."""
    with world(backend, requests, gpu_pages) as (env, executor):
        recorder, journal = Recorder(), Journal(lambda: int(env.now))
        engine = Engine(
            env,
            policy,
            executor,
            capacity(gpu_pages),
            PAGE,
            depth=depth,
            recorder=recorder,
            journal=journal,
            returns_memory=returns_memory,
        )
        engine.replay(requests)
    plans, spans = [row[-1] for row in recorder.plans], {s.op: s for s in recorder.spans}
    check_lanes(plans, spans)
    check_inputs(plans, spans)
    check_capacity(journal.lives, spans, capacity(gpu_pages))
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


@pytest.mark.broad(4)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_all_backends_issue_identical_plans(scheduling: str, memory: str) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    sim = identical(policy, short_requests(8, SPEC.vocab_size))
    assert under_pressure(sim) or memory == "max_reservation", "no pressure"


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(seed=SEEDS, depth=st.integers(1, 3), gpu_pages=st.integers(13, 40))
@cases(5)
def test_all_backends_issue_identical_plans_of_random_traces(
    scheduling: str, memory: str, seed: int, depth: int, gpu_pages: int
) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    identical(policy, short_requests(8, SPEC.vocab_size, seed), depth, gpu_pages)


def identical(policy: Policy, requests: Sequence[Request], *setting: int) -> Recorder:
    """Replays in all backends, equal down to the page; returns the simulated one."""
    runs = {name: run(name, policy, requests, *setting) for name in BACKENDS}
    for name in BACKENDS[1:]:
        assert log(runs[name]) == log(runs["sim"]), f"{name} decides otherwise"
        assert pages(runs[name]) == pages(runs["sim"]), f"{name} has other pages"
        assert counters(runs[name], "return") == counters(runs["sim"], "return")
    return runs["sim"]


def under_pressure(recorder: Recorder) -> bool:
    """Whether the run took memory from any job."""
    return any(o.restarts + o.swaps for o in recorder.outcomes.values())


@pytest.mark.broad(18)
@pytest.mark.parametrize("measured", ["cpu", "wall"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_a_measured_plan_log_gives_identical_counters_in_sim(
    scheduling: str, memory: str, measured: str
) -> None:
    """Timed arrivals: decisions do differ, but the measured ones played back must not."""
    is_reserved, rng = memory == "max_reservation", random.Random(5)
    requests = [
        Request(
            r.request_id,
            rng.randrange(4_000_000),
            r.prompt_tokens,
            r.output_tokens,
            prompt_ids=r.prompt_ids,
        )
        for r in short_requests(16, SPEC.vocab_size, 3, 40 if is_reserved else 80)
    ]
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    tight = {"gpu_pages": 52 if is_reserved else 20}
    real = run(measured, policy, requests, **tight)
    assert under_pressure(real) or is_reserved, "no pressure"
    free = run("fast sim", policy, requests, **tight)
    assert log(free) != log(real), "nothing would be left to show"
    plans = tuple(LoggedPlan(d, back, encode(p)) for _, d, _, back, p in real.plans)
    played = run("fast sim", RecordedPlans(plans), requests, returns_memory=False, **tight)
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
    env, recorder = VirtualClock(), Recorder()
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_restart"])
    executor = CpuExecutor(env, free)
    Engine(env, policy, executor, capacity(), PAGE, recorder=recorder).replay(requests)
    first = free.outputs(0)
    ends = first[len(first) // 2]  # a token that is known to be sampled
    again = machine(requests)
    again.eos_ids = frozenset((ends,))
    env, recorder = VirtualClock(), Recorder()
    Engine(
        env,
        policy,
        CpuExecutor(env, again),
        capacity(),
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
    with pytest.raises(ValueError, match="at most one plan in flight"):
        Engine(VirtualClock(), RecordedPlans(()), None, {}, PAGE, depth=2, forced=False)  # type: ignore[arg-type]
