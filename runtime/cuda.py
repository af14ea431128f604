"""CUDA: a stream per lane, events as marks. The rest is streams.py, which CI runs on threads.

What of this has never run on a GPU is listed in DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import cuda

from engine.executor import Launch, Span
from engine.plan import COMPUTE_LANE, Lane
from runtime.clock import WallClock
from runtime.streams import Machine, StreamExecutor, Work

REANCHOR_MS = 1000.0  # elapsed_time is a 32-bit float: up to here it resolves 61 ns


class Timed(Protocol):
    """A CUDA event with timing."""

    def elapsed_time(self, later: Any) -> float: ...


class Timeline:
    """Puts a device's events on the run's clock.

    Starts from one event whose moment on both clocks is known. The two drift apart by a few us a
    second, so a span that would start before its issue or end in the future moves the anchor.
    """

    def __init__(self, clock: WallClock, anchor: Timed) -> None:
        """`anchor` has just ended: its time is now."""
        self._clock, self._anchor, self._anchor_ns = clock, anchor, clock.now

    def span_ns(self, begin: Timed, end: Timed, issued_ns: int) -> tuple[int, int]:
        """Start and end of what two past events enclose."""
        to_end_ms = self._anchor.elapsed_time(end)
        start_ns = self._anchor_ns + round(self._anchor.elapsed_time(begin) * 1e6)
        end_ns = self._anchor_ns + round(to_end_ms * 1e6)
        shift_ns = max(0, issued_ns - start_ns)
        shift_ns -= max(0, end_ns + shift_ns - self._clock.now)
        if shift_ns or to_end_ms > REANCHOR_MS:
            self._anchor, self._anchor_ns = end, end_ns + shift_ns
        return start_ns + shift_ns, end_ns + shift_ns


@dataclass(slots=True, eq=False)
class CudaMark:
    """The end of a launch on a stream. Keeps all that its kernels use until it is past."""

    rings: ClassVar[bool] = False  # a device is polled
    work: Work
    begin: cuda.Event
    end: cuda.Event
    tokens: tuple[Any, ...]  # per part, on the device
    fetched: tuple[Any, ...]  # the same, on their way to pinned memory
    issued_ns: int
    peak_bytes: int | None
    machine: Machine
    timeline: Timeline

    def is_past(self) -> bool:
        return bool(self.end.query())

    def span(self) -> Span:
        ended: tuple[int, ...] = ()
        for (prepared, _), tokens in zip(self.work.parts, self.fetched, strict=True):
            ended += self.machine.collect(prepared, tokens)
        if self.work.leave is not None:
            self.work.leave()
        start_ns, end_ns = self.timeline.span_ns(self.begin, self.end, self.issued_ns)
        return Span(self.work.launch.op, start_ns, end_ns, self.peak_bytes, ended)


class CudaLane:
    """A stream; launches are put on it by the engine's thread, which never waits for them."""

    def __init__(
        self, name: Lane, clock: WallClock, machine: Machine, timeline: Timeline, device: int
    ) -> None:
        self._stream = cuda.Stream(device)
        self._clock, self._machine, self._timeline = clock, machine, timeline
        self._device = device
        self._computes = name[1] == COMPUTE_LANE

    def start(self, work: Work, waits: Sequence[Any]) -> CudaMark:
        issued_ns, stream = self._clock.now, self._stream
        stream.wait_event(work.uploaded)
        for mark in waits:
            stream.wait_event(mark.end)
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with cuda.stream(stream), self._peak() as peak:
            begin.record(stream)
            tokens = tuple(self._machine.start(prepared) for prepared, _ in work.parts)
            fetched = tuple(_to_host(part) for part in tokens)
            end.record(stream)
        peak_bytes = peak[0] if peak else None
        kept = (work, begin, end, tokens, fetched)
        return CudaMark(*kept, issued_ns, peak_bytes, self._machine, self._timeline)

    def stop(self) -> None:
        """What is on a stream cannot be taken back."""

    def join(self) -> None:
        self._stream.synchronize()

    @contextmanager
    def _peak(self) -> Iterator[list[int]]:
        """Most bytes allocated above what was there; the allocator counts in issue order."""
        peak: list[int] = []
        if not self._computes:
            yield peak
            return
        cuda.reset_peak_memory_stats(self._device)
        before = cuda.memory_allocated(self._device)
        yield peak
        peak.append(cuda.max_memory_allocated(self._device) - before)


class CudaExecutor(StreamExecutor):
    """The executor of `backend=cuda`: waits are wait_event, one to one. A GPU per device.

    Index tensors go up on a stream of their own. Sampled tokens stay on the device for the next
    launch and come down, pinned, at the end of theirs.
    """

    def __init__(self, clock: WallClock, machine: Machine, devices: int = 1) -> None:
        for device in range(devices):
            cuda.synchronize(device)  # weights and arenas were made on the default stream
        self._uploads = [cuda.Stream(device) for device in range(devices)]
        self._timelines: dict[int, Timeline] = {}
        super().__init__(clock, machine, self._open_lane_on, None, self._upload)

    def _open_lane_on(self, lane: Lane) -> CudaLane:
        return CudaLane(lane, self.clock, self.machine, self._times(lane[0]), lane[0])

    def _times(self, device: int) -> Timeline:
        """Anchored at the device's first launch: before the run begins, its clock stands still."""
        if device not in self._timelines:
            anchor = cuda.Event(enable_timing=True)
            anchor.record(self._uploads[device])
            anchor.synchronize()
            self._timelines[device] = Timeline(self.clock, anchor)
        return self._timelines[device]

    @contextmanager
    def _upload(self, launch: Launch) -> Iterator[cuda.Event]:
        uploads, uploaded = self._uploads[launch.op.lane[0]], cuda.Event()
        with cuda.stream(uploads):
            yield uploaded
            uploaded.record(uploads)


def set_budget(nbytes: int, device: int = 0) -> None:
    """Lets torch take at most so many bytes of a GPU, so that a big one stands in for a small one.

    Covers weights, arenas and workspace; the CUDA context (a few hundred MB) comes on top.
    Call it before anything is allocated. ValueError if the device has less.
    """
    total = cuda.get_device_properties(device).total_memory
    if nbytes > total:
        raise ValueError(f"a budget of {nbytes} bytes does not fit GPU {device}, which has {total}")
    cuda.set_per_process_memory_fraction(nbytes / total, device)


def _to_host(tokens: Any) -> Any:
    """Sampled tokens of each part into pinned memory, without waiting."""
    return tuple(t if t is None else t.to("cpu", non_blocking=True) for t in tokens)
