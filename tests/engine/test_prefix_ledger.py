"""The ledger on shared pages: bytes count once, and an operation waits for all it depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import SECOND_LANE, Compute, Copy, Free, Grow, Op, Plan, Share, Slice
from engine.contract.regions import Kind, PageSize, Place, Region, Shortage, Tier, kv_place
from engine.contract.rules import ContractError
from engine.memory.ledger import Ledger
from engine.memory.pool import Chain, PageDryRun
from tests.support.strategies import cases
from traces.serving.request import Request

PAGE = PageSize(tokens=4, nbytes=100)
GPU, HOST = (Tier.GPU, 0), (Tier.HOST, 0)
PROMPT = tuple(range(16))


def ledger(pages: int = 10, jobs: int = 9) -> Ledger:
    chains = {i: Chain(Request(i, 0, 16, 1, prompt_ids=PROMPT), PAGE.tokens) for i in range(jobs)}
    return Ledger({GPU: 100 * pages, HOST: 100 * pages}, PAGE, chains=chains)


def launch(*job_ids: int) -> Compute:
    slices = tuple(Slice(Job(i, 0, known_tokens=16), 1) for i in job_ids)
    return Compute(slices, writes=tuple(kv_place(i) for i in job_ids))


def filled(books: Ledger, job_id: int, pages: int = 3) -> Compute:
    """A job has full pages, and the launch that fills them is in flight."""
    op, place = launch(job_id), kv_place(job_id)
    books.book(Plan((Grow(place, 100 * pages), op)))
    job = Job(job_id, 0, known_tokens=16, computed_tokens=4 * pages)
    books.sharing[GPU].cache.keep(job, 0, books.pages[place])
    return op


def test_pages_of_two_count_once_and_come_back_with_the_last() -> None:
    books = ledger()
    books.settle(filled(books, 0))
    books.book(Plan((Share(kv_place(1), (0, 1)), Grow(kv_place(1), 100))))
    assert books.pages[kv_place(1)] == [0, 1, 3]
    assert books.held_bytes[kv_place(1)] == 300
    assert (books.room_bytes()[GPU], books.held_pages(GPU)) == (600, 4)
    books.conserved()
    books.book(Plan((Free(kv_place(0)),)))
    assert books.room_bytes()[GPU] == 700
    books.conserved()
    books.book(Plan((Free(kv_place(1)),)))
    assert books.free_bytes()[GPU] == 1000
    books.conserved()


def test_a_kept_page_is_free_room_and_takes_room_when_it_is_shared() -> None:
    books = ledger(pages=4)
    books.settle(filled(books, 0))
    books.book(Plan((Free(kv_place(0)),)))
    assert books.free_bytes()[GPU] == 400, "kept pages have no holder"
    with pytest.raises(Shortage, match="100 bytes short"):
        books.book(Plan((Share(kv_place(1), (0, 1, 2)), Grow(kv_place(1), 200))))
    books.conserved()
    assert books.held_bytes == {}
    books.book(Plan((Share(kv_place(1), (0, 1)), Grow(kv_place(1), 200))))
    assert books.pages[kv_place(1)] == [0, 1, 3, 2], "never used first, then the end of a job"
    assert books.sharing[GPU].cache.find(Job(2, 0, known_tokens=16)) == [0, 1]
    books.conserved()


def test_a_plan_may_not_share_what_it_has_taken() -> None:
    books = ledger(pages=4)
    books.settle(filled(books, 0))
    books.book(Plan((Free(kv_place(0)),)))
    taken_first = Plan((Grow(kv_place(2), 200), Share(kv_place(1), (2,))))
    with pytest.raises(ContractError, match="the plan has taken"):
        books.book(taken_first)
    books.conserved()
    assert books.held_bytes == {}, "law 3"


def test_a_taker_of_a_shared_page_waits_for_all_its_users() -> None:
    """Job 0 goes to the host while job 1 holds its pages, too: the copy still reads them."""
    books = ledger(pages=4)
    books.settle(filled(books, 0))
    second = launch(1)
    books.book(Plan((Share(kv_place(1), (0, 1, 2)), Grow(kv_place(1), 100), second)))
    out = Copy(kv_place(0), kv_place(0, Tier.HOST))
    books.book(Plan((out, Free(kv_place(0)))))
    books.settle(second)
    books.book(Plan((Free(kv_place(1)),)))
    assert books.coming_bytes()[GPU] == 400
    taker = launch(2)
    booked = books.book(Plan((Grow(kv_place(2), 400), taker)))
    assert booked[taker].waits == (out,)


def test_a_sharer_waits_for_the_writer_on_another_lane() -> None:
    books = ledger()
    here, away = kv_place(0), kv_place(0, Tier.HOST)
    first = filled(books, 0)
    out = Copy(here, away)
    books.book(Plan((out, Free(here))))
    reader = launch(1)
    shared = books.book(Plan((Share(kv_place(1), (0, 1, 2)), Grow(kv_place(1), 100), reader)))
    assert shared[reader].waits == (), "its own lane is in order, and the copy only reads"
    leaves = Copy(kv_place(1), kv_place(1, Tier.HOST))
    booked = books.book(Plan((leaves,)))
    assert reader.lane == first.lane, "so a wait for the reader is a wait for the first writer"
    assert set(booked[leaves].waits) == {reader}
    back = Copy(away, here)
    booked = books.book(Plan((back,)))
    assert booked[back].waits == (out,)
    late, landing = launch(3), tuple(books.pages[here][:2])
    booked = books.book(Plan((Share(kv_place(3), landing), Grow(kv_place(3), 100), late)))
    assert booked[late].waits == (back,), "what a copy still writes may not be read"
    books.conserved()


def buffer_of(number: int) -> Place:
    """Bytes that are no pages."""
    return Place(Region(20 + number, Kind.BUFFER), Tier.GPU, 0)


def test_kept_pages_give_way_to_other_bytes_oldest_first() -> None:
    books = ledger(pages=4)
    books.settle(filled(books, 0))
    books.book(Plan((Free(kv_place(0)),)))
    assert books.drain_idle() == []
    cache, job = books.sharing[GPU].cache, Job(2, 0, known_tokens=16)
    books.book(Plan((Grow(buffer_of(0), 130),)))
    assert cache.find(job) == [0, 1], "the device has 270 bytes left, and each page 100"
    assert books.drain_idle() == [(GPU, [3, 2])], "the system gets their memory back"
    books.conserved()
    taken = Plan((Grow(buffer_of(1), 71), Share(kv_place(1), (1,))))
    with pytest.raises(ContractError, match="the plan has taken"):
        books.book(taken)
    books.book(Plan((Free(buffer_of(0)),)))
    books.conserved()
    books.book(Plan((Share(kv_place(1), (0, 1)), Grow(kv_place(1), 200))))
    assert sorted(books.pages[kv_place(1)]) == [0, 1, 2, 3], "their bytes are there again"
    books.conserved()


def test_pages_keep_nothing_where_a_job_holds_their_bytes_from_the_start() -> None:
    chains = {i: Chain(Request(i, 0, 16, 1, prompt_ids=PROMPT), PAGE.tokens) for i in range(9)}
    books = Ledger({GPU: 400}, PAGE, {buffer_of(0): 250}, chains=chains)
    books.conserved()
    for number in (0, 1):  # page by page, as in a device of one page
        books.settle(filled(books, number, 1))
        books.book(Plan((Free(kv_place(number)),)))
        books.conserved()
        assert len(books.sharing[GPU].cache.find(Job(2, 0, known_tokens=16))) == 1


def test_other_bytes_wait_for_the_users_of_the_pages_that_give_way() -> None:
    books = ledger(pages=3)
    user = filled(books, 0)
    books.book(Plan((Free(kv_place(0)),)))
    reader = Compute((), writes=(buffer_of(0),))
    booked = books.book(Plan((Grow(buffer_of(0), 50), reader)))
    assert booked[reader].waits == () and user.lane == reader.lane, "one lane is in order"
    leaves = Copy(buffer_of(1), buffer_of(1)._replace(tier=Tier.HOST))
    booked = books.book(Plan((Grow(buffer_of(1), 50), leaves)))
    assert booked[leaves].waits == (user,)
    assert books.drain_idle() == []
    books.settle(user)
    assert books.drain_idle() == [(GPU, [2])]


def test_bytes_that_come_and_go_take_the_same_pages() -> None:
    """What was lent is empty, and is lent again before a page that keeps something."""
    books = ledger(pages=4)
    books.settle(filled(books, 0))
    books.book(Plan((Free(kv_place(0)),)))
    for _ in range(3):
        there_and_back = (Grow(buffer_of(0), 200), Free(buffer_of(0)))
        books.book(Plan((*there_and_back, *there_and_back)))
        books.conserved()
        assert books.sharing[GPU].cache.find(Job(2, 0, known_tokens=16)) == [0, 1]
        assert books.sharing[GPU].dry_run().found(Job(2, 0, known_tokens=16)) == (0, 1)


def test_a_hit_waits_for_no_launch_that_only_trains() -> None:
    books = ledger()
    books.settle(filled(books, 0))
    job: Any = SimpleNamespace(job_id=9, training="of its own")
    trains = Compute((Slice(job, 1),), on=SECOND_LANE)
    books.book(Plan((Free(kv_place(0)), trains)))
    served = launch(1)
    booked = books.book(Plan((Share(kv_place(1), (0, 1)), Grow(kv_place(1), 100), served)))
    assert booked[served].waits == ()


letters = st.tuples(st.sampled_from("gsfxrkbc"), st.integers(0, 4), st.integers(1, 5))
programs = st.lists(st.lists(letters, max_size=8), max_size=10)


@given(programs, st.randoms(use_true_random=False))
@cases(150)
def test_the_dry_run_says_what_booking_does(plans: list, rng) -> None:
    """Law 2 and 3 on random programs, with shares of whatever can be found at that point."""
    books, running = ledger(pages=12), list[Op]()
    for rows in plans:
        for letter, number, count in rows:
            ops = program(books, letter, number, count)
            before = dict(books.held_bytes), books.room_bytes()
            try:
                running += list(books.book(Plan(tuple(ops))))
            except Shortage:
                assert before == (books.held_bytes, books.room_bytes())
            books.conserved()
            if letter == "k" and kv_place(number) in books.held_bytes:
                table = books.pages[kv_place(number)]
                done = Job(number, 0, known_tokens=16, computed_tokens=4 * min(4, len(table)))
                books.sharing[GPU].cache.keep(done, 0, table)
        while running and rng.random() < 0.6:
            lanes = {op.lane: op for op in reversed(running)}
            op = rng.choice(list(lanes.values()))
            running.remove(op)
            books.settle(op)
            books.conserved()
    for op in running:
        books.settle(op)
    assert all(n == 0 for n in books.coming_bytes().values()), "all users have ended"


def program(books: Ledger, letter: str, number: int, count: int) -> list:
    """One or two legal operations; a share behind a growth that may have taken what it wants."""
    here, away = kv_place(number), kv_place(number, Tier.HOST)
    if letter == "g":
        return [Grow(here, 100 * count)]
    if letter == "s" and here not in books.held_bytes:
        return behind(books, number, count)
    if letter == "f" and here in books.held_bytes:
        return [Free(here)]
    if letter == "b":
        return [Grow(buffer_of(number), 70 * count)]
    if letter == "c" and buffer_of(number) in books.held_bytes:
        return [Free(buffer_of(number))]
    if letter == "x" and (here in books.held_bytes) != (away in books.held_bytes):
        src, dst = (here, away) if here in books.held_bytes else (away, here)
        return [Copy(src, dst), Free(src)]
    if letter == "r" and here in books.held_bytes:
        return [launch(number)]
    return []


def behind(books: Ledger, number: int, count: int) -> list:
    """Frees one place, grows another, then shares what a dry run finds after both."""
    dry_run: PageDryRun = books.sharing[GPU].dry_run()
    ops: list = []
    room_bytes = books.room_bytes()[GPU]
    other = next((p for p in books.held_bytes if p.tier is Tier.GPU), None)
    if other is not None and count % 2:
        ops.append(Free(other))
        if other.region.kind is Kind.KV:
            room_bytes += 100 * dry_run.free(other)
        else:
            room_bytes += books.held_bytes[other]
            dry_run.lend(room_bytes)
    if room_bytes >= 100 * count:
        ops.append(Grow(kv_place(8), 100 * count))
        dry_run.take(kv_place(8), count)
        room_bytes -= 100 * count
    if number % 2 and room_bytes >= 70:
        ops.append(Grow(buffer_of(8), 70))
        dry_run.lend(room_bytes - 70)
    found = dry_run.found(Job(number, 0, known_tokens=16))
    return [*ops, Share(kv_place(number), found)] if found else ops
