"""For how many steps a plan holds, and how it goes on: a prompt's slices, its rest, its decodes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.contract.plan import Compute, Copy, Free, Plan
from engine.contract.regions import Tier, kv_place
from engine.fast_forward.horizon import FOREVER, ONCE, Horizon, horizon
from policies.composed import Composed
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.earliest_deadline import EarliestDeadline
from tests.support.states import V0, V1, decoding, job, view
from tests.support.stretches import changes_of, grows_at, stretch, tokens_of

CHUNKED = ChunkedPrefill(token_budget=16, max_jobs=8)


def test_a_prompt_ends_and_decodes_behind_the_others() -> None:
    state = view([decoding(0, 10), decoding(1, 12)], [job(2, 30)])
    for memory in (V0, V1):
        made = stretch(Composed(CHUNKED, memory), state)
        assert made.steps > 5
        parts = [[(0, 1), (1, 1), (2, n)] for n in (14, 14, 2, 1, 1)]
        assert tokens_of(made, 5) == parts
        assert changes_of(made, state, range(4)) == [2, 2, 3, made.steps]


def test_pages_of_a_new_decode_follow_those_of_its_prompt() -> None:
    """Pages of 4: 30 tokens end in the 8th, which has room for two decodes; the third needs one."""
    made = stretch(Composed(CHUNKED, V1), view([], [job(2, 30)]))
    assert tokens_of(made, 3) == [[(2, 16)], [(2, 14)], [(2, 1)]]
    pages = [sum(op.nbytes for op in grows_at(made, step)) // 4000 for step in range(9)]
    assert pages == [4, 4, 0, 0, 1, 0, 0, 0, 1]


def test_prompts_that_come_in_together_end_one_behind_the_other() -> None:
    """Of 16 tokens a step, one decode leaves 15: 5 + 10 of 40; then 14, 14 and the rest of 2."""
    state = view([decoding(0, 10)], [job(2, 5), job(3, 40)])
    for memory in (V0, V1):
        made = stretch(Composed(CHUNKED, memory), state)
        parts = [[(0, 1), (2, n), (3, m)] for n, m in ((5, 10), (1, 14), (1, 14), (1, 2), (1, 1))]
        assert tokens_of(made, 5) == parts
        assert changes_of(made, state, range(5)) == [1, 3, 3, 4, made.steps]


def test_the_rest_of_a_budget_is_for_the_next_job() -> None:
    made = stretch(Composed(CHUNKED, V1), view([decoding(0, 10)], [job(2, 40), job(3, 5)]))
    assert (made.steps, made.later) == (2, ())


def test_prompts_go_on_while_they_leave_nothing_of_the_budget() -> None:
    """Of 40 the slices 10, 14 and 14 fill it; beside the rest of 2 the last one may come in."""
    state = view([decoding(0, 10)], [job(2, 5), job(3, 40), job(4, 5)])
    for memory in (V0, V1):
        made = stretch(Composed(CHUNKED, memory), state)
        assert made.steps == 3
        parts = [[(0, 1), (2, n), (3, m)] for n, m in ((5, 10), (1, 14), (1, 14))]
        assert tokens_of(made, 3) == parts


def test_decodes_by_rank_are_asked_for_again() -> None:
    ranked = EarliestDeadline(token_budget=16, max_jobs=8)
    made = stretch(Composed(ranked, V1), view([decoding(0, 10)], [job(2, 40)]))
    assert (made.steps, made.later) == (2, ())


# ---- plans that hold once
STATE = view([decoding(0, 10), decoding(1, 12)], [])
DECIDED = Composed(CHUNKED, V1).plan(STATE)
LAUNCH = DECIDED.ops[-1]
OTHER = STATE.serving[1]


def test_decodes_alone_hold_until_something_happens() -> None:
    assert horizon(DECIDED, STATE, True) == Horizon(FOREVER, num_decodes=2)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        replace(DECIDED, restart=(OTHER,)),
        replace(DECIDED, refuse=(job(7, 9),)),
        replace(DECIDED, ops=(*DECIDED.ops, Free(kv_place(1)))),
        replace(DECIDED, ops=(Free(kv_place(1)), *DECIDED.ops)),
        replace(DECIDED, ops=(Copy(kv_place(1), kv_place(1, Tier.HOST)), *DECIDED.ops)),
        replace(DECIDED, ops=(Compute((), device=0), *DECIDED.ops)),
    ],
)
def test_what_is_more_than_growth_and_a_launch_holds_once(plan: Plan) -> None:
    assert horizon(plan, STATE, True) == ONCE


def test_a_job_left_out_may_be_admitted_at_the_next_step() -> None:
    assert isinstance(LAUNCH, Compute)
    one = Compute(LAUNCH.slices[:1], writes=LAUNCH.writes[:1])
    assert horizon(replace(DECIDED, ops=(*DECIDED.ops[:-1], one)), STATE, True) == ONCE


@pytest.mark.parametrize("has_work", [True, False])
def test_beside_a_training_job_it_goes_on_while_that_has_no_work(has_work: bool) -> None:
    trains: Any = SimpleNamespace(training=SimpleNamespace(has_work=has_work))
    found = horizon(DECIDED, replace(STATE, training=[trains]), True)
    assert found == (ONCE if has_work else horizon(DECIDED, STATE, True))
