"""The plan builder where bytes run out, and where shares of the room write one plan in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import Compute, Free, Grow, Plan, Slice
from engine.contract.policy import PlanBuilder
from engine.contract.regions import Place, Pool, Shortage, Tier, kv_place
from engine.contract.rules import ContractError
from engine.contract.view import RunningDecodes, View
from engine.memory.dry_run import DryRunPlanBuilder
from engine.memory.ledger import Ledger
from engine.memory.pool import Chain
from tests.support.states import HOST, PAGE, POOL, ids, job, view
from tests.support.strategies import cases
from traces.serving.request import Request

ONE, OTHER = kv_place(1), kv_place(2)
TWO = [Grow(ONE, PAGE.nbytes), Grow(OTHER, PAGE.nbytes)]


def builder(pages: int, held: dict[int, int] | None = None) -> DryRunPlanBuilder:
    return DryRunPlanBuilder(view([], [], pages=pages, held=held or {}))


def running(*job_ids: int) -> RunningDecodes:
    """Decodes whose pages are full."""
    return RunningDecodes((), (), tuple([Grow(kv_place(i), PAGE.nbytes) for i in job_ids]))


# ---- bytes run out
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


# ---- shares of the room
def test_a_share_within_a_share_has_no_more_room_than_that_one() -> None:
    whole = builder(pages=9)
    outer = whole.within({POOL: 2 * PAGE.nbytes})
    inner = outer.within({POOL: 5 * PAGE.nbytes})
    assert inner.room(POOL) == outer.room(POOL) == 2 * PAGE.nbytes
    with pytest.raises(Shortage):
        inner.grow(ONE, 3 * PAGE.nbytes)
    inner.grow(ONE, PAGE.nbytes)
    assert inner.room(POOL) == outer.room(POOL) == PAGE.nbytes
    assert whole.room(POOL) == 8 * PAGE.nbytes


def test_a_share_makes_room_before_the_share_around_it() -> None:
    """The inner one frees what it can while the outer share lacks room, and then the outer one."""
    whole, made = builder(pages=3, held={1: 1, 2: 1}), list[str]()

    def free_inner(pool: Pool, nbytes: int) -> None:
        made.append("inner")
        outer.free(ONE)

    def free_outer(pool: Pool, nbytes: int) -> None:
        made.append("outer")
        whole.free(OTHER)

    outer = whole.within({POOL: 2 * PAGE.nbytes}, free_outer)
    inner = outer.within({POOL: 3 * PAGE.nbytes}, free_inner)
    assert inner.room(POOL) == 3 * PAGE.nbytes and outer.room(POOL) == 2 * PAGE.nbytes
    inner.grow(kv_place(3), PAGE.nbytes)
    assert made == [] and whole.room(POOL) == 0
    inner.grow(kv_place(4), PAGE.nbytes)
    assert made == ["outer"] and inner.room(POOL) == PAGE.nbytes
    inner.grow(kv_place(5), PAGE.nbytes)
    assert made == ["outer", "inner"] and whole.room(POOL) == inner.room(POOL) == 0


def test_what_a_share_frees_it_may_take_beside_what_can_be_made() -> None:
    whole = builder(pages=4, held={1: 3})
    share = whole.within({POOL: 2 * PAGE.nbytes}, lambda pool, nbytes: whole.free(ONE))
    assert share.room(POOL) == 2 * PAGE.nbytes
    share.grow(OTHER, PAGE.nbytes)
    share.free(OTHER)
    assert share.room(POOL) == 2 * PAGE.nbytes
    held = builder(pages=4, held={1: 1, 2: 3})
    share = held.within({POOL: PAGE.nbytes}, lambda pool, nbytes: held.free(ONE))
    share.free(OTHER)
    assert share.room(POOL) == 4 * PAGE.nbytes


def test_room_that_cannot_be_made_is_a_shortage() -> None:
    whole = builder(pages=3)
    outer = whole.within({POOL: PAGE.nbytes})
    inner = outer.within({POOL: 2 * PAGE.nbytes}, lambda pool, nbytes: None)
    with pytest.raises(Shortage):
        inner.grow(ONE, 2 * PAGE.nbytes)
    assert not whole


def test_a_share_does_not_shrink_where_another_one_takes() -> None:
    whole = builder(pages=9)
    one, other = (whole.within({POOL: 4 * PAGE.nbytes}) for _ in range(2))
    one.grow(ONE, 4 * PAGE.nbytes)
    assert other.room(POOL) == 4 * PAGE.nbytes
    whole.grow(kv_place(3), 2 * PAGE.nbytes)
    assert other.room(POOL) == 3 * PAGE.nbytes == whole.room(POOL)


def test_a_share_discards_what_it_has_written_and_nothing_else() -> None:
    whole, lost = builder(pages=9), job(7, 4)
    one, other = (whole.within({POOL: 4 * PAGE.nbytes}) for _ in range(2))
    one.grow(ONE, PAGE.nbytes)
    other.grow(OTHER, PAGE.nbytes)
    other.restart(lost)
    one.refuse(lost)
    other.discard()
    assert one and whole and not other
    assert (whole.plan().ops, whole.plan().restart, whole.plan().refuse) == ((TWO[0],), (), (lost,))
    assert one.holds(ONE) and whole.holds(ONE) and not one.holds(OTHER)
    one.grow(ONE, PAGE.nbytes)
    assert whole.held(ONE) == 2 * PAGE.nbytes and whole.room(POOL) == 7 * PAGE.nbytes
    assert (one.room(POOL), other.room(POOL)) == (2 * PAGE.nbytes, 4 * PAGE.nbytes)


def test_the_whole_discards_what_its_shares_have_written() -> None:
    whole = builder(pages=9)
    share = whole.within({POOL: 4 * PAGE.nbytes})
    share.grow(ONE, PAGE.nbytes)
    whole.discard()
    assert not whole and not share and not share.holds(ONE)
    assert share.room(POOL) == 4 * PAGE.nbytes and whole.room(POOL) == 9 * PAGE.nbytes


def test_what_another_operation_needs_is_not_discarded() -> None:
    whole = builder(pages=4, held={1: 2})
    one, other = (whole.within({POOL: 3 * PAGE.nbytes}) for _ in range(2))
    one.free(ONE)
    other.grow(OTHER, 3 * PAGE.nbytes)
    with pytest.raises(Shortage):
        one.discard()
    assert [op.place for op in whole.plan().ops if isinstance(op, Free | Grow)] == [ONE, OTHER]
    assert one and not whole.holds(ONE) and whole.room(POOL) == PAGE.nbytes


def test_what_keeps_another_share_within_its_bytes_is_not_discarded() -> None:
    whole = builder(pages=4, held={1: 2})
    outer = whole.within({POOL: 0})
    inner = outer.within({})
    inner.free(ONE)
    outer.grow(OTHER, PAGE.nbytes)
    with pytest.raises(Shortage) as caught:
        inner.discard()
    assert (caught.value.place, caught.value.deficit_bytes) == (OTHER, PAGE.nbytes)
    assert (outer.room(POOL), whole.room(POOL)) == (PAGE.nbytes, 3 * PAGE.nbytes)


# ---- shares that write in turn
class Written(NamedTuple):
    """One call of a builder: the number of the builder, its method, and what it is given."""

    by: int
    method: str
    given: tuple[Any, ...]


WITHIN = {1: 0, 2: 0, 3: 1}  # the builder that each share is made within; 0 is the whole
PLACES = [kv_place(i, tier) for i in range(5) for tier in (Tier.GPU, Tier.HOST)]
PROMPT = tuple(range(16))
WAITING = Job(4, 0, prompt_tokens=16, known_tokens=16)
CALLS = ("grow", "grow", "free", "move", "copy", "share", "grow_running", "launch", "restart")
DRAWN = st.tuples(
    st.integers(0, 3),
    st.sampled_from((*CALLS, "refuse", "discard")),
    st.sampled_from(PLACES),
    st.sampled_from(PLACES),
    st.integers(1, 3),
)


def shown(keeps_pages: bool) -> View:
    """Jobs 0 and 1 hold KV; with prefix caching, the pages of job 3 are kept without a holder."""
    chains = {i: Chain(Request(i, 0, 16, 1, prompt_ids=PROMPT), PAGE.tokens) for i in range(5)}
    sizes = {POOL: 9 * PAGE.nbytes, HOST: 4 * PAGE.nbytes}
    books = Ledger(sizes, PAGE, chains=chains if keeps_pages else None)
    for i, pages in {3: 3, 0: 2, 1: 1}.items():
        place = kv_place(i)
        full = Job(i, 0, known_tokens=16, computed_tokens=pages * PAGE.tokens)
        fills = Compute((Slice(full, 1),), writes=(place,))
        books.book(Plan((Grow(place, pages * PAGE.nbytes), fills)))
        if keeps_pages:
            books.sharing[POOL].cache.keep(full, 0, books.pages[place])
        books.settle(fills)
    books.book(Plan((Free(kv_place(3)),)))
    return replace(
        view([], []),
        free_bytes=books.free_bytes(),
        coming_bytes=books.coming_bytes(),
        held_bytes=dict(books.held_bytes),
        kept_pages=books.sharing[POOL].dry_run if keeps_pages else None,
    )


def builders(state: View, shares: Sequence[int]) -> list[PlanBuilder]:
    """The whole and its shares, each of so many pages of both tiers."""
    made: list[PlanBuilder] = [DryRunPlanBuilder(state)]
    for (_, outer), pages in zip(WITHIN.items(), shares, strict=True):
        made.append(made[outer].within(dict.fromkeys((POOL, HOST), pages * PAGE.nbytes)))
    return made


def given_to(method: str, a: Place, b: Place, pages: int, plan: PlanBuilder) -> tuple[Any, ...]:
    """What a drawn call is given."""
    return {
        "grow": (a, pages * PAGE.nbytes),
        "free": (a,),
        "move": (a, b),
        "copy": (a, b),
        "share": (a, plan.found(WAITING)[:pages]),
        "grow_running": (running(*range(min(pages, 2))),),
        "launch": (Compute((), writes=(a,)),),
        "restart": (WAITING,),
        "refuse": (WAITING,),
    }[method]


def figures(plan: PlanBuilder) -> list[object]:
    """All that a builder tells of places and pages; what it finds is asked last, as it walks."""
    held = [plan.held(place) if plan.holds(place) else None for place in PLACES]
    pages = [plan.idle([page]) for page in range(9)]
    return [held, pages, plan.room(POOL), plan.room(HOST), bool(plan), plan.found(WAITING)]


def form(plan: PlanBuilder) -> list[str]:
    """The plan in words: an operation equals only itself."""
    assert isinstance(plan, DryRunPlanBuilder)
    written = plan.plan()
    return [*map(repr, written.ops), str(ids(written.restart)), str(ids(written.refuse))]


def is_within(share: int, outer: int) -> bool:
    return share == outer or (share in WITHIN and is_within(WITHIN[share], outer))


def write(made: Sequence[PlanBuilder], calls: Sequence[Written]) -> None:
    """Shortage also where running decodes find no room."""
    for by, method, arguments in calls:
        if getattr(made[by], method)(*arguments) is False:
            raise Shortage(ONE, 0)


@cases(600)
@given(
    keeps_pages=st.booleans(),
    shares=st.tuples(*[st.integers(0, 9)] * 3),
    drawn=st.lists(DRAWN, max_size=25),
)
def test_shares_in_turn_write_the_plan_of_one_builder(
    keeps_pages: bool, shares: tuple[int, ...], drawn: list[Any]
) -> None:
    state = shown(keeps_pages)
    made, log = builders(state, shares), list[Written]()
    for by, method, a, b, pages in drawn:
        if method != "discard":
            call = Written(by, method, given_to(method, a, b, pages, made[by]))
            with suppress(Shortage, ContractError):
                write(made, [call])
                log.append(call)
            continue
        left, before = [call for call in log if not is_within(call.by, by)], form(made[0])
        try:
            made[by].discard()
            log = left
        except (Shortage, ContractError):
            assert form(made[0]) == before
            with pytest.raises((Shortage, ContractError)):  # they need what would be discarded
                write(builders(state, shares), left)
    whole, again = DryRunPlanBuilder(state), builders(state, shares)
    write([whole] * len(made), log)
    write(again, log)
    assert form(made[0]) == form(whole)
    assert figures(made[0]) == figures(whole)
    assert [*map(figures, made)] == [*map(figures, again)]
