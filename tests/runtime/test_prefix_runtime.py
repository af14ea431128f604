"""Prefix caching with real keys and values: tokens, parity between backends, measured memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.regions import PageSize
from engine.laws.check_replay import Contents
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.plan_log import LoggedPlan, encode
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.scheduling.recorded import RecordedPlans
from runtime.executors.lockstep import CpuExecutor
from runtime.measure.meter import CpuMeter
from runtime.serving.machine import GPU, ServingMachine
from tests.laws.test_parity import counters, log, pages, run
from tests.support.hand_made import FAMILIES, HOST, TINY, shared_model
from tests.support.parity import BACKENDS, PAGE, SPEC
from tests.support.prefixes import named
from tests.support.reference import compare, expected
from tests.support.serving import KEEPING, SCHEDULING, serve_with, shared_requests

COUNT, GPU_PAGES = 9, 26  # twice the longest request: 100 tokens are 13 pages


@pytest.mark.broad(3)
@pytest.mark.parametrize("memory", KEEPING)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_tokens_equal_generate_on_shared_pages(family: str, scheduling: str, memory: str) -> None:
    """Shared beginnings and second turns, with restarts and swaps in between."""
    spec = FAMILIES[family]
    requests = shared_requests(COUNT, spec.vocab_size)
    policy = Composed(SCHEDULING[scheduling], KEEPING[memory])
    served = serve_with(policy, spec, requests, GPU_PAGES)
    agreement = compare(served.outputs, expected(spec, requests))
    print(agreement, served.restarts, served.swaps, served.cached_tokens)
    assert not agreement.wrong
    assert served.cached_tokens > 100
    if scheduling == "chunked_prefill":
        assert served.swaps if memory == "paged_swap" else served.restarts, "no pressure"


@pytest.mark.broad(3)
@pytest.mark.parametrize("memory", KEEPING)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_all_backends_issue_identical_plans(scheduling: str, memory: str) -> None:
    policy = Composed(SCHEDULING[scheduling], KEEPING[memory])
    requests = shared_requests(9, SPEC.vocab_size, has_turns=False)
    runs = {name: run(name, policy, requests) for name in BACKENDS}
    assert sum(o.cached_tokens for o in runs["sim"].outcomes.values()) > 100
    for name in BACKENDS[1:]:
        assert log(runs[name]) == log(runs["sim"]), f"{name} decides otherwise"
        assert pages(runs[name]) == pages(runs["sim"]), f"{name} has other pages"


@pytest.mark.broad(3)
@pytest.mark.parametrize("measured", ["cpu", "wall"])
@pytest.mark.parametrize("memory", KEEPING)
def test_a_measured_plan_log_gives_identical_counters_in_sim(memory: str, measured: str) -> None:
    rng = random.Random(5)
    requests = [
        replace(r, arrival_ns=rng.randrange(40_000_000))
        for r in shared_requests(14, SPEC.vocab_size, has_turns=False)
    ]
    policy = Composed(SCHEDULING["chunked_prefill"], KEEPING[memory])
    real = run(measured, policy, requests)
    Contents(PAGE, named(requests)).carry_out((row[4], row[3]) for row in real.steps)
    plans = tuple(LoggedPlan(d, back, encode(p)) for _, d, _, back, p in real.plans)
    played = run("sim", RecordedPlans(plans), requests, returns_memory=False)
    assert counters(played) == counters(real)
    assert pages(played) == pages(real)
    assert cached(played) == cached(real)
    assert any(cached(real))


def cached(recorder: Recorder) -> list[int]:
    return [outcome.cached_tokens for _, outcome in sorted(recorder.outcomes.items())]


class Noting(Recorder):
    """Beside each reading of the meter, the bytes of kept pages that no job holds."""

    engine: Engine
    kept_bytes: list[int]

    def settled(self, *given: Any) -> None:
        super().settled(*given)
        ledger = self.engine.ledger
        cache, pool = ledger.sharing[GPU].cache, ledger._pools[GPU]
        idle = pool.holders(cache._keys).count(0)
        self.kept_bytes.append(idle * ledger.page.nbytes)


def test_memory_measured_above_the_ledger_is_kept_pages() -> None:
    """Law 14, to the page: a page that no job holds is either kept or back with the system."""
    requests = shared_requests(14, TINY.vocab_size, has_turns=False)
    box = keeping_machine(requests)
    page = PageSize(box.arenas[GPU].page_tokens, box.arenas[GPU].page_nbytes)
    weights = {GPU: box.decoder.model.parameters()}
    recorder = Noting(CpuMeter(weights, {pool: a.pages for pool, a in box.arenas.items()}))
    recorder.kept_bytes = []
    capacity = {pool: arena.num_pages * page.nbytes for pool, arena in box.arenas.items()}
    env = VirtualClock()
    policy = Composed(SCHEDULING["chunked_prefill"], KEEPING["paged_restart"])
    engine = Engine(env, policy, CpuExecutor(env, box), capacity, page, depth=1, recorder=recorder)
    recorder.engine = engine
    engine.replay(requests)
    assert sum(o.restarts for o in recorder.outcomes.values()) > 0, "no pressure"
    rows = recorder.tables()["memory"].to_pandas()
    rows = rows[(rows["cause"] == "settle") & (rows["tier"] == "gpu")]
    excess = rows["measured_bytes"] - TINY.weight_bytes - rows["kv_bytes"]
    assert max(recorder.kept_bytes) > 0
    assert excess.tolist() == recorder.kept_bytes


def keeping_machine(requests: Sequence[Any]) -> ServingMachine:
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    return ServingMachine(
        shared_model(TINY), TINY, PageSize.of(TINY, 16), {GPU: 14, HOST: 0}, prompts
    )
