"""What grows in a stretched plan, against counting it step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import Compute, Plan
from engine.contract.regions import PageSize, kv_place
from engine.fast_forward.decode_batch import DecodeBatch
from engine.fast_forward.repeated_plan import Growth, RepeatedPlan, StretchedPlan, TimedGrow
from tests.support.stretches import is_due

grows = st.lists(
    st.builds(
        lambda job, first, every: TimedGrow(kv_place(job), 10, first, every),
        st.integers(0, 3),
        st.integers(0, 30),
        st.integers(0, 7),
    ),
    max_size=8,
)


def one_by_one(ops: list[TimedGrow], first: int, end: int) -> list[tuple[int, TimedGrow]]:
    return [(step, op) for step in range(first, end) for op in ops if is_due(op, step)]


@given(ops=grows, middle=st.integers(0, 40), end=st.integers(0, 80))
def test_growth_is_what_every_step_takes_in_the_plans_order(
    ops: list[TimedGrow], middle: int, end: int
) -> None:
    growth = Growth.of(ops)
    due, rest = growth.before(middle)
    assert due == one_by_one(ops, 0, middle)
    assert rest.before(middle + end)[0] == one_by_one(ops, middle, middle + end)
    assert growth.before(middle)[0] == due, "asking changes nothing"


@given(ops=grows, middle=st.integers(0, 40))
def test_what_has_left_grows_no_more(ops: list[TimedGrow], middle: int) -> None:
    _, rest = Growth.of(ops).before(middle)
    others = [op for op in ops if op.place.region.owner != 1]
    assert rest.without({1}).before(90)[0] == one_by_one(others, middle, 90)


def test_only_pages_taken_when_they_are_full_are_taken_in_turn() -> None:
    page, steps = PageSize(4, 10), {kv_place(0): 1, kv_place(1): 3}
    in_turn = [TimedGrow(kv_place(0), 10, 1, 4), TimedGrow(kv_place(1), 10, 3, 4)]
    others = [TimedGrow(kv_place(1), *how) for how in ((20, 3, 4), (10, 2, 4), (10, 3))]

    def is_in_turn(*ops: TimedGrow) -> bool:
        return Growth.of(ops).is_in_turn(steps, page)

    assert is_in_turn(*in_turn) and is_in_turn(*reversed(in_turn))
    assert not any([is_in_turn(in_turn[0], other) for other in others])
    assert not is_in_turn(*in_turn, TimedGrow(kv_place(2), 10, 3, 4))
    assert not is_in_turn(in_turn[0], in_turn[0]) and not is_in_turn(in_turn[0])


@given(
    spare=st.lists(st.integers(0, 3), max_size=12),
    start=st.integers(0, 9),
    gone=st.sets(st.integers(0, 11)),
    count=st.integers(0, 20),
)
def test_a_decode_batch_grows_as_its_places_would_one_by_one(
    spare: list[int], start: int, gone: set[int], count: int
) -> None:
    """Pages of 4: decode i has room for spare[i] tokens, then grows every fourth; some leave."""
    batch = DecodeBatch(PageSize(4, 10))
    batch.clock = 7
    pairs = [(Job(i, 0, 8 - n, 9 - n, 8 - n), kv_place(i)) for i, n in enumerate(spare)]
    tables = {place: [0, 1] for _, place in pairs}
    batch.join(pairs, tables, lambda job: 9)
    ops = [TimedGrow(kv_place(i), 10, first, 4) for i, first in enumerate(spare)]
    batch.clock += start
    for i in gone & set(range(len(ops))):
        batch.leave(batch.ids.index(i))
    left = [op for op in ops if op.place.region.owner not in gone]
    expected = one_by_one(left, start, start + count)
    found = batch.due(count)
    assert [(start + i, op.place) for i, due in enumerate(found) for op in due] == [
        (step, op.place) for step, op in expected
    ]
    takers = [[id(tables[op.place]) for op in due] for due in found]
    assert [[*map(id, step)] for step in batch.takers(count)] == takers
    cycle = batch.cycle()
    assert cycle is not None
    assert [cycle.by_step[i % 4] for i in range(count)] == found


def test_a_job_with_pages_to_spare_grows_in_no_turn() -> None:
    batch = DecodeBatch(PageSize(4, 10))
    batch.join([(Job(0, 0, 3, 4, 3), kv_place(0))], {kv_place(0): [0, 1]}, lambda job: 9)
    assert batch.cycle() is None


@pytest.mark.parametrize("nbytes", [15, -10])
def test_a_repeated_plan_grows_by_whole_pages(nbytes: int) -> None:
    """Asked before any step is booked (law 3)."""
    launch, late = Compute(()), TimedGrow(kv_place(0), nbytes, 2)
    plan = StretchedPlan(Plan((launch,)), launch, (late,), steps=5)
    with pytest.raises(AssertionError, match="below zero, or no whole pages"):
        RepeatedPlan(plan, DecodeBatch(PageSize(4, 10))).due(3)
