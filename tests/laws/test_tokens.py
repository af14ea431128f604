"""Law 13 with the real engine: tokens equal generate() under every policy and real pressure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.composed import Composed
from tests.support.hand_made import FAMILIES
from tests.support.reference import compare, expected
from tests.support.serving import MEMORY, SCHEDULING, serve, serve_with, short_requests
from tests.support.strategies import SEEDS, cases

COUNT, GPU_PAGES = 8, 26  # twice the longest request: 100 tokens are 13 pages


@pytest.mark.broad(4)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_tokens_equal_generate_under_pressure(family: str, scheduling: str, memory: str) -> None:
    spec = FAMILIES[family]
    requests = short_requests(COUNT, spec.vocab_size)
    served = serve(spec, requests, scheduling, memory, GPU_PAGES)
    agreement = compare(served.outputs, expected(spec, requests))
    print(agreement, served.restarts, served.swaps)
    assert not agreement.wrong
    if memory == "paged_restart":
        assert served.restarts, "no pressure: nothing restarted"
    if memory == "paged_swap":
        assert served.swaps, "no pressure: nothing was swapped"


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(
    family=st.sampled_from(["qwen3", "llama"]),
    seed=SEEDS,
    gpu_pages=st.integers(13, 40),
    depth=st.integers(1, 3),
)
@cases(6)
def test_tokens_equal_generate_on_random_traces(
    scheduling: str, memory: str, family: str, seed: int, gpu_pages: int, depth: int
) -> None:
    spec, policy = FAMILIES[family], Composed(SCHEDULING[scheduling], MEMORY[memory])
    requests = short_requests(COUNT, spec.vocab_size, seed)
    served = serve_with(policy, spec, requests, gpu_pages, depth=depth)
    assert not compare(served.outputs, expected(spec, requests)).wrong


def test_a_copy_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens do depend on what pages hold."""
    monkeypatch.setattr("runtime.serving.machine.copy_pages", lambda *_: None)
    spec = FAMILIES["llama"]
    requests = short_requests(COUNT, spec.vocab_size)
    served = serve(spec, requests, "chunked_prefill", "paged_swap", GPU_PAGES)
    assert served.swaps and compare(served.outputs, expected(spec, requests)).wrong
