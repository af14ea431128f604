"""The wall clock of the engine, a simpy environment in real time; and device events on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import simpy
from simpy.core import EmptySchedule, Infinity
from simpy.events import NORMAL

SPIN_NS = 100_000  # a sleep may overshoot by about this much
LOOK_S = 0.001  # how soon to look again at a clock that stands still
REANCHOR_MS = 1000.0  # elapsed_time is a 32-bit float: up to here it resolves 61 ns
ANCHORS = 8  # looks for the moment of an anchor: the tightest one counts


class _Watched(NamedTuple):
    ready: Callable[[], bool]
    result: Callable[[], Any]
    event: simpy.Event
    rings: bool


class _Rate(NamedTuple):
    """The clock shows at_ns when the system's shows since_ns, and runs `factor` times as fast."""

    at_ns: int
    since_ns: int
    factor: float


class WallClock(simpy.Environment):
    """Runs the engine in real time: integer ns since the first step, 0 before it.

    `now` is live: it moves on while an event is handled, so the host's time passes by itself.
    The clock looks between events for what other threads or a device have completed. A thread rings
    when it is done. A device cannot ring and is polled every `poll_ns`. Threads must not be polled:
    each poll takes Python's lock from them, and polls every 50 us made their launches four times
    slower. `pace` is the ns that pass here in one ns of the system: above one on a machine faster
    than the nominal one, whose time the clock then counts.
    """

    def __init__(self, poll_ns: int = 50_000, pace: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__(initial_time=0)
        self._pace = pace
        self._rate: _Rate | None = None
        self._turning = threading.Lock()  # else a time read under the old rate could lie ahead
        self.idle_ns = 0  # thread time that step() spent on waiting: polls and short sleeps
        self._poll_ns = poll_ns
        self._bell = threading.Event()
        self._watched: list[_Watched] = []

    @property
    def now(self) -> int:
        """ns since the run began; never runs back. Safe to read on any thread."""
        with self._turning:
            return self._at(time.perf_counter_ns())

    def _at(self, real_ns: int) -> int:
        rate = self._rate
        if rate is None:
            return int(super().now)
        return rate.at_ns + int((real_ns - rate.since_ns) * rate.factor)

    def paced(self, real_ns: int) -> int:
        """A stretch of real time, measured just now, in the time of this clock."""
        return round(real_ns * self._pace())

    def start(self) -> None:
        """Lets time begin, as the first step does; called after a long set-up."""
        if self._rate is None:
            self._rate = _Rate(int(super().now), time.perf_counter_ns(), self._pace())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stops time inside the block; it goes on at the pace of then. One thread at a time."""
        self._run_at(0.0)
        try:
            yield
        finally:
            self._run_at(self._pace())
            self.ring()  # a sleep that began while time stood still lasts too long

    def seconds(self, wait_ns: float) -> float:
        """Real seconds to sleep until `wait_ns` have passed here."""
        factor = 0.0 if self._rate is None else self._rate.factor
        return wait_ns / 1e9 / factor if factor else LOOK_S

    def _run_at(self, factor: float) -> None:
        assert self._rate is not None, "the clock has not started"
        with self._turning:
            real_ns = time.perf_counter_ns()
            self._rate = _Rate(self._at(real_ns), real_ns, factor)

    def schedule(self, event: simpy.Event, priority: Any = NORMAL, delay: float = 0) -> None:
        """Counts a delay from the moment of the call, not from the event being handled."""
        passed_ns = self.now - super().now  # of the event being handled
        super().schedule(event, priority, passed_ns + delay)

    def timeout(self, delay: float = 0, value: Any = None) -> simpy.events.Timeout:
        """As in simpy; a moment that has passed already, as time is live, comes at once."""
        return simpy.events.Timeout(self, max(delay, 0), value)

    def watch(
        self, ready: Callable[[], bool], result: Callable[[], Any], rings: bool = False
    ) -> simpy.Event:
        """An event that succeeds with result() once ready(); an error of result() ends the run.

        `rings`: the thread that makes it ready calls ring() afterwards, so it need not be polled.
        """
        event = self.event()
        self._watched.append(_Watched(ready, result, event, rings))
        return event

    def ring(self) -> None:
        """Wakes the clock to look at its watched events. Safe to call on any thread."""
        self._bell.set()

    def step(self) -> None:
        """Handles the next event that is due; sleeps until there is one.

        Raises:
            EmptySchedule: No event is scheduled or watched, so none can happen any more.
        """
        self.start()
        while True:
            looked_ns = time.thread_time_ns()
            self._poll()
            wait_ns = self.peek() - self.now
            if wait_ns <= 0:
                return super().step()
            if wait_ns == Infinity and not self._watched:
                raise EmptySchedule
            self._sleep(wait_ns)
            self.idle_ns += time.thread_time_ns() - looked_ns

    def _poll(self) -> None:
        """Triggers the watched events that are ready, in the order in which they were watched."""
        self._bell.clear()  # before looking: a ring while we look is not lost
        done = [item for item in self._watched if item.ready()]
        for item in done:
            self._watched.remove(item)
            item.event.succeed(item.result())

    def _sleep(self, wait_ns: float) -> None:
        """Sleeps until the bell, the next poll or SPIN_NS before the next event."""
        if self._watched:
            if not all(item.rings for item in self._watched):
                wait_ns = min(wait_ns, self._poll_ns)
            self._bell.wait(None if wait_ns == Infinity else self.seconds(wait_ns))
        elif wait_ns > SPIN_NS:
            time.sleep(self.seconds(wait_ns - SPIN_NS))


# ---- a device's time on the clock
class Timed(Protocol):
    """A CUDA event with timing."""

    def elapsed_time(self, later: Any) -> float: ...


class Look(NamedTuple):
    """An event that happened between two moments of the run's clock."""

    event: Timed
    from_ns: int
    until_ns: int


def anchored(clock: WallClock, happen: Callable[[], Timed]) -> Timeline:
    """A timeline whose anchor is the best known of ANCHORS events.

    `happen` makes an event and waits for it. The host learns of an event 5 to 50 us after it. So
    the event lies in the middle of the shortest stretch of time, at most half of it away.
    """
    looks = []
    for _ in range(ANCHORS):
        from_ns = clock.now
        event = happen()
        looks.append(Look(event, from_ns, clock.now))
    best = min(looks, key=lambda look: look.until_ns - look.from_ns)
    return Timeline(clock, best.event, (best.from_ns + best.until_ns) // 2)


class Timeline:
    """Puts a device's events on the run's clock.

    Starts from one event whose moment on both clocks is known. The two drift apart by a few us a
    second, so a span that would start before its issue or end in the future moves the anchor.
    """

    def __init__(self, clock: WallClock, anchor: Timed, anchor_ns: int | None = None) -> None:
        """`anchor` happened at `anchor_ns`; None: now. A call of `span_ns` needs the `lock`."""
        self.lock = threading.Lock()
        self._clock, self._anchor = clock, anchor
        self._anchor_ns = clock.now if anchor_ns is None else anchor_ns
        self._last, self._last_ns = self._anchor, 0  # the end told so far that is latest

    def span_ns(
        self, begin: Timed, end: Timed, issued_ns: int, after_ns: int = 0
    ) -> tuple[int, int]:
        """Start and end of the launch between two past events.

        The launch began behind `after_ns`, and behind the launches that the device had ended by
        then. An earlier start is the anchor's error and is cut off.
        """
        to_end_ms = self._anchor.elapsed_time(end)
        start_ns = self._anchor_ns + round(self._anchor.elapsed_time(begin) * 1e6)
        end_ns = self._anchor_ns + round(to_end_ms * 1e6)
        shift_ns = max(0, issued_ns - start_ns)
        shift_ns -= max(0, end_ns + shift_ns - self._clock.now)
        if shift_ns or to_end_ms > REANCHOR_MS:
            self._anchor, self._anchor_ns = end, end_ns + shift_ns
        if self._last.elapsed_time(begin) >= 0:
            after_ns = max(after_ns, self._last_ns)
        start_ns = max(start_ns + shift_ns, after_ns)
        end_ns = max(start_ns, end_ns + shift_ns)
        if end_ns > self._last_ns:
            self._last, self._last_ns = end, end_ns
        return start_ns, end_ns
