"""CPU work in real time: a worker thread per lane, copies as slow as their link."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from engine.contract.executor import Span
from engine.contract.plan import COMPUTE_LANE, SECOND_LANE, Lane
from runtime.executors.clock import WallClock
from runtime.executors.machine import Machine
from runtime.executors.streams import LaneWork, StreamExecutor, StreamLane
from runtime.measure.reference import ClockPace
from runtime.measure.tracker import Workspace


class Link(NamedTuple):
    """One direction of one link: `latency_ns` at the start of a copy, then its bytes."""

    bytes_per_s: float
    latency_ns: int = 0

    def duration_ns(self, nbytes: int) -> int:
        """Time from a copy's start until its last byte has arrived."""
        return self.latency_ns + round(nbytes * 1e9 / self.bytes_per_s)


COPY_PART_BYTES = 256 * 1024  # a throttled copy pauses between parts of this size
PR_SET_TIMERSLACK = 29  # of prctl, in ns, per thread


def wake_on_time() -> None:
    """Lets the kernel wake this thread on time, not up to 50 us late (its default on Linux)."""
    with suppress(AttributeError):  # only Linux has prctl, and its slack
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


class LaneClosedError(RuntimeError):
    """The executor was closed before this launch could run."""


@dataclass(slots=True, eq=False)
class ThreadMark:
    """The end of a launch on a thread; other lanes block on it as on a CUDA event.

    span() collects the sampled tokens on the engine's thread, while the lane runs its next launch.
    """

    rings: ClassVar[bool] = True
    work: LaneWork
    machine: Machine[Any]
    issued_ns: int
    past: threading.Event = field(default_factory=threading.Event)
    start_ns: int = 0
    end_ns: int = 0
    peak_bytes: int | None = None
    tokens: list[Any] = field(default_factory=list)  # per part of the work
    error: BaseException | None = None

    def is_past(self) -> bool:
        return self.past.is_set()

    def span(self) -> Span:
        self.check()
        ended: tuple[int, ...] = ()
        for (prepared, _), tokens in zip(self.work.parts, self.tokens, strict=True):
            ended += self.machine.collect(prepared, tokens)
        return Span(self.work.launch.op, self.start_ns, self.end_ns, self.peak_bytes, ended)

    def attempt(self, part: Callable[[], None]) -> None:
        """Runs a part of the launch; span() raises its first error on the engine's thread."""
        try:
            part()
        except BaseException as error:
            self.error = self.error or error

    def check(self) -> None:
        """Raises the error of the launch."""
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Blocks until past. A launch behind a failed launch fails too: its input is undefined."""
        self.past.wait()
        self.check()


class ThreadLane:
    """A worker thread that carries out one lane's launches in order.

    A launch starts when its lane is free, the launch is issued and its waits are past: as on a
    virtual lane (engine/contract/executor.py), and as with CUDA events. So the time in which
    threads hand over is part of a launch. Left between launches, that time was 4 % of a replay and
    in no prediction.
    """

    def __init__(
        self,
        name: Lane,
        clock: WallClock,
        machine: Machine[Any],
        link: Link | None = None,
        workspace: Workspace | None = None,
        pace: ClockPace | None = None,
    ) -> None:
        self._clock = clock
        self._machine = machine
        self._link = link
        self._workspace = workspace
        self._pace = pace
        self._closing = threading.Event()
        self._free_ns = 0
        self._inbox: queue.SimpleQueue[tuple[ThreadMark, Sequence[Any]] | None]
        self._inbox = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        label = f"lane {name[0]} {name[1]}"
        self._thread = threading.Thread(target=self._loop, name=label, daemon=True)
        self._thread.start()

    def start(self, work: LaneWork, waits: Sequence[Any]) -> ThreadMark:
        mark = ThreadMark(work, self._machine, self._clock.now)
        self._inbox.put((mark, waits))
        return mark

    def stop(self) -> None:
        self._closing.set()
        self._inbox.put(None)

    def join(self) -> None:
        self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)  # torch keeps these two per thread
        torch.set_flush_denormal(True)
        wake_on_time()
        while (item := self._inbox.get()) is not None:
            mark, waits = item
            mark.attempt(partial(self._carry_out, mark, waits))
            if mark.work.leave is not None:
                mark.attempt(mark.work.leave)
            mark.past.set()
            self._clock.ring()

    def _carry_out(self, mark: ThreadMark, waits: Sequence[ThreadMark]) -> None:
        for other in waits:
            other.wait()
        if self._closing.is_set():
            raise LaneClosedError("the executor was closed before this launch could run")
        mark.start_ns = max(self._free_ns, mark.issued_ns, *(other.end_ns for other in waits))
        begun_ns, carried = self._clock.now, 0
        for prepared, nbytes in mark.work.parts:
            mark.tokens.append(self._machine.start(prepared))
            carried += nbytes
            self._throttle(begun_ns, carried)
        mark.end_ns = self._free_ns = self._clock.now
        if self._workspace is not None and self._workspace.is_due(mark.work.launch.op):
            mark.peak_bytes = self._workspace.peak_bytes(mark.work.parts[0][0])
            self._free_ns = self._clock.now  # the repeat is no launch's time
        if self._pace is not None and self._pace.is_due(mark.end_ns - mark.start_ns):
            with self._clock.held():
                self._pace.measure()

    def _throttle(self, start_ns: int, carried_bytes: int) -> None:
        """Sleeps until the link would have carried the bytes; overshoots do not add up."""
        if self._link is None:
            return
        due_ns = start_ns + self._link.duration_ns(carried_bytes)
        while (left_ns := due_ns - self._clock.now) > 0 and not self._closing.is_set():
            self._closing.wait(self._clock.seconds(left_ns))


class WallExecutor(StreamExecutor):
    """The executor of `backend=cpu clock=wall`.

    Where a plan names two compute lanes of a device, they take turns on one thread. All times are
    those of the clock; with a `pace`, those of a machine on which the reference works
    take their nominal time.
    """

    def __init__(
        self,
        clock: WallClock,
        machine: Machine[Any],
        links: Mapping[str, Link] | None = None,
        workspace: Workspace | None = None,
        pace: ClockPace | None = None,
    ) -> None:
        """
        Args:
            clock: The run's clock.
            machine: Does the work, on this machine's memory.
            links: Speed of copy lanes by name ("gpu->host", "host->gpu", "peer->1"); any other
                lane runs as fast as memory allows.
            workspace: Samples the workspace of launches; a sample delays the next launch.
            pace: Sets the clock's rate as the machine's speed wanders, from device 0's launches.
        """
        by_name = dict(links or {})

        def open_lane(lane: Lane) -> StreamLane:
            if lane[1] == SECOND_LANE:  # one thread computes: both lanes take turns
                return self._lane((lane[0], COMPUTE_LANE))
            sampled = workspace if lane[1] == COMPUTE_LANE else None
            timed = pace if lane == (0, COMPUTE_LANE) else None  # one thread holds the clock
            return ThreadLane(lane, clock, machine, by_name.get(lane[1]), sampled, timed)

        super().__init__(clock, machine, open_lane, COPY_PART_BYTES)
