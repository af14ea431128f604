"""The rules by which engines hand out pages."""

from __future__ import annotations

from typing import Any

import pytest

from policies.continuous_batching import ContinuousBatching
from policies.paged_restart import PagedRestart
from policies.paged_swap import PagedSwap
from policies.vllm_v1 import VllmV1
from tests.states import PAGE, V0, decoding, fitted, ids, job, seated, view


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
