"""The wall clock: real time, in order, and never a hang where nothing can happen."""

from __future__ import annotations

import threading
import time

import pytest
import simpy

from runtime.executors.clock import WallClock

MS = 1_000_000


def test_time_stands_still_until_the_run_begins() -> None:
    clock = WallClock()
    time.sleep(0.005)
    assert clock.now == 0
    clock.start()
    time.sleep(0.002)
    assert 2 * MS <= clock.now < 2_000 * MS


def test_timed_events_come_at_their_times_and_in_order() -> None:
    clock, seen = WallClock(), []

    def arrive(at_ns: int):
        yield clock.timeout(at_ns)
        seen.append((at_ns, clock.now))

    due = [9 * MS, 3 * MS, 6 * MS, 6 * MS]
    for at_ns in due:
        clock.process(arrive(at_ns))
    clock.run()
    assert [at for at, _ in seen] == sorted(due)
    assert all(now >= at for at, now in seen)  # never early
    # Only the system's scheduler delays: the median of four is far below this on a busy machine.
    assert sorted(now - at for at, now in seen)[1] < 50 * MS
    assert [now for _, now in seen] == sorted(now for _, now in seen)


def test_now_moves_while_an_event_is_handled_and_delays_count_from_the_call() -> None:
    clock, seen = WallClock(), []

    def process():
        before = clock.now
        time.sleep(0.004)  # the host works
        seen.append(clock.now - before)
        start = clock.now
        yield clock.timeout(3 * MS)
        seen.append(clock.now - start)

    clock.process(process())
    clock.run()
    assert seen[0] >= 4 * MS and seen[1] >= 3 * MS


def test_a_completion_of_another_thread_wakes_the_process_with_its_result() -> None:
    clock, flag, out = WallClock(), threading.Event(), []

    def process():
        out.append((yield clock.watch(flag.is_set, lambda: "done")))

    clock.process(process())
    clock.start()
    threading.Timer(0.01, flag.set).start()
    clock.run()
    assert out == ["done"] and clock.now >= 10 * MS


def test_a_ring_wakes_a_clock_that_does_not_poll() -> None:
    clock, flag, seen = WallClock(poll_ns=10_000 * MS), threading.Event(), []

    def finish() -> None:
        flag.set()
        clock.ring()

    event = clock.watch(flag.is_set, lambda: None, rings=True)
    event.callbacks.append(lambda _: seen.append(clock.now))
    clock.start()
    threading.Timer(0.01, finish).start()
    clock.run()
    assert 10 * MS <= seen[0] < 5_000 * MS


def test_completions_are_seen_in_the_order_in_which_they_were_watched() -> None:
    clock, seen = WallClock(), []
    for i in range(5):
        clock.watch(lambda: True, lambda i=i: i).callbacks.append(lambda ev: seen.append(ev.value))
    clock.run()
    assert seen == list(range(5))


def test_watched_work_and_timed_events_share_the_clock() -> None:
    clock, flag, order = WallClock(), threading.Event(), []
    clock.watch(flag.is_set, lambda: None).callbacks.append(lambda _: order.append("work"))
    clock.timeout(5 * MS).callbacks.append(lambda _: order.append("early"))
    clock.timeout(60 * MS).callbacks.append(lambda _: order.append("late"))
    threading.Timer(0.02, flag.set).start()
    clock.run()
    assert order == ["early", "work", "late"]


def test_an_error_in_a_result_ends_the_run() -> None:
    clock = WallClock()

    def broken() -> None:
        raise RuntimeError("kernel died")

    clock.watch(lambda: True, broken)
    with pytest.raises(RuntimeError, match="kernel died"):
        clock.run()


def test_a_run_ends_where_nothing_can_happen_any_more() -> None:
    clock = WallClock()
    clock.timeout(MS)
    clock.run()  # returns
    with pytest.raises(RuntimeError, match='"until" event was not triggered'):
        clock.run(until=simpy.Event(clock))


def test_a_run_stops_at_a_given_time() -> None:
    clock = WallClock()

    def forever():
        while True:
            yield clock.timeout(MS)

    clock.process(forever())
    clock.run(until=8 * MS)
    assert clock.now >= 8 * MS


def test_a_moment_that_has_just_passed_comes_at_once() -> None:
    clock = WallClock()
    clock.timeout(-5, "now").callbacks.append(lambda event: seen.append(event.value))
    seen: list[str] = []
    clock.run()
    assert seen == ["now"]


def test_a_paced_clock_counts_the_time_of_its_nominal_machine() -> None:
    """Half the system's rate: an event due at 20 ms comes no sooner than after 40 ms."""
    clock, began_ns = WallClock(pace=lambda: 0.5), time.perf_counter_ns()

    def wait():
        yield clock.timeout(20 * MS)

    clock.process(wait())
    clock.run()
    assert time.perf_counter_ns() - began_ns >= 40 * MS
    assert clock.now >= 20 * MS


def test_a_held_clock_stands_still_and_goes_on_at_the_pace_of_then() -> None:
    paces = iter([1.0, 4.0])
    clock = WallClock(pace=lambda: next(paces))
    clock.start()
    with clock.held():
        held_ns = clock.now
        time.sleep(0.01)
        assert clock.now == held_ns
        assert clock.seconds(MS) > 0  # a sleeper looks again
    real_ns, shown_ns = time.perf_counter_ns(), clock.now
    time.sleep(0.01)
    shown_ns, real_ns = clock.now - shown_ns, time.perf_counter_ns() - real_ns
    assert shown_ns > 2 * real_ns * 0.9  # four, read a moment apart


@pytest.mark.slow
def test_a_clock_that_is_held_while_threads_read_it_never_runs_back() -> None:
    clock, seen, done = WallClock(pace=lambda: 3.0), [], threading.Event()
    clock.start()

    def read() -> None:
        while not done.is_set():
            seen.append(clock.now)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        with clock.held():
            pass
        time.sleep(1e-4)
    done.set()
    reader.join()
    assert len(seen) > 200 and seen == sorted(seen)


def test_a_sleep_while_the_clock_is_held_ends_on_time() -> None:
    """An event is due 5 ms ahead; a thread holds the clock for 20 ms in between."""
    clock, ended = WallClock(), threading.Event()

    def hold() -> None:
        with clock.held():
            time.sleep(0.02)
        ended.set()
        clock.ring()

    def wait():
        clock.watch(ended.is_set, lambda: None, rings=True)
        yield clock.timeout(5 * MS)

    began_ns = time.perf_counter_ns()
    clock.start()
    thread = threading.Thread(target=hold)
    thread.start()
    clock.run(clock.process(wait()))
    thread.join()
    assert time.perf_counter_ns() - began_ns >= 20 * MS
