"""CUDA: a stream per lane, events as marks, and for the host's updates a thread. The rest is
streams.py, which CI runs on threads.

What of this has never run on a GPU is listed in DESIGN.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import cuda

from engine.contract.executor import Launch, Span
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Compute, Lane, Op
from engine.contract.regions import Tier
from runtime.executors.clock import Timeline, WallClock, anchored
from runtime.executors.device import count_peak, peak_since, stream_of
from runtime.executors.machine import Machine
from runtime.executors.streams import LaneMark, LaneWork, StreamExecutor, StreamLane
from runtime.executors.wall import LaneClosedError, ThreadLane, punctual

DEEP = 2  # launches of training on a stream at a time


@dataclass(slots=True, eq=False)
class CudaMark:
    """The end of a launch on a stream. Keeps all that its kernels use until it is past.

    A launch that is held has no events yet; a thread of the host may wait for it all the same.
    """

    rings: ClassVar[bool] = False  # a device is polled
    work: LaneWork
    lane: CudaLane
    behind: Sequence[Any] = ()  # marks whose ends it follows; none once its own times are known
    begin: Any = None
    end: Any = None
    tokens: tuple[Any, ...] = ()  # per part, on the device
    fetched: tuple[Any, ...] = ()  # the same, on their way to pinned memory
    issued_ns: int = 0
    peak_bytes: int | None = None
    is_over: bool = False  # and its span was told, so what it leaves behind is free
    error: BaseException | None = None
    issued: threading.Event = field(default_factory=threading.Event)
    _times_ns: tuple[int, int] | None = None

    def is_past(self) -> bool:
        if not self.issued.is_set():
            self.lane.advance()
        return self.error is not None or (self.issued.is_set() and bool(self.end.query()))

    def span(self) -> Span:
        self.check()
        work, ended = self.work, tuple[int, ...]()
        for (prepared, _), tokens in zip(work.parts, self.fetched, strict=True):
            ended += self.lane.machine.collect(prepared, tokens)
        start_ns, end_ns = self._times()
        if work.leave is not None:
            work.leave()
        self.is_over = True
        self.tokens = self.fetched = ()  # the next one on the stream still asks when it ended
        self.work = replace(work, parts=())
        return Span(work.launch.op, start_ns, end_ns, self.peak_bytes, ended)

    # ---- for threads of the host
    @property
    def end_ns(self) -> int:
        """When it ended, on the run's clock. Only once past."""
        return self._times()[1]

    def check(self) -> None:
        """Raises what kept it from being issued."""
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Blocks until past: the calling thread, neither a stream nor the engine's thread."""
        self.issued.wait()
        self.check()
        self.end.synchronize()

    def _times(self) -> tuple[int, int]:
        """Of two threads that ask, the first one fixes them. No start before the end of the launch
        before it on the stream, nor of one that it has waited for: events know no better than
        the timeline's anchor."""
        if self._times_ns is None:
            after_ns = max((other.end_ns for other in self.behind), default=0)
            timeline = self.lane.timeline
            with timeline.lock:
                if self._times_ns is None:
                    self._times_ns = timeline.span_ns(
                        self.begin, self.end, self.issued_ns, after_ns
                    )
            self.behind = ()
        return self._times_ns


