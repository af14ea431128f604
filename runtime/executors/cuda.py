"""CUDA: a stream per lane, events as marks, and a thread for updates on the host.

All else is streams.py, which tests run on threads. DESIGN.md lists what has never run on a GPU.
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
from runtime.executors.wall import LaneClosedError, ThreadLane, wake_on_time

MAX_ISSUED = 2  # launches of training on a stream at a time


@dataclass(slots=True, eq=False)
class CudaMark:
    """The end of a launch on a stream. Keeps all that its kernels use until it is past.

    A launch that is held back has no events yet; a thread of the host may wait for it all the same.
    """

    rings: ClassVar[bool] = False  # a device is polled
    work: LaneWork
    lane: CudaLane
    behind: Sequence[Any] = ()  # marks whose ends it follows; none once its times are known
    begin: Any = None
    end: Any = None
    tokens: tuple[Any, ...] = ()  # per part, on the device
    fetched: tuple[Any, ...] = ()  # copies of the tokens, on their way to pinned memory
    issued_ns: int = 0
    peak_bytes: int | None = None
    is_over: bool = False  # past, and span() has freed the places that it leaves
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
        self.tokens = self.fetched = ()  # a next launch still needs the mark, for its end
        self.work = replace(work, parts=())
        return Span(work.launch.op, start_ns, end_ns, self.peak_bytes, ended)

    # ---- for threads of the host
    @property
    def end_ns(self) -> int:
        """When the launch ended, on the run's clock. Only once past."""
        return self._times()[1]

    def check(self) -> None:
        """Raises the error that kept the launch from being issued."""
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Blocks the calling thread until past; never to be called on the engine's thread."""
        self.issued.wait()
        self.check()
        self.end.synchronize()

    def _times(self) -> tuple[int, int]:
        """Start and end; the first call fixes them for all threads.

        The launch starts behind the end of the launch before it on the stream and of each launch
        that it has waited for: events are no more exact than the timeline's anchor.
        """
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
    """A stream; the engine's thread puts launches on it and never waits for them.

    A launch of serving is issued at once, behind the events that it waits for. It is held back
    while one of its waits is not issued yet, or runs on a thread. A launch with places
    (LaneWork.open) is held back until all its waits are over, so that the bytes it takes are really
    free, and until fewer than MAX_ISSUED such launches are on the stream: one is always queued
    behind the running one. The engine's polls issue held launches.
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
        """Issues held launches in order, as far as they may be. On the engine's thread only."""
        while self._held:
            mark, waits = self._held[0]
            try:
                if not self._may_issue(mark, waits):
                    return
                self._issue(mark, waits)
            except BaseException as error:
                mark.error = error
                raise
            finally:  # a waiting thread of the host wakes in either case
                if mark.end is not None or mark.error is not None:
                    self._held.popleft()
                    mark.issued.set()

    def stop(self) -> None:
        """Fails held launches; a launch on the stream cannot be taken back."""
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
        if len(self._running) == MAX_ISSUED or not all(map(_is_over, waits)):
            return False
        with cuda.stream(self._stream):  # the allocator orders new storages by this stream
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
        """Most bytes allocated above what was there before.

        Launches over some of the layers are left out: they leave activations, which are booked and
        would be in the figure.
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
    """Whether a launch has ended and freed its places; a thread's launch has, once it is past."""
    return bool(mark.is_over if isinstance(mark, CudaMark) else mark.is_past())


def _is_on_stream(mark: LaneMark) -> bool:
    """Whether a stream can wait for a launch: the launch has an event, or is past."""
    return mark.end is not None if isinstance(mark, CudaMark) else mark.is_past()


class CudaExecutor(StreamExecutor):
    """The executor of `backend=cuda`, with a GPU per device: each wait is one wait_event.

    Launches of training are held back until their waits are over (see CudaLane). Updates on the
    host run on a thread, which waits for events itself. Index tensors go up on a stream of their
    own. Sampled tokens stay on the device for the next launch, and are copied to pinned memory at
    the end of their launch.
    """

    def __init__(self, clock: WallClock, machine: Machine[Any], devices: int = 1) -> None:
        """To be called on the engine's thread, which polls and has to wake on time.

        Args:
            clock: The run's clock.
            machine: Does the work, on `devices` GPUs.
            devices: How many GPUs, numbered from 0.
        """
        wake_on_time()
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
        """Anchored at the device's first launch: before that the run's clock stands still."""
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
    """Starts copies of sampled tokens to pinned memory, without waiting."""
    return tuple(t if t is None else t.to("cpu", non_blocking=True) for t in tokens)
