"""The ledger books whole or not at all, returns bytes in issue order and derives waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.regions import PageSize, Shortage, Tier, kv_place, weight
from engine.contract.rules import ContractError
from engine.memory.ledger import Ledger
from engine.memory.pool import FreeQueue, PagePool
from tests.support.strategies import cases

PAGE = PageSize(tokens=4, nbytes=100)
GPU, HOST = (Tier.GPU, 0), (Tier.HOST, 0)


def ledger(gpu_pages: int = 10, host_pages: int = 10) -> Ledger:
    return Ledger({GPU: 100 * gpu_pages, HOST: 100 * host_pages}, PAGE)


def launch(*job_ids: int) -> Compute:
    slices = tuple(Slice(Job(i, 0, known_tokens=9), 1) for i in job_ids)
    return Compute(slices, writes=tuple(kv_place(i) for i in job_ids))


def figures(books: Ledger) -> object:
    pages = {place: list(ids) for place, ids in books.pages.items()}
    held = dict(books.held_bytes), dict(books.written), dict(books.used), tuple(books.open)
    return books.free_bytes(), books.coming_bytes(), books.figures(), pages, held


def test_a_plan_that_is_short_at_its_end_books_nothing() -> None:
    """Law 3: the first operations would fit, the last does not."""
    books = ledger()
    books.book(Plan((Grow(kv_place(0), 300), launch(0))))
    before = figures(books)
    ops = (Free(kv_place(0)), Grow(kv_place(1), 900), launch(1), Grow(kv_place(2), 200))
    with pytest.raises(Shortage, match="100 bytes short"):
        books.book(Plan(ops))
    assert figures(books) == before
    books.conserved()


op_lists = st.lists(
    st.tuples(st.sampled_from("gfxr"), st.integers(0, 3), st.integers(1, 6)), max_size=12
)


@given(st.lists(op_lists, max_size=12), st.randoms(use_true_random=False))
@cases(200)
def test_random_plans_conserve_bytes_and_pages(plans: list, rng) -> None:
    """Law 2 and 3 on random programs: grow, free, exchange with the host, run."""
    books = ledger(gpu_pages=12, host_pages=6)
    running: list = []
    for rows in plans:
        program = legal(books, rows)
        before = figures(books)
        try:
            running += list(books.book(Plan(tuple(program))))
        except Shortage:
            assert figures(books) == before
        books.conserved()
        while running and rng.random() < 0.6:  # lanes are FIFO, but any lane may be ahead
            lanes = {op.lane: op for op in reversed(running)}
            op = rng.choice(list(lanes.values()))
            running.remove(op)
            books.settle(op)
            books.conserved()
    for op in running:
        books.settle(op)
    assert all(n == 0 for n in books.coming_bytes().values()), "all users have ended"


def legal(books: Ledger, rows: list) -> list:
    """Turns random letters into operations on places that will be held at that point."""
    held = set(books.held_bytes)
    program: list = []
    for letter, job, pages in rows:
        here, away = kv_place(job), kv_place(job, Tier.HOST)
        if letter == "g":
            program.append(Grow(here, 100 * pages))
            held.add(here)
        elif letter == "f" and here in held:
            program.append(Free(here))
            held.discard(here)
        elif letter == "x" and (here in held) != (away in held):
            src, dst = (here, away) if here in held else (away, here)
            program += [Copy(src, dst), Free(src)]
            held ^= {src, dst}
        elif letter == "r" and here in held:
            program.append(launch(job))
    return program


def test_a_taker_of_the_bytes_of_a_copy_waits_for_the_copy() -> None:
    books = ledger(gpu_pages=4)
    first = launch(0)
    books.book(Plan((Grow(kv_place(0), 400), first)))
    out = Copy(kv_place(0), kv_place(0, Tier.HOST))
    taker = launch(1)
    ops = (out, Free(kv_place(0)), Grow(kv_place(1), 400), taker)
    booked = books.book(Plan(ops))
    assert booked[out].waits == (first,), "a copy waits for the last writer of its source"
    assert booked[taker].waits == (out,), "the same lane needs no wait, the copy does"
    assert booked[out].copied[0] == 400
    assert list(booked[out].copied[1]) == [0, 1, 2, 3] == books.pages[kv_place(1)]


def test_free_bytes_stop_at_the_first_that_are_still_used() -> None:
    queue, slow, fast = FreeQueue(0), launch(0), launch(1)
    queue.give(100, [slow])
    queue.give(50, [fast])
    queue.settle(fast)
    assert (queue.free_bytes, queue.coming_bytes) == (0, 150), "order of issue, not of ending"
    queue.settle(slow)
    assert (queue.free_bytes, queue.coming_bytes) == (150, 0)


def test_a_shared_page_comes_back_with_its_last_holder() -> None:
    pool = PagePool(4)
    ids, _ = pool.take(3)
    pool.share(ids[:2])
    assert pool.give(ids, []) == [2], "two pages have another holder"
    assert pool.held_pages == 2
    assert pool.give(ids[:2], []) == [0, 1]
    assert pool.take(4)[0] == [3, 2, 0, 1], "never used first, then in the order of return"


def test_idle_pages_are_told_once_and_never_while_taken() -> None:
    pool, user = PagePool(2), launch(0)
    ids, _ = pool.take(2)
    pool.give(ids, [user])
    assert pool.drain_idle() == []
    taken, waits = pool.take(1)
    assert (taken, waits) == ([0], {user})
    pool.settle(user)
    assert pool.drain_idle() == [1] and pool.drain_idle() == []


STATE = weight(9, 0)
BROKEN = {  # promises, and how each looks at the end of a plan
    "which is not held": (Free(kv_place(5)),),
    "below zero, or no whole pages": (Grow(kv_place(5), 150),),
    "-300 bytes: below zero": (Grow(kv_place(5), -300),),
    "-1 bytes: below zero": (Grow(STATE, -1),),
    "copy of .* onto None at": (Copy(STATE, kv_place(5, Tier.HOST)),),
}


@pytest.mark.parametrize("why", BROKEN)
@given(op_lists, op_lists)
@cases(20)
def test_a_plan_that_breaks_a_promise_books_nothing(why: str, first: list, rows: list) -> None:
    """Law 3 where the fault is ours: what stands before it in the plan is not booked either."""
    books = Ledger({GPU: 10_050, HOST: 10_050}, PAGE, {STATE: 50})  # room for all that is drawn
    books.book(Plan(tuple(legal(books, first))))
    before = figures(books)
    with pytest.raises((ContractError, AssertionError), match=why):
        books.book(Plan((*legal(books, rows), *BROKEN[why])))
    assert figures(books) == before


def test_bytes_behind_a_busy_entry_are_coming_and_not_used() -> None:
    """They come back in the order of issue; what is told of memory is what is used."""
    first, second = (Compute(()) for _ in range(2))
    queue = FreeQueue(100)
    queue.take(90)
    older, _ = queue.give(30, [first]), queue.give(40, [second])
    assert (queue.free_bytes, queue.coming_bytes, queue.busy_bytes) == (10, 70, 70)
    queue.settle(second)
    assert (queue.free_bytes, queue.coming_bytes, queue.busy_bytes) == (10, 70, 30)
    assert queue.take(15) == {first}, "from the head, also where an operation still uses it"
    assert (queue.coming_bytes, queue.busy_bytes) == (65, 25)
    assert queue.reclaim(older, 5) == set()
    assert queue.busy_bytes == 20
    queue.settle(first)
    assert (queue.free_bytes, queue.coming_bytes, queue.busy_bytes) == (60, 0, 0)
