"""Threads as lanes: order, waits, link time, errors and the end, on a machine that only notes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from engine.contract.executor import Launch, Span
from engine.contract.plan import Compute, Copy
from engine.contract.regions import Place, Pool, Tier, kv_place, weight
from runtime.executors.clock import WallClock
from runtime.executors.streams import split_copy
from runtime.executors.wall import LaneClosedError, Link, WallExecutor

MS = 1_000_000


class Notes:
    """A machine whose work is a function per launch; notes its launches and their threads."""

    store = None

    def __init__(self, work: Callable[[Launch], Any] = lambda launch: None) -> None:
        self.work, self.log, self.released = work, [], []
        self.collected: list[str] = []

    def prepare(self, launch: Launch) -> Launch:
        return launch

    def start(self, prepared: Launch) -> tuple[int, ...]:
        self.log.append((prepared, threading.current_thread().name))
        return self.work(prepared) or ()

    def collect(self, prepared: Launch, tokens: tuple[int, ...]) -> tuple[int, ...]:
        self.collected.append(threading.current_thread().name)
        return tokens

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        self.released.append((pool, tuple(pages)))


def compute(*waits: Launch, on: str = "compute") -> Launch:
    return Launch(Compute((), on=on), tuple(w.op for w in waits))


def swap_out(pages: int, page_bytes: int, *waits: Launch) -> Launch:
    op = Copy(kv_place(1), kv_place(1, Tier.HOST))
    ids = range(pages)
    return Launch(op, tuple(w.op for w in waits), (), pages * page_bytes, ids, ids)


def run(machine: Notes, *launches: Launch, links: dict[str, Link] | None = None) -> list[Span]:
    """Issues all launches at once, as run-ahead would; spans in the order of their settling."""
    clock, spans = WallClock(), []
    with WallExecutor(clock, machine, links) as executor:
        assert 0 < executor.prepare(launches) < 100 * MS  # packing's time; nothing waits for it
        for launch in launches:
            executor.run(launch, spans.append)
        clock.run()
    return spans


def test_a_lane_is_first_in_first_out_and_its_spans_do_not_overlap() -> None:
    machine = Notes(lambda launch: time.sleep(0.002))
    launches = [compute() for _ in range(5)]
    spans = run(machine, *launches)
    assert [span.op for span in spans] == [launch.op for launch in launches]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
    assert all(span.end_ns - span.start_ns >= 2 * MS for span in spans)
    assert {name for _, name in machine.log} == {"lane 0 compute"}


def test_the_time_in_which_threads_hand_over_is_the_next_launchs() -> None:
    clock, spans, issued = WallClock(), [], threading.Event()
    first = compute()
    machine = Notes(lambda launch: issued.wait(5) and () if launch is first else time.sleep(0.001))
    with WallExecutor(clock, machine) as executor:
        for launch in (first, compute(), compute()):
            executor.prepare([launch])
            executor.run(launch, spans.append)
        issued.set()
        clock.run()
    assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))


def test_lanes_overlap_and_a_wait_orders_them() -> None:
    machine = Notes(lambda launch: time.sleep(0.02))
    first = compute()
    free = compute(on="cpu")
    bound = swap_out(2, 64, first)
    spans = {span.op: span for span in run(machine, first, free, bound)}
    assert spans[free.op].start_ns < spans[first.op].end_ns
    assert spans[bound.op].start_ns >= spans[first.op].end_ns


def test_many_random_waits_are_all_kept() -> None:
    """A random chain over three lanes: no launch starts before its waits have ended."""
    rng, launches = random.Random(3), []
    for i in range(200):
        waits = rng.sample(launches, min(i, 2))
        kind = rng.choice(["compute", "cpu", "copy"])
        launches.append(swap_out(1, 8, *waits) if kind == "copy" else compute(*waits, on=kind))
    spans = {span.op: span for span in run(Notes(), *launches)}
    assert len(spans) == 200
    for launch in launches:
        assert all(spans[w].end_ns <= spans[launch.op].start_ns for w in launch.waits)


def test_a_settled_launch_needs_no_wait() -> None:
    clock, machine, spans = WallClock(), Notes(), []
    first = compute()
    second = compute(first)
    with WallExecutor(clock, machine) as executor:
        for launch in (first, second):
            executor.prepare([launch])
            executor.run(launch, spans.append)
            clock.run()
        assert not executor._marks and not executor._work
    assert len(spans) == 2


def test_a_launch_is_prepared_and_the_one_before_collected_while_a_lane_computes() -> None:
    """The lane waits inside a launch for the engine's thread, or fails."""
    clock, spans, settled = WallClock(), [], threading.Event()
    machine = Notes(lambda launch: (settled.wait(10),) if launch is second else None)
    first, second, third = compute(), compute(), compute()

    def done(span: Span) -> None:
        spans.append(span)
        if span.op is first.op:
            executor.prepare([third])
            executor.run(third, done)
            settled.set()

    with WallExecutor(clock, machine) as executor:
        executor.prepare([first, second])
        executor.run(first, done)
        executor.run(second, done)
        clock.run()
    assert [span.op for span in spans] == [first.op, second.op, third.op]
    assert spans[1].ended == (True,)
    assert spans[2].start_ns - spans[1].end_ns < 5 * MS  # it lay there, prepared
    assert machine.collected == [threading.current_thread().name] * 3


