"""The rules by which engines hand out pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.contract.regions import Tier, kv_place
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.vllm_v1 import VllmV1
from tests.support.states import PAGE, V0, decoding, fitted, ids, job, seated, view


@pytest.mark.parametrize(
    ("memory", "pages", "comes_in"),
    [
        (PagedRestart(watermark=0.0), 4, True),  # 2 held, the slice of 7 tokens needs 2
        (PagedRestart(watermark=0.0, prompts="must_fit"), 11, False),  # 40 tokens need 10
        (PagedRestart(watermark=0.0, prompts="must_fit"), 12, True),
        (PagedRestart(watermark=0.0, prompts="reserved"), 11, False),
        (PagedRestart(watermark=0.0, prompts="reserved"), 12, True),
        (PagedRestart(watermark=0.25), 4, False),  # a quarter of 4 is one page
        (PagedRestart(watermark=0.19), 5, True),  # 0.95 of a page is none
    ],
)
def test_admission_by_the_rules(memory: PagedRestart, pages: int, comes_in: bool) -> None:
    state = view([decoding(0, 6)], [job(1, 40)], pages=pages)
    plan = fitted(VllmV1(8, 8), memory, state)
    assert seated(plan) == [(0, 1), (1, 7)][: 1 + comes_in]
    grown = [op.nbytes // PAGE.nbytes for op in plan.ops if hasattr(op, "nbytes")]
    assert grown == ([10 if memory.prompts == "reserved" else 2] if comes_in else [])


def test_the_watermark_is_a_share_of_what_is_left_beside_the_weights() -> None:
    """As engines count it that know blocks only; weights may be ten times the KV."""
    for weight_bytes in (0, 10 * 5 * PAGE.nbytes):
        state = view([decoding(0, 6)], [job(1, 40)], pages=5, weight_bytes=weight_bytes)
        plan = fitted(VllmV1(8, 8), PagedRestart(watermark=0.2), state)
        assert seated(plan) == [(0, 1), (1, 7)], "2 held, 2 wanted, 1 left free"


def test_a_swapped_job_has_the_whole_pool_once_no_other_job_is_there() -> None:
    """It is in service itself: a watermark kept for jobs in service would keep it out for ever."""
    away = {kv_place(0, Tier.HOST): 2 * PAGE.nbytes}
    state = replace(view([decoding(0, 6)], [], pages=2, held={}), held_bytes=away)
    assert seated(fitted(ContinuousBatching(), PagedSwap(watermark=0.5), state)) == [(0, 1)]


@pytest.mark.parametrize(
    ("memory", "admitted"),
    [(PagedSwap(watermark=0.0), False), (PagedSwap(0.0, swapped_first=False), True)],
)
def test_a_waiting_job_passes_a_swapped_out_one_only_where_the_rules_say_so(
    memory: PagedSwap, admitted: bool
) -> None:
    """Job 1 was swapped out with 5 pages; 2 are free, and job 2 needs one."""
    running, away = decoding(0, 6), decoding(1, 18)
    held = {kv_place(0): 2 * PAGE.nbytes, kv_place(1, Tier.HOST): 5 * PAGE.nbytes}
    state = view([running, away], [job(2, 4)], pages=4, held={0: 2})
    state = replace(state, held_bytes=held)
    assert seated(fitted(VllmV1(16, 8), memory, state)) == [(0, 1), (2, 4)][: 1 + admitted]


def test_a_swapped_out_job_that_fits_comes_first_in_any_case() -> None:
    running, away = decoding(0, 6), decoding(1, 6)
    held = {kv_place(0): 2 * PAGE.nbytes, kv_place(1, Tier.HOST): 2 * PAGE.nbytes}
    state = replace(view([running, away], [job(2, 4)], pages=4, held={0: 2}), held_bytes=held)
    for memory in (PagedSwap(0.0), PagedSwap(0.0, swapped_first=False)):
        assert seated(fitted(VllmV1(16, 8), memory, state)) == [(0, 1), (1, 1)]


def test_a_spare_page_must_be_free_for_a_decode_that_needs_none() -> None:
    running = [decoding(0, 6), decoding(1, 6)]  # both fit into their second page
    state = view(running, [], pages=4)
    easy = fitted(ContinuousBatching(), PagedRestart(), state)
    assert seated(easy) == [(0, 1), (1, 1)]
    strict = fitted(ContinuousBatching(), V0, state)
    assert (seated(strict), ids(strict.restart)) == ([(0, 1)], [1])


@pytest.mark.parametrize(
    "given", [{"watermark": 1.0}, {"prompts": "sometimes"}, {"spare_pages": -1}]
)
def test_impossible_rules_are_refused(given: dict[str, Any]) -> None:
    for memory in (PagedRestart, PagedSwap):
        with pytest.raises(ValueError, match=next(iter(given))):
            memory(**given)


def test_a_job_tells_the_tokens_of_its_answer_so_far() -> None:
    prefilling, running = job(0, 8, computed=4), decoding(1, 18)
    assert (prefilling.generated_tokens, running.generated_tokens) == (0, 11)
    assert running.prompt_tokens + running.generated_tokens == running.known_tokens
