"""Executors in real time: a lane per stream or thread, a mark per launch.

Each wait of a launch becomes a wait of its lane for a mark. The clock polls the mark, and its span
goes to the engine. Threads (wall.py) and CUDA streams (cuda.py) differ only in their lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from engine.contract.executor import Executor, Launch, Span
from engine.contract.plan import Copy, Lane, Op
from engine.contract.regions import Kind, Place, Pool, Tier, is_workspace
from runtime.executors.clock import WallClock
from runtime.executors.machine import Machine
from runtime.training.store import LaneStore


@dataclass(frozen=True, slots=True, eq=False)
class LaneWork:
    """A launch as its lane gets it: prepared, a long copy in several parts.

    `uploaded`, if any, is an event that the lane waits for: then the prepared tensors are there.
    """

    launch: Launch
    parts: tuple[tuple[Any, int], ...]  # (prepared, bytes of the copy)
    uploaded: Any = None
    leave: Callable[[], None] | None = None  # called at the launch's end, before any waiting launch
    open: Callable[[], bool] | None = None  # begins the launch's places, if it may; None: no places


class LaneMark(Protocol):
    """The end of one launch on its lane. `rings`: it wakes the clock by itself."""

    @property
    def rings(self) -> bool: ...

    def is_past(self) -> bool:
        """Whether the launch has ended (or failed). Never blocks."""

    def span(self) -> Span:
        """When the launch ran, on the run's clock; raises its error. Only once past."""


class StreamLane(Protocol):
    """Starts launches first-in-first-out, each behind the marks that it waits for."""

    def start(self, work: LaneWork, waits: Sequence[LaneMark]) -> LaneMark: ...

    def stop(self) -> None:
        """Asks the lane to end early; does not wait."""

    def join(self) -> None:
        """Returns when no launch of this lane runs any more."""


class StreamExecutor(Executor):
    """An executor in real time over lanes of one kind.

    A failed launch raises in the engine, at the poll that finds its mark. Use the executor as a
    context manager: its lanes end with the block, also after an error.
    """

    is_live: ClassVar[bool] = True

    def __init__(
        self,
        clock: WallClock,
        machine: Machine[Any],
        open_lane: Callable[[Lane], StreamLane],
        part_bytes: int | None = None,
        uploading: Callable[[Launch], AbstractContextManager[Any]] = lambda _: nullcontext(),
        on_open: Collection[Tier] = (),
    ) -> None:
        """
        Args:
            clock: The run's clock, which polls marks.
            machine: Does the work.
            open_lane: Makes a lane at its first launch.
            part_bytes: A longer copy of KV pages is carried out in parts; None: every copy whole.
            uploading: Surrounds the preparation of a launch and yields LaneWork.uploaded.
            on_open: Tiers whose places begin when their first launch opens them: see LaneStore.
        """
        self.clock = clock
        self.machine = machine
        self._store = None if machine.store is None else LaneStore(machine.store, on_open)
        self._open_lane = open_lane
        self._part_bytes = part_bytes
        self._uploading = uploading
        self._lanes: dict[Lane, StreamLane] = {}
        self._work: dict[Op, LaneWork] = {}
        self._marks: dict[Op, LaneMark] = {}
        self._since_ns: int | None = None  # host time is reported up to here
        self._paused_ns = 0

    @property
    def store(self) -> LaneStore | None:
        """See Executor."""
        return self._store

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Builds what the launches need; returns the engine thread's CPU time since the last call.

        That is the time of deciding, booking, settling and preparing. The clock's polls and waits
        and the blocks of `paused` are left out.
        """
        if self._since_ns is None:
            self._since_ns = self._host_now_ns()  # all before the first plan is set-up
        for launch in launches:
            parts = split_copy(launch, self._part_bytes)
            with self._uploading(launch) as uploaded:
                prepared = tuple((self.machine.prepare(part), part.nbytes) for part in parts)
            self._work[launch.op] = LaneWork(launch, prepared, uploaded)
        since_ns, self._since_ns = self._since_ns, self._host_now_ns()
        return self.clock.paced(self._since_ns - since_ns)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the block, such as a meter's reading, out of the host's time; real time passes."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self._paused_ns += time.thread_time_ns() - began_ns

    def _host_now_ns(self) -> int:
        return time.thread_time_ns() - self.clock.idle_ns - self._paused_ns

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """See Executor. A settled launch needs no wait and has no mark any more."""
        op = launch.op
        waits = [self._marks[other] for other in launch.waits if other in self._marks]
        work = self._work.pop(op)
        if self._store is not None:
            stays = self._store.begin(places_of(op))
            kept = [stay for stay in stays if not is_workspace(stay.place)]
            opens = partial(self._store.open, kept) if kept else None  # serving takes none
            work = replace(work, leave=partial(self._store.end, stays), open=opens)
        mark = self._marks[op] = self._lane(op.lane).start(work, waits)

        def settle(span: Span) -> None:
            del self._marks[op]
            done(span)

        event = self.clock.watch(mark.is_past, mark.span, mark.rings)
        event.callbacks.append(lambda event: settle(event.value))

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Executor."""
        self.machine.release(pool, pages)

    def close(self) -> None:
        """Ends all lanes; a launch that has not started never runs."""
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join()
        self._lanes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lane(self, name: Lane) -> StreamLane:
        if name not in self._lanes:
            self._lanes[name] = self._open_lane(name)
        return self._lanes[name]


def places_of(op: Op) -> tuple[Place, ...]:
    """The places that an operation touches, KV left out."""
    touched = (op.src, op.dst) if isinstance(op, Copy) else (*op.reads, *op.writes)
    return tuple(place for place in touched if place.region.kind is not Kind.KV)


def split_copy(launch: Launch, part_bytes: int | None) -> list[Launch]:
    """A copy of KV pages as copies of at most `part_bytes` (at least a page each).

    Any other launch is returned as it is.
    """
    count = len(launch.src_pages)
    if part_bytes is None or count < 2 or launch.nbytes <= part_bytes:
        return [launch]
    page_bytes = launch.nbytes // count
    each = max(1, part_bytes // page_bytes)
    return [
        replace(
            launch,
            nbytes=page_bytes * min(each, count - first),
            src_pages=launch.src_pages[first : first + each],
            dst_pages=launch.dst_pages[first : first + each],
        )
        for first in range(0, count, each)
    ]
