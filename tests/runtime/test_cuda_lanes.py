"""Lanes of the CUDA executor where memory is real, over stand-ins for streams and events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.contract.executor import Launch, Span
from engine.contract.plan import Compute, Copy
from engine.contract.regions import Tier, hidden, kv_place, workspace
from runtime.executors.clock import WallClock
from runtime.executors.cuda import MAX_ISSUED, CudaExecutor
from runtime.executors.wall import LaneClosedError
from runtime.training.store import LaneStore
from tests.runtime.test_cuda import StandIn
from tests.runtime.test_lane_store import HERE, THERE
from tests.runtime.test_lane_store import Notes as NotedStore
from tests.runtime.test_wall import Notes, compute, swap_out

HELD, ASIDE = hidden(0, 1, 3, 0), hidden(0, 2, 3, 0)


class Gated(StandIn):
    """Streams whose launches end at calls of finish(), the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.open_ones: list[Any] = []
        self.streams: list[Any] = []  # the first is that of uploads
        gates = self

        class Stream(self.Stream):  # type: ignore[misc, name-defined]
            def __init__(self, device: int) -> None:
                super().__init__(device)
                gates.streams.append(self)

            def wait_event(self, event: Any) -> None:
                assert event.stream is not None, "CUDA takes an unrecorded event for a past one"
                gates.waited.append((self, event))

        class Event(self.Event):  # type: ignore[misc, name-defined]
            def __init__(self, enable_timing: bool = False) -> None:
                super().__init__(enable_timing)
                self.over = threading.Event()

            def record(self, stream: Any) -> None:
                super().record(stream)
                if stream is not gates.streams[0]:
                    gates.open_ones.append(self)
                else:
                    self.over.set()

            def query(self) -> bool:
                return self.over.is_set()

            def synchronize(self) -> None:
                assert self.over.wait(10)

        self.Event, self.Stream = Event, Stream

    def finish(self, count: int = 2) -> None:
        """Lets `count` events, of which a launch has two, be past."""
        for _ in range(min(count, len(self.open_ones))):
            self.open_ones.pop(0).over.set()

    @property
    def num_running(self) -> int:
        return len(self.open_ones) // 2


class Storing(Notes):
    """A machine with memory."""

    def __init__(self, work: Any = lambda launch: None) -> None:
        super().__init__(work)
        self.store = NotedStore()

    @property
    def started(self) -> list[Launch]:
        return [launch for launch, _ in self.log]


@contextmanager
def executed(
    monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, machine: Storing, *launches: Launch
) -> Iterator[tuple[CudaExecutor, WallClock, list[Span]]]:
    """Issues all launches at once."""
    stand_in.take_over(monkeypatch)
    clock, spans = WallClock(), list[Span]()
    with CudaExecutor(clock, machine) as executor:  # type: ignore[arg-type]
        clock.start()
        executor.prepare(launches)
        for launch in launches:
            executor.run(launch, spans.append)
        yield executor, clock, spans


def end_all(stand_in: Gated, clock: WallClock, spans: list[Span], count: int) -> None:
    """Runs until `count` launches have ended, one by one."""

    def end_them() -> None:
        for _ in range(1000):
            if len(spans) == count:
                return
            time.sleep(0.002)
            stand_in.finish()

    ending = threading.Thread(target=end_them)
    ending.start()
    clock.run()
    ending.join()
    assert len(spans) == count


def trains(*waits: Launch) -> Launch:
    """A launch whose memory is real."""
    return Launch(Compute((), writes=(HELD,)), tuple(w.op for w in waits))


def swap_in(*waits: Launch) -> Launch:
    op = Copy(kv_place(1, Tier.HOST), kv_place(1))
    return Launch(op, tuple(w.op for w in waits), (), 8, (0,), (0,))


def test_an_update_on_the_host_waits_for_its_gradients_to_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Put on a stream, the update would run at once, while its gradients are in flight."""
    stand_in, machine = Gated(), Storing()
    down = swap_out(1, 8)
    update = compute(down, on="cpu")
    with executed(monkeypatch, stand_in, machine, down, update) as (_, clock, spans):
        time.sleep(0.03)
        assert machine.started == [down], "the copy was issued and has not ended"
        stand_in.finish()
        clock.run()
    assert machine.started == [down, update]
    threads = dict(zip(["down", "update"], [name for _, name in machine.log], strict=True))
    assert threads == {"down": threading.current_thread().name, "update": "lane 0 cpu"}
    ended = {span.op: span for span in spans}
    assert ended[down.op].end_ns <= ended[update.op].start_ns


def test_the_engines_thread_goes_on_while_the_host_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch that waits for the update is held; another launch runs beside it."""
    go = threading.Event()
    update = compute(on="cpu")
    up, beside = swap_in(update), compute()
    machine = Storing(lambda launch: go.wait(10) and () if launch is update else ())
    with executed(monkeypatch, StandIn(), machine, update, up, beside) as (_, clock, spans):
        assert beside in machine.started and up not in machine.started and not go.is_set()
        go.set()
        clock.run()
    assert {launch.op for launch in machine.started} == {update.op, up.op, beside.op}
    ended = {span.op: span for span in spans}
    assert ended[update.op].end_ns <= ended[up.op].start_ns