def test_ended_jobs_reach_the_span() -> None:
    assert run(Notes(lambda launch: (7,)), compute())[0].ended == (7,)


@pytest.mark.parametrize("kilobytes", [64, 2048])
def test_a_copy_takes_the_time_of_its_link(kilobytes: int) -> None:
    link = Link(bytes_per_s=50e6, latency_ns=2 * MS)
    pages = kilobytes // 16
    launches = [swap_out(pages, 16 * 1024) for _ in range(3)]
    spans = run(Notes(), *launches, links={"gpu->host": link})
    due_ns = link.duration_ns(pages * 16 * 1024)
    taken = sorted(span.end_ns - span.start_ns for span in spans)
    assert taken[0] >= due_ns  # never faster than the link
    # A sleep overshoots by ~0.1 ms here; a busy neighbour may add a few ms to one of three.
    assert taken[0] <= due_ns + 10 * MS


def test_a_long_copy_is_carried_out_in_parts_that_cover_it_once() -> None:
    machine = Notes()
    launch = swap_out(70, 16 * 1024)
    run(machine, launch)
    parts = [part for part, _ in machine.log]
    assert len(parts) == 5 and all(part.nbytes <= 256 * 1024 for part in parts)
    assert sum(part.nbytes for part in parts) == launch.nbytes
    assert [p for part in parts for p in part.src_pages] == list(range(70))
    assert [p for part in parts for p in part.dst_pages] == list(range(70))


def test_short_copies_and_pages_larger_than_a_part_are_not_cut() -> None:
    assert len(split_copy(swap_out(4, 1024), 256 * 1024)) == 1
    assert [part.nbytes for part in split_copy(swap_out(3, 1000), 10)] == [1000] * 3
    assert len(split_copy(compute(), 10)) == 1


def test_an_error_on_a_lane_is_raised_in_the_engine_without_a_hang() -> None:
    def work(launch: Launch) -> None:
        time.sleep(0.005)
        raise ArithmeticError("no such kernel")

    with pytest.raises(ArithmeticError, match="no such kernel"):
        run(Notes(work), compute(), compute())


def test_a_launch_behind_a_failed_one_never_runs() -> None:
    broken = compute()
    behind = swap_out(1, 8, broken)

    def work(launch: Launch) -> None:
        assert launch.op is broken.op, "ran on garbage"
        raise ArithmeticError("first")

    machine = Notes(work)
    with pytest.raises(ArithmeticError, match="first"):
        run(machine, broken, behind)
    assert [launch.op for launch, _ in machine.log] == [broken.op]


