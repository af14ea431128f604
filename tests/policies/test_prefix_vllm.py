"""With prefix caching, too, VllmV1 decides what vLLM's own loop decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given

from engine.contract.job import Job
from engine.contract.regions import Kind, PageSize
from engine.contract.rules import Remedy, SettingsConflict
from engine.memory.pool import Chain, PrefixCache
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.vllm_v1 import VllmV1
from tests.policies.test_policies_vllm import SIZES, launch_ns, step_ns
from tests.support.prefixes import alike, alike_or_not
from tests.support.replays import PAGE, Replay, replay
from tests.support.strategies import cases
from tests.support.vllm_reference import Vllm
from traces.importing import import_trace
from traces.serving.request import Request, prompt_of
from traces.store import read_trace

MEMORY = PagedRestart(0.0, prompts="must_fit", gives_way=True, prefix_caching=True)


def with_ids(requests: Sequence[Request]) -> list[Request]:
    """The prompts that a runtime would compute, spelt out."""
    return [replace(r, prompt_ids=tuple(prompt_of(r, 1 << 30, seed=0))) for r in requests]


def ours(
    requests: Sequence[Request],
    pages: int,
    budget: int,
    jobs: int,
    depth: int,
    page: PageSize = PAGE,
) -> Replay:
    policy = Composed(VllmV1(budget, jobs), MEMORY)
    return replay(policy, requests, pages=pages, page=page, depth=depth, duration=launch_ns)


def same(run: Replay, vllm: Vllm, expected: dict[int, list[int]]) -> None:
    outcomes = run.recorder.outcomes
    assert {i: outcome.token_ns for i, outcome in outcomes.items()} == expected
    assert run.engine.steps == vllm.steps
    assert sum(outcome.restarts for outcome in outcomes.values()) == vllm.restarts
    assert sum(outcome.cached_tokens for outcome in outcomes.values()) == vllm.reused_tokens


@pytest.mark.parametrize("depth", [1, 2])
@given(requests=alike_or_not(), **SIZES)
@cases(60)
def test_every_token_comes_when_it_does_in_vllm(
    depth: int, requests: list[Request], pages: int, budget: int, jobs: int
) -> None:
    """Whether a trace names ids or blocks; hits, restarts and steps included."""
    vllm = Vllm(pages, PAGE.tokens, step_ns, budget, jobs, depth, prefix_caching=True)
    expected = vllm.run(with_ids(requests))
    assume(not vllm.took_from_done)
    same(ours(requests, pages, budget, jobs, depth), vllm, expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_comparison_sees_hits_and_restarts(depth: int) -> None:
    requests = alike(6 if depth == 1 else 4, 60, rate=3000)
    vllm = Vllm(50, PAGE.tokens, step_ns, 64, 12, depth, prefix_caching=True)
    expected = vllm.run(requests)
    assert vllm.restarts > 3 and vllm.reused_tokens > 1000 and not vllm.took_from_done
    same(ours(requests, 50, 64, 12, depth), vllm, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake_conversation_first45min", "mooncake_synthetic"])
def test_mooncakes_blocks_are_found_as_their_tokens_are(
    shared: Path, tmp_path: Path, name: str
) -> None:
    """Pages of 16 tokens in named blocks of 512, against the ids that stand for them."""
    source = shared / "data" / "arrivals" / f"{name}.parquet"
    import_trace(source, tmp_path / "out.parquet", limit=50)
    page = PageSize(16, 16)
    rows = read_trace(tmp_path / "out.parquet")
    requests = [replace(r, output_tokens=min(r.output_tokens, 40)) for r in rows]
    assert {r.prefix_block_tokens for r in requests} == {512}
    vllm = Vllm(20_000, page.tokens, step_ns, 8192, 64, 2, prefix_caching=True)
    expected = vllm.run(with_ids(requests))
    assert vllm.reused_tokens > 512
    assert not vllm.took_from_done
    same(ours(requests, 20_000, 8192, 64, 2, page), vllm, expected)


def test_what_is_found_is_what_the_trace_repeats() -> None:
    """Roomy memory, one at a time: whole pages of the longest common beginning, by hand."""
    begin = tuple(range(22))  # five pages of 4 and a half
    prompts = [begin + (90 + i,) * 10 for i in range(3)] + [begin[:8], (7, *begin)]
    requests = [
        Request(i, i * 10**9, len(ids), 30, prompt_ids=ids) for i, ids in enumerate(prompts)
    ]
    run = ours(requests, 400, 128, 8, 2).check()
    found = [run.recorder.outcomes[i].cached_tokens for i in range(5)]
    assert found == [0, 20, 20, 4, 0], "of 8 tokens the last is computed, so one page is found"


def test_a_next_turn_finds_its_prompt_but_no_answer_of_ours() -> None:
    """The trace's answer stands in the next prompt; what was generated is something else."""
    first, answer = tuple(range(16)), tuple(range(50, 62))
    turns = [
        Request(0, 0, 16, 12, session=1, turn=0, prompt_ids=first),
        Request(1, 0, 32, 4, session=1, turn=1, prompt_ids=first + answer + (1, 2, 3, 4)),
    ]
    run = ours(turns, 400, 128, 8, 2).check()
    assert run.recorder.outcomes[1].cached_tokens == 16
    blocks = [
        Request(0, 0, 16, 12, session=1, prefix_ids=(1, 2), prefix_block_tokens=8),
        Request(1, 0, 32, 4, session=1, turn=1, prefix_ids=(1, 2, 3, 4), prefix_block_tokens=8),
    ]
    run = ours(blocks, 400, 128, 8, 2).check()
    assert run.recorder.outcomes[1].cached_tokens == 16


