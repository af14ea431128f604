"""The plan builder where bytes run out in the middle of a list of growth."""

from __future__ import annotations

import pytest

from engine.contract.plan import Grow
from engine.contract.regions import kv_place
from engine.contract.view import RunningDecodes
from engine.memory.dry_run import DryRunPlanBuilder, Shortage
from tests.support.states import PAGE, POOL, view

ONE, OTHER = kv_place(1), kv_place(2)
TWO = [Grow(ONE, PAGE.nbytes), Grow(OTHER, PAGE.nbytes)]


def builder(pages: int, held: dict[int, int] | None = None) -> DryRunPlanBuilder:
    return DryRunPlanBuilder(view([], [], pages=pages, held=held or {}))


def running(*job_ids: int) -> RunningDecodes:
    """Decodes whose pages are full."""
    return RunningDecodes((), (), tuple([Grow(kv_place(i), PAGE.nbytes) for i in job_ids]))


def test_growth_in_a_list_stays_within_the_share() -> None:
    whole = builder(pages=3)
    share = whole.within({POOL: PAGE.nbytes})
    with pytest.raises(Shortage) as caught:
        share.grow_all(TWO)
    assert (caught.value.place, caught.value.deficit_bytes) == (TWO[1].place, PAGE.nbytes)
    assert share.room(POOL) == 0 and whole.room(POOL) == 2 * PAGE.nbytes


def test_a_share_of_the_sum_lets_all_growth_through() -> None:
    whole = builder(pages=3)
    share = whole.within({POOL: 2 * PAGE.nbytes})
    share.grow_all(TWO)
    assert whole.plan().ops == tuple(TWO)
    assert share.room(POOL) == 0 and whole.room(POOL) == PAGE.nbytes


@pytest.mark.parametrize("limited", [False, True])
def test_plan_and_dry_run_agree_after_a_shortage_in_a_list(limited: bool) -> None:
    whole = builder(pages=1)
    written = whole.within({POOL: PAGE.nbytes}) if limited else whole
    with pytest.raises(Shortage):
        written.grow_all(TWO)
    held = {op.place: written.held(op.place) for op in TWO if written.holds(op.place)}
    assert held == {op.place: op.nbytes for op in whole.plan().ops if isinstance(op, Grow)}
    assert whole.room(POOL) == PAGE.nbytes - sum(held.values())


# ---- growth of running decodes
@pytest.mark.parametrize("is_asked_first", [False, True])
def test_growth_of_running_decodes_adds_to_growth_before_and_behind(is_asked_first: bool) -> None:
    plan = builder(pages=9, held={1: 1})
    if is_asked_first:
        assert plan.held(ONE) == PAGE.nbytes
    plan.grow(ONE, PAGE.nbytes)
    assert plan.grow_running(running(1))
    plan.grow(ONE, PAGE.nbytes)
    assert plan.held(ONE) == 4 * PAGE.nbytes and plan.room(POOL) == 5 * PAGE.nbytes


def test_running_decodes_may_grow_twice() -> None:
    plan = builder(pages=9, held={1: 1, 2: 1})
    assert plan.grow_running(running(1)) and plan.grow_running(running(1, 2))
    assert (plan.held(ONE), plan.held(OTHER)) == (3 * PAGE.nbytes, 2 * PAGE.nbytes)
