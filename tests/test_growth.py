"""What grows in a repeated plan, against counting it step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.growth import Growth
from engine.plan import Compute, Grow, GrowCycle, PageSize, Plan, kv_place

grows = st.lists(
    st.builds(
        lambda job, first, every: Grow(kv_place(job), 10, first, every),
        st.integers(0, 3),
        st.integers(0, 30),
        st.integers(0, 7),
    ),
    max_size=8,
)


def one_by_one(ops: list[Grow], first: int, end: int) -> list[tuple[int, Grow]]:
    return [(step, op) for step in range(first, end) for op in ops if step in op.steps(step + 1)]


@given(ops=grows, middle=st.integers(0, 40), end=st.integers(0, 80))
def test_growth_is_what_every_step_takes_in_the_plans_order(
    ops: list[Grow], middle: int, end: int
) -> None:
    growth = Growth.of(Plan((*ops, Compute(())), repeats=100))
    due, rest = growth.before(middle)
    assert due == one_by_one(ops, 0, middle)
    assert rest.before(middle + end)[0] == one_by_one(ops, middle, middle + end)
    assert growth.before(middle)[0] == due, "asking changes nothing"


@given(ops=grows, middle=st.integers(0, 40))
def test_what_has_left_grows_no_more(ops: list[Grow], middle: int) -> None:
    _, rest = Growth.of(Plan((*ops, Compute(())), repeats=100)).before(middle)
    others = [op for op in ops if op.place.region.owner != 1]
    assert rest.without({1}).before(90)[0] == one_by_one(others, middle, 90)


@given(
    turns=st.lists(st.integers(0, 3), max_size=12),
    start=st.integers(0, 9),
    gone=st.sets(st.integers(0, 11)),
    end=st.integers(0, 20),
)
def test_a_cycle_is_its_places_one_by_one(
    turns: list[int], start: int, gone: set[int], end: int
) -> None:
    """Pages of 4: decode i grows at step turns[i] and every fourth after it; some leave."""
    ops = [Grow(kv_place(i), 10, first, 4) for i, first in enumerate(turns)]
    by_step = tuple(tuple(op for op in ops if op.first == step) for step in range(4))
    cycle = Growth.of(Plan((GrowCycle(by_step), Compute(())), repeats=100))
    single = Growth.of(Plan((*ops, Compute(())), repeats=100))
    assert cycle.before(start)[0] == single.before(start)[0]
    left, alone = (g.before(start)[1].without(gone) for g in (cycle, single))
    assert list(left.next_ops()) == [op for _, op in alone.before(start + 1)[0]]
    assert left.before(start + end)[0] == alone.before(start + end)[0]
    for growth in (left, alone):
        again = growth.as_cycle(PageSize(4, 10), None)
        assert again is not None
        due = [(start + i, op) for i in range(end) for op in again.by_step[i % 4]]
        assert due == left.before(start + end)[0]