def test_one_launch_is_behind_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third launch would take memory that earlier launches give back at their end."""
    stand_in, found = Gated(), list[int]()
    machine = Storing(lambda launch: found.append(stand_in.num_running) or ())
    with executed(monkeypatch, stand_in, machine, *[trains() for _ in range(8)]) as run:
        _, clock, spans = run
        assert len(machine.log) == MAX_ISSUED == 2
        end_all(stand_in, clock, spans, 8)
    assert max(found) == 1 and len(spans) == 8


def test_serving_beside_training_is_issued_at_once_behind_the_events_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes no memory of its own. A wait without an event holds it back."""
    stand_in, machine = Gated(), Storing()
    served = [compute() for _ in range(5)]
    behind = compute(served[0])
    with executed(monkeypatch, stand_in, machine, *served, behind) as (_, clock, spans):
        assert machine.started == [*served, behind] and len(served) > MAX_ISSUED
        assert len(stand_in.waited) == len(served) + 2, "for uploads, and for the one before"
        end_all(stand_in, clock, spans, 6)
    stand_in, machine = Gated(), Storing()
    training = [trains() for _ in range(MAX_ISSUED + 1)]
    swap = swap_in(training[-1])
    with executed(monkeypatch, stand_in, machine, *training, swap) as (_, clock, spans):
        assert machine.started == training[:MAX_ISSUED]
        end_all(stand_in, clock, spans, 4)
    assert {launch.op for launch in machine.started} == {*(x.op for x in training), swap.op}


def test_a_wait_for_a_launch_that_could_not_be_issued_raises_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closing executor joins its threads, also a thread that waits for the event."""
    stand_in = Gated()
    first = trains()
    down = Launch(Compute((), writes=(ASIDE,)), (first.op,))  # held, and issued by a poll
    update = compute(down, on="cpu")

    def work(launch: Launch) -> tuple[()]:
        if launch is down:
            raise RuntimeError("pinning 8 bytes of host memory failed")
        return ()

    marks, machine = [], Storing(work)

    def replay() -> None:
        with executed(monkeypatch, stand_in, machine, first, down, update) as (executor, clock, _):
            marks.extend(executor._marks.values())
            stand_in.finish()
            clock.run()

    failed = list[BaseException]()

    def fail() -> None:
        try:
            replay()
        except RuntimeError as error:
            failed.append(error)

    running = threading.Thread(target=fail, daemon=True)
    running.start()
    running.join(10)
    assert not running.is_alive(), "it hangs"
    assert [str(error) for error in failed] == ["pinning 8 bytes of host memory failed"]
    assert marks[1].error is failed[0] is marks[2].error and machine.started == [first, down]


def test_a_place_begins_when_its_first_launch_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other places use its bytes until then. A second stay begins when the first has ended."""
    stand_in, machine, scratch = Gated(), Storing(), workspace(0)
    first, again = (Launch(Compute((), writes=(HELD, scratch))) for _ in range(2))
    beside = Launch(Compute((), writes=(scratch,)))
    with executed(monkeypatch, stand_in, machine) as (executor, clock, spans):
        store, told = executor.store, machine.store.told
        assert store is not None
        executor.prepare([first, again, beside])
        for launch, nbytes in ((first, 10), (again, 20)):
            store.grow(HELD, nbytes)
            assert ("grow", nbytes) not in told
            executor.run(launch, spans.append)
            store.free(HELD)
        assert machine.started == [first] and told == [("grow", 10)], "there is room for a second"
        executor.run(beside, spans.append)
        end_all(stand_in, clock, spans, 3)
    assert [span.op for span in spans] == [first.op, again.op, beside.op]
    assert told.index(("free", 10)) < told.index(("grow", 20)) < told.index(("free", 20))


def test_workspace_holds_no_launch_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, machine, scratch = Gated(), Storing(), workspace(0)
    launches = [Launch(Compute((), writes=(scratch,))) for _ in range(2)]
    with executed(monkeypatch, stand_in, machine) as (executor, clock, spans):
        assert executor.store is not None
        executor.prepare(launches)
        for launch in launches:
            executor.store.grow(scratch, 10)
            executor.run(launch, spans.append)
            executor.store.free(scratch)
        assert machine.started == launches
        end_all(stand_in, clock, spans, 2)
    assert not machine.store.held


def test_held_launches_fail_when_the_executor_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, machine = Gated(), Storing()
    first, behind = trains(), trains()
    held = trains()
    update = compute(held, on="cpu")
    with executed(monkeypatch, stand_in, machine, first, behind, held, update) as (executor, *_):
        marks = {launch.op: executor._marks[launch.op] for launch in (held, update)}
    assert machine.started == [first, behind]
    for mark in marks.values():
        with pytest.raises(LaneClosedError):
            mark.span()


def test_places_of_an_on_open_tier_begin_when_they_are_opened() -> None:
    notes = NotedStore()
    store = LaneStore(notes, on_open=(HERE.tier,))
    store.grow(HERE, 10)
    old = store.begin([HERE])
    assert not notes.told and store.open(old) and notes.told == [("grow", 10)]
    store.free(HERE)
    store.grow(HERE, 20)
    new = store.begin([HERE])
    assert not store.open(new), "the stay before is not over"
    store.end(old)
    assert notes.told == [("grow", 10), ("free", 10)]
    assert store.open(new) and notes.held == {HERE: 20}
    store.grow(THERE, 5)
    store.free(THERE)
    assert notes.told[-2:] == [("grow", 5), ("free", 5)], (
        "a stay without a launch begins and ends at once"
    )
