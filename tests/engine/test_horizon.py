"""How a plan goes on: a prompt's slices, its rest, then its own decodes."""

from __future__ import annotations

from engine.contract.plan import Compute, Plan
from engine.results.plan_log import decode, encode
from policies.composed import Composed
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.earliest_deadline import EarliestDeadline
from tests.support.states import V0, V1, decoding, job, view

CHUNKED = ChunkedPrefill(token_budget=16, max_jobs=8)


def steps(plan: Plan, count: int) -> list[list[tuple[int, int]]]:
    launches = [plan.at(step).ops[-1] for step in range(count)]
    return [[(s.job.job_id, s.tokens) for s in op.slices] for op in launches if type(op) is Compute]


def test_a_prompt_ends_and_decodes_behind_the_others() -> None:
    state = view([decoding(0, 10), decoding(1, 12)], [job(2, 30)])
    for memory in (V0, V1):
        plan = Composed(CHUNKED, memory).plan(state)
        assert plan.repeats > 5
        parts = [[(0, 1), (1, 1), (2, n)] for n in (14, 14, 2, 1, 1)]
        assert steps(plan, 5) == parts
        assert [plan.until(step) for step in range(4)] == [2, 2, 3, plan.repeats]


def test_pages_of_a_new_decode_follow_those_of_its_prompt() -> None:
    """Pages of 4: 30 tokens end in the 8th, which has room for two decodes; the third needs one."""
    plan = Composed(CHUNKED, V1).plan(view([], [job(2, 30)]))
    assert steps(plan, 3) == [[(2, 16)], [(2, 14)], [(2, 1)]]
    pages = [sum(op.nbytes for op in plan.at(step).ops[:-1]) // 4000 for step in range(9)]
    assert pages == [4, 4, 0, 0, 1, 0, 0, 0, 1]


def test_prompts_that_come_in_together_end_one_behind_the_other() -> None:
    """Of 16 tokens a step, one decode leaves 15: 5 + 10 of 40; then 14, 14 and the rest of 2."""
    state = view([decoding(0, 10)], [job(2, 5), job(3, 40)])
    for memory in (V0, V1):
        plan = Composed(CHUNKED, memory).plan(state)
        parts = [[(0, 1), (2, n), (3, m)] for n, m in ((5, 10), (1, 14), (1, 14), (1, 2), (1, 1))]
        assert steps(plan, 5) == parts
        assert [plan.until(step) for step in range(5)] == [1, 3, 3, 4, plan.repeats]


def test_the_rest_of_a_budget_is_for_whoever_waits() -> None:
    plan = Composed(CHUNKED, V1).plan(view([decoding(0, 10)], [job(2, 40), job(3, 5)]))
    assert (plan.repeats, plan.later) == (2, ())


def test_prompts_go_on_while_they_leave_nothing_of_the_budget() -> None:
    """Of 40 the slices 10, 14 and 14 fill it; beside the rest of 2 the last one may come in."""
    state = view([decoding(0, 10)], [job(2, 5), job(3, 40), job(4, 5)])
    for memory in (V0, V1):
        plan = Composed(CHUNKED, memory).plan(state)
        assert plan.repeats == 3
        parts = [[(0, 1), (2, n), (3, m)] for n, m in ((5, 10), (1, 14), (1, 14))]
        assert steps(plan, 3) == parts


def test_decodes_by_rank_are_asked_for_again() -> None:
    ranked = EarliestDeadline(token_budget=16, max_jobs=8)
    plan = Composed(ranked, V1).plan(view([decoding(0, 10)], [job(2, 40)]))
    assert (plan.repeats, plan.later) == (2, ())


def test_a_log_keeps_how_a_plan_goes_on() -> None:
    state = view([decoding(0, 10)], [job(2, 30)])
    plan = Composed(CHUNKED, V1).plan(state)
    again = decode(encode(plan), {j.job_id: j for j in (*state.serving, *state.waiting)})
    assert (again.repeats, again.later, encode(again)) == (plan.repeats, plan.later, encode(plan))
