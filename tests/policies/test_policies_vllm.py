"""VllmV1 decides what vLLM's own loop decides, to the nanosecond of every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.contract.executor import Launch
from engine.contract.regions import PageSize
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.vllm_v1 import VllmV1
from tests.support.replays import replay
from tests.support.strategies import cases, traces
from tests.support.vllm_reference import Vllm
from traces.serving.request import Request

PAGE = PageSize(tokens=4, nbytes=4000)
MEMORY = PagedRestart(watermark=0.0, prompts="must_fit", gives_way=True)
SIZES = {
    "pages": st.integers(31, 90),
    "budget": st.integers(8, 128),
    "jobs": st.integers(1, 12),
}


def step_ns(tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
    """Made up, and different for every shape."""
    return 50_000 + 1_013 * sum(tokens) + 17 * sum(contexts) + 101 * samples


def launch_ns(launch: Launch) -> int:
    pieces = launch.pieces
    shape = [p.tokens for p in pieces], [p.context_tokens for p in pieces]
    return step_ns(*shape, sum(p.samples for p in pieces))


def ours(
    requests: list[Request], pages: int, budget: int, jobs: int, depth: int
) -> dict[int, list[int]]:
    policy = Composed(VllmV1(budget, jobs), MEMORY)
    run = replay(policy, requests, pages=pages, page=PAGE, depth=depth, duration=launch_ns).check()
    return {i: outcome.token_ns for i, outcome in run.recorder.outcomes.items()}


@pytest.mark.parametrize("depth", [1, 2])
@given(requests=traces(), **SIZES)
@cases(150)
def test_every_token_comes_when_it_does_in_vllm(
    depth: int, requests: list[Request], pages: int, budget: int, jobs: int
) -> None:
    """Depth 2 is vLLM's asynchronous scheduling.

    There vLLM may preempt a job whose last token is on its way, which gives its pages back a step
    early; to us that job is no longer in service.
    """
    vllm = Vllm(pages, PAGE.tokens, step_ns, budget, jobs, depth)
    expected = vllm.run(requests)
    assume(not vllm.took_from_done)
    assert ours(requests, pages, budget, jobs, depth) == expected


@pytest.mark.parametrize(
    ("rows", "budget", "jobs"),
    [
        ([(43, 4), (80, 6), (1, 5), (36, 1), (1, 1)], 9, 3),
        ([(58, 14), (80, 6), (1, 6), (31, 1), (1, 6)], 8, 4),
    ],
)
def test_a_prompt_of_one_token_grows_as_the_decode_that_it_becomes(
    rows: list[tuple[int, int]], budget: int, jobs: int
) -> None:
    """In a plan that repeats, its slices all look alike."""
    requests = [Request(i, 0, *row) for i, row in enumerate([(5, 1), (25, 2), *rows])]
    expected = Vllm(32, PAGE.tokens, step_ns, budget, jobs, 1).run(requests)
    assert ours(requests, 32, budget, jobs, depth=1) == expected


def test_the_comparison_sees_restarts() -> None:
    requests = [Request(i, i * 100_000, 30, 40) for i in range(12)]
    vllm = Vllm(40, PAGE.tokens, step_ns, 64, 12)
    assert ours(requests, 40, 64, 12, depth=1) == vllm.run(requests)
    assert vllm.restarts > 3


@pytest.mark.parametrize("shared_tokens", [0, 24])
def test_the_reference_reuses_equal_beginnings_only(shared_tokens: int) -> None:
    begin = tuple(range(shared_tokens))
    prompts = [
        begin + tuple(100 * (i + 1) + j for j in range(40 - shared_tokens)) for i in range(3)
    ]
    requests = [Request(i, i * 10**9, 40, 3, prompt_ids=ids) for i, ids in enumerate(prompts)]
    vllm = Vllm(90, PAGE.tokens, step_ns, 128, 12, prefix_caching=True)
    vllm.run(requests)
    assert vllm.reused_tokens == 2 * shared_tokens