class CudaLane:
    """A stream; launches are put on it by the engine's thread, which never waits for them.

    Serving's at once, behind the events they wait for; if one of these has not been issued yet, or
    is of a thread, they are held till then. Where memory is real (LaneWork.open), a launch is held
    until what it waits for is over, so that the bytes it takes are really free, and until all but
    one of such before it on the stream have ended: one is always behind the one that runs. The
    engine's polls look whether its time has come.
    """

    def __init__(
        self, name: Lane, clock: WallClock, machine: Machine[Any], timeline: Timeline, device: int
    ) -> None:
        self._stream = stream_of(device, name[1])
        self._clock, self.machine, self.timeline = clock, machine, timeline
        self._device = device
        self._computes = name[1] == COMPUTE_LANE
        self._held = deque[tuple[CudaMark, Sequence[Any]]]()
        self._running = deque[CudaMark]()
        self._newest: CudaMark | None = None  # of those issued

    def start(self, work: LaneWork, waits: Sequence[Any]) -> CudaMark:
        mark = CudaMark(work, self)
        self._held.append((mark, waits))
        self.advance()
        return mark

    def advance(self) -> None:
        """Issues what is held, as far as its time has come. On the engine's thread only."""
        while self._held:
            mark, waits = self._held[0]
            try:
                if not self._may_issue(mark, waits):
                    return
                self._issue(mark, waits)
            except BaseException as error:
                mark.error = error
                raise
            finally:  # a thread of the host that waits for it learns of either
                if mark.end is not None or mark.error is not None:
                    self._held.popleft()
                    mark.issued.set()

    def stop(self) -> None:
        """What is on a stream cannot be taken back; what is held never runs."""
        while self._held:
            mark, _ = self._held.popleft()
            mark.error = LaneClosedError("the executor was closed before this launch could run")
            mark.issued.set()

    def join(self) -> None:
        self._stream.synchronize()

    def _may_issue(self, mark: CudaMark, waits: Sequence[Any]) -> bool:
        if mark.work.open is None:
            return all(map(_is_on_stream, waits))
        while self._running and self._running[0].end.query():
            self._running.popleft()
        if len(self._running) == DEEP or not all(map(_is_over, waits)):
            return False
        with cuda.stream(self._stream):  # the allocator orders what begins by this stream
            return mark.work.open()

    def _issue(self, mark: CudaMark, waits: Sequence[Any]) -> None:
        work, stream = mark.work, self._stream
        mark.issued_ns = self._clock.now
        stream.wait_event(work.uploaded)
        for other in waits if work.open is None else ():
            if isinstance(other, CudaMark):
                stream.wait_event(other.end)
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with cuda.stream(stream), self._peak(work.launch.op) as peak:
            begin.record(stream)
            mark.tokens = tuple(self.machine.start(prepared) for prepared, _ in work.parts)
            mark.fetched = tuple(_to_host(part) for part in mark.tokens)
            end.record(stream)
        mark.behind = (*waits, *filter(None, (self._newest,)))
        mark.peak_bytes = peak[0] if peak else None
        mark.begin, mark.end, self._newest = begin, end, mark
        if work.open is not None:
            self._running.append(mark)

    @contextmanager
    def _peak(self, op: Op) -> Iterator[list[int]]:
        """Most bytes allocated above what was there.

        Not of launches over some of the layers: what those leave is booked, and in that figure.
        """
        peak: list[int] = []
        slices = op.slices if isinstance(op, Compute) else ()
        if not self._computes or any(piece.layers is not None for piece in slices):
            yield peak
            return
        count_peak(self._device)
        yield peak
        before, most = peak_since(self._device)
        peak.append(most - before)


def _is_over(mark: Any) -> bool:
    """Whether a launch has ended and given back what it held, as a thread's has once it is past."""
    return bool(mark.is_over if isinstance(mark, CudaMark) else mark.is_past())


def _is_on_stream(mark: LaneMark) -> bool:
    """Whether a stream can wait for a launch: it has an event, or is past."""
    return mark.end is not None if isinstance(mark, CudaMark) else mark.is_past()


class CudaExecutor(StreamExecutor):
    """The executor of `backend=cuda`: waits are wait_event, one to one. A GPU per device.

    Where something trains, launches are held until what they wait for is over (see CudaLane), and
    updates on the host run on a thread of their own, which waits for events itself.
    Index tensors go up on a stream of their own. Sampled tokens stay on the device for the next
    launch and come down, pinned, at the end of theirs.
    """

    def __init__(self, clock: WallClock, machine: Machine[Any], devices: int = 1) -> None:
        """On the thread that is going to run the engine: it polls, and has to wake on time."""
        punctual()
        for device in range(devices):
            cuda.synchronize(device)  # weights and arenas were made on the default stream
        self._uploads = [stream_of(device, "uploads") for device in range(devices)]
        self._timelines: dict[int, Timeline] = {}
        super().__init__(clock, machine, self._open_lane_on, None, self._upload, (Tier.GPU,))

    def _open_lane_on(self, lane: Lane) -> StreamLane:
        if lane[1] == HOST_LANE:
            return ThreadLane(lane, self.clock, self.machine)
        return CudaLane(lane, self.clock, self.machine, self._times(lane[0]), lane[0])

    def _times(self, device: int) -> Timeline:
        """Anchored at the device's first launch: before the run begins, its clock stands still."""
        if device not in self._timelines:
            self._timelines[device] = anchored(self.clock, lambda: self._past_event(device))
        return self._timelines[device]

    def _past_event(self, device: int) -> cuda.Event:
        """An event that has just happened on the device."""
        event = cuda.Event(enable_timing=True)
        event.record(self._uploads[device])
        event.synchronize()
        return event

    @contextmanager
    def _upload(self, launch: Launch) -> Iterator[cuda.Event]:
        uploads, uploaded = self._uploads[launch.op.lane[0]], cuda.Event()
        with cuda.stream(uploads):
            yield uploaded
            uploaded.record(uploads)


def _to_host(tokens: Any) -> Any:
    """Sampled tokens of each part into pinned memory, without waiting."""
    return tuple(t if t is None else t.to("cpu", non_blocking=True) for t in tokens)
