"""What a job needs of pages in a repeated plan: by arithmetic as by walking every step."""

from __future__ import annotations

import pytest
from engine.contract.kv_check import RepeatedPart, first_lack, parts_of
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import Compute, Grow, Plan, Slice
from engine.contract.regions import PageSize, kv_place
from engine.contract.rules import Rule
from tests.support.strategies import cases

PAGE = PageSize(tokens=4, nbytes=100)
PLACE = kv_place(0)

grows = st.lists(
    st.builds(
        lambda pages, first, every: Grow(PLACE, pages * PAGE.nbytes, first, every),
        st.integers(1, 3),
        st.integers(0, 30),
        st.sampled_from([0, 0, 1, 3, 4, 5]),
    ),
    max_size=4,
)
parts = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([1, 1, 2, 5])), min_size=1, max_size=3
)


def walked(
    job: Job, pages: int, rows: list[RepeatedPart], taken: list[Grow], tokens_left: int
) -> Rule | None:
    """The same step by step: what a job has computed, knows, holds and has still to sample."""
    done, known, left, step = job.computed_tokens, job.known_tokens, tokens_left, 0
    for until, tokens in rows:
        while step < until:
            if not left:
                return None
            pages += sum(
                op.nbytes // PAGE.nbytes
                for op in taken
                if step == op.first
                or (op.every and step > op.first and not (step - op.first) % op.every)
            )
            if tokens > known - done:
                return Rule.TOKENS
            if done + tokens > pages * PAGE.tokens:
                return Rule.KV_PAGES
            done, step = done + tokens, step + 1
            if done == known:
                known, left = known + 1, left - 1
    return None


@given(st.integers(0, 12), st.integers(1, 20), st.integers(0, 8), parts, grows, st.integers(1, 40))
@cases(600)
def test_it_is_what_a_walk_over_the_steps_finds(
    computed: int,
    missing: int,
    pages: int,
    lengths: list[tuple[int, int]],
    taken: list[Grow],
    tokens_left: int,
) -> None:
    job, rows, step = Job(0, 0, 1, computed + missing, computed), list[RepeatedPart](), 0
    for steps, tokens in lengths:
        step += steps
        rows.append(RepeatedPart(step, tokens))
    found = first_lack(job, pages, rows, taken, PAGE, tokens_left)
    expected = walked(job, pages, rows, taken, tokens_left)
    # A part that asks for more tokens than there are is told as a whole, before its pages run out,
    # and also where the job would have ended on the way.
    if found is None or found[0] is Rule.KV_PAGES:
        assert expected is (None if found is None else Rule.KV_PAGES)
    else:
        assert any(tokens > 1 for _, tokens in rows)


def test_decodes_that_grow_a_page_a_page_go_on_for_ever() -> None:
    job, forever = Job(0, 0, 3, 4, 3), 1 << 30
    again = [Grow(PLACE, PAGE.nbytes, 1, PAGE.tokens)]
    assert first_lack(job, 1, [RepeatedPart(forever, 1)], again, PAGE, 1 << 20) is None
    late = [Grow(PLACE, PAGE.nbytes, 2, PAGE.tokens)]
    assert first_lack(job, 1, [RepeatedPart(forever, 1)], late, PAGE, 1 << 20) == (
        Rule.KV_PAGES,
        "at step 1 1 pages of 4 for 4 + 1 tokens",
    )
    assert first_lack(job, 1, [RepeatedPart(forever, 1)], late, PAGE, 1) is None, "it ends before"


def test_parts_are_those_of_the_slice() -> None:
    a, b = Job(0, 0, 9, 9), Job(1, 0, 9, 9)
    launch = Compute((Slice(a, 2), Slice(b, 3)))
    plan = Plan((launch,), repeats=9, later=((2, (Slice(b, 4),)), (5, (Slice(a, 1), Slice(b, 1)))))
    assert parts_of(plan, 0) == [(2, 2), (5, 2), (9, 1)]
    assert parts_of(plan, 1) == [(2, 3), (5, 4), (9, 1)]


@pytest.mark.parametrize("tokens", [2, 5])
def test_a_prompt_of_fewer_tokens_than_its_slices_is_told(tokens: int) -> None:
    job = Job(0, 0, 9, 9)
    found = first_lack(job, 100, [RepeatedPart(6, tokens)], [], PAGE, 5)
    assert found is not None and found[0] is Rule.TOKENS
