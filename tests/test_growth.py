"""What grows in a repeated plan, against counting it step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.growth import Growth
from engine.plan import Compute, Grow, Plan, kv_place

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