@pytest.mark.parametrize("told", ["the last copy of weight", "no such kernel"])
def test_an_error_behind_a_launch_fails_the_run(told: str) -> None:
    """Memory is freed on the lane, behind its last launch: an error there fails the run, unless an
    earlier error has."""

    class Keeping:
        def grow(self, place: Place, nbytes: int) -> None:
            pass

        def free(self, place: Place) -> None:
            raise ArithmeticError(f"the last copy of {place.region.kind}")

    place, freed = weight(0, 0), threading.Event()

    def work(launch: Launch) -> None:
        freed.wait(5)
        if told == "no such kernel":
            raise ArithmeticError(told)

    machine = Notes(work)
    machine.store = Keeping()  # type: ignore[attr-defined]
    user = Launch(Compute((), (), (place,)))
    behind = compute(user, on="cpu")

    def failing() -> None:
        clock = WallClock()
        with WallExecutor(clock, machine) as executor:
            assert executor.store is not None
            executor.store.grow(place, 8)
            executor.prepare([user, behind])
            for launch in (user, behind):
                executor.run(launch, lambda span: None)
            executor.store.free(place)
            freed.set()
            clock.run()

    with pytest.raises(ArithmeticError, match=told):
        within(20, failing)
    assert [launch.op for launch, _ in machine.log] == [user.op], "ran on garbage"


def within(limit_s: float, work: Callable[[], None]) -> None:
    """Does work that may hang; raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"hangs for {limit_s} s"
    for error in errors:
        raise error


def test_closing_ends_throttled_copies_and_waiting_lanes_at_once() -> None:
    clock, machine = WallClock(), Notes()
    slow = swap_out(2, 1 << 20)
    behind = compute(slow)
    executor = WallExecutor(clock, machine, {"gpu->host": Link(1e4)})  # 200 s
    executor.prepare([slow, behind])
    failed = []
    for launch in (slow, behind):
        executor.run(launch, failed.append)
    marks = list(executor._marks.values())
    begin = time.perf_counter()
    executor.close()
    assert time.perf_counter() - begin < 5
    assert not failed and all(mark.is_past() for mark in marks)
    with pytest.raises(LaneClosedError):
        marks[1].span()


def test_release_goes_to_the_machine() -> None:
    machine = Notes()
    with WallExecutor(WallClock(), machine) as executor:
        executor.release((Tier.GPU, 0), [1, 2])
    assert machine.released == [((Tier.GPU, 0), (1, 2))]


class Yardstick:
    """A pace of its own, due after every launch."""

    factor = 0.5

    def __init__(self) -> None:
        self.measured = 0

    def is_due(self, worked_ns: int) -> bool:
        return worked_ns > 0

    def measure(self) -> None:
        self.measured += 1
        time.sleep(0.01)


def test_measuring_the_pace_takes_no_time_of_the_clock() -> None:
    pace, spans = Yardstick(), []
    clock = WallClock(pace=lambda: 0.5)
    launches = [compute() for _ in range(5)]
    with WallExecutor(clock, Notes(lambda launch: time.sleep(0.004)), pace=pace) as executor:
        executor.prepare(launches)
        for launch in launches:
            executor.run(launch, spans.append)
        clock.run()
    assert pace.measured == 5
    assert all(span.end_ns - span.start_ns >= 2 * MS for span in spans)  # half of 4 ms
    gaps_ns = [b.start_ns - a.end_ns for a, b in pairwise(spans)]
    assert sorted(gaps_ns)[2] < 2 * MS  # of the 5 ms that 10 ms of measuring would show as


def test_a_throttled_copy_takes_the_links_time_on_a_paced_clock() -> None:
    clock, spans, link = WallClock(pace=lambda: 2.0), [], Link(1e6, 0)
    copy = swap_out(10, 2_000)  # 20 ms of the link
    began_ns = time.perf_counter_ns()
    with WallExecutor(clock, Notes(), {"gpu->host": link}) as executor:
        executor.prepare([copy])
        executor.run(copy, spans.append)
        clock.run()
    assert spans[0].end_ns - spans[0].start_ns >= 20 * MS
    assert time.perf_counter_ns() - began_ns >= 10 * MS