def test_a_restarted_job_finds_what_it_had_generated() -> None:
    requests = [Request(i, i, 24, 60) for i in range(8)]  # lengths only: no other job's pages fit
    run = ours(requests, 60, 64, 8, 1).check()
    outcomes = run.recorder.outcomes.values()
    assert sum(o.restarts for o in outcomes) > 0
    again = max(outcomes, key=lambda o: o.cached_tokens)
    assert again.restarts and again.cached_tokens > again.request.prompt_tokens


def test_shared_pages_count_once() -> None:
    prompt = tuple(range(41))
    requests = [Request(i, i * 1_000_000, 41, 400, prompt_ids=prompt) for i in range(4)]
    run = ours(requests, 600, 128, 8, 1).check()
    ledger, pool = run.engine.ledger, next(iter(run.engine.ledger.sharing))
    assert ledger.held_pages(pool) == 0 and ledger.kind_bytes[pool][Kind.KV] == 0
    steps = [row[-1].pieces for row in run.recorder.steps]
    held = [sum(PAGE.count(p.context_tokens + p.tokens) for p in pieces) for pieces in steps]
    peak = max(figures[0].kv_pages for _, _, _, figures, _ in run.recorder._facts.memory)
    assert [o.cached_tokens for o in run.recorder.outcomes.values()] == [0, 40, 40, 40]
    assert peak == max(held) - 3 * 10, "all four jobs share ten full pages of the prompt"


def test_the_oldest_of_equal_pages_is_found_and_the_next_when_it_is_gone() -> None:
    requests = [Request(i, 0, 9, 1, prompt_ids=tuple(range(9))) for i in range(3)]
    cache = PrefixCache({r.request_id: Chain(r, 4) for r in requests}, 4)
    for number, request in enumerate(requests[:2]):
        done = Job(request.request_id, 0, 9, 9, computed_tokens=9)
        cache.keep(done, 0, [10 * number, 10 * number + 1, 10 * number + 2])
    comes = Job(2, 0, 9, 9)
    assert cache.find(comes) == [0, 1]
    assert cache.find(comes, gone={0}) == [10, 1], "equal pages stand for one another"
    cache.forget([0, 1])
    assert cache.find(comes) == [10, 11]
    cache.forget([10])
    assert cache.find(comes) == [], "no beginning, no rest"
    cache.forget([11, 12])
    assert not cache._pages and not cache._keys


def test_a_reservation_refuses_to_share() -> None:
    with pytest.raises(SettingsConflict, match="shares pages") as caught:
        MaxReservation(prefix_caching=True)
    assert caught.value.remedies == (Remedy.PAGED_MEMORY, Remedy.NO_PREFIX_CACHING)
