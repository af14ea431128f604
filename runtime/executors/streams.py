"""What every executor in real time shares: a lane per stream or thread, a mark per launch.

Waits become waits of a lane for marks, one to one; a mark is polled by the clock; its span goes to
the engine. Threads (wall.py) and CUDA streams (cuda.py) differ only in their lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from engine.contract.executor import Launch, Span
from engine.contract.plan import Copy, Lane, Op
from engine.contract.regions import Kind, Place, Pool, Tier, is_workspace
from runtime.executors.clock import WallClock
from runtime.executors.machine import Machine
from runtime.training.store import LaneStore


@dataclass(frozen=True, slots=True, eq=False)
class LaneWork:
    """A launch as its lane gets it: prepared, a long copy in several parts.

    `uploaded` is what the lane has to wait for before the prepared tensors are there, if anything.
    """

    launch: Launch
    parts: tuple[tuple[Any, int], ...]  # (prepared, bytes of the copy)
    uploaded: Any = None
    leave: Callable[[], None] | None = None  # to be called when it has ended, before others go on
    open: Callable[[], bool] | None = None  # begins its places, where memory is real, if it may


class LaneMark(Protocol):
    """The end of one launch on its lane. `rings`: it wakes the clock by itself."""

    @property
    def rings(self) -> bool: ...

    def is_past(self) -> bool:
        """Whether the launch has ended (or failed). Never blocks."""

    def span(self) -> Span:
        """When it ran, on the run's clock; raises what the launch raised. Only once past."""


class StreamLane(Protocol):
    """Starts work first-in-first-out, each behind the marks it waits for."""

    def start(self, work: LaneWork, waits: Sequence[LaneMark]) -> LaneMark: ...

    def stop(self) -> None:
        """Asks the lane to end early; does not wait."""

    def join(self) -> None:
        """Returns when nothing of this lane runs any more."""


class StreamExecutor:
    """An engine.contract.executor.Executor in real time over lanes of one kind.

    `chunk_bytes`: copies of KV pages longer than this are handed over in parts (None: whole).
    `uploading` surrounds the preparation of a launch and gives LaneWork.uploaded. Places in the
    tiers `late` begin when their first launch opens them: see LaneStore. A failed launch raises in
    the engine, at the poll that finds its mark. Use it as a context manager: its lanes end with the
    block, whatever happened.
    """

    def __init__(
        self,
        clock: WallClock,
        machine: Machine[Any],
        open_lane: Callable[[Lane], StreamLane],
        chunk_bytes: int | None = None,
        uploading: Callable[[Launch], AbstractContextManager[Any]] = lambda _: nullcontext(),
        late: Collection[Tier] = (),
    ) -> None:
        self.clock = clock
        self.machine = machine
        self.store = None if machine.store is None else LaneStore(machine.store, late)
        self._open_lane = open_lane
        self._chunk_bytes = chunk_bytes
        self._uploading = uploading
        self._lanes: dict[Lane, StreamLane] = {}
        self._work: dict[Op, LaneWork] = {}
        self._marks: dict[Op, LaneMark] = {}
        self._since_ns: int | None = None  # host time is reported up to here
        self._paused_ns = 0

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Builds what the launches need; returns the engine thread's CPU time since the last call.

        That is what deciding, booking, settling and preparing took, without the clock's polls and
        waits between them and what was done in `paused`.
        """
        if self._since_ns is None:
            self._since_ns = self._host_now_ns()  # what came before the first plan is set-up
        for launch in launches:
            parts = split_copy(launch, self._chunk_bytes)
            with self._uploading(launch) as uploaded:
                prepared = tuple((self.machine.prepare(part), part.nbytes) for part in parts)
            self._work[launch.op] = LaneWork(launch, prepared, uploaded)
        since_ns, self._since_ns = self._since_ns, self._host_now_ns()
        return self.clock.paced(self._since_ns - since_ns)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is not the host's work: meters. It takes real time all the same."""
        began_ns = time.thread_time_ns()
        try:
            yield
        finally:
            self._paused_ns += time.thread_time_ns() - began_ns

    def _host_now_ns(self) -> int:
        return time.thread_time_ns() - self.clock.idle_ns - self._paused_ns

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """Starts a prepared launch; what has settled is waited for no more."""
        op = launch.op
        waits = [self._marks[other] for other in launch.waits if other in self._marks]
        work = self._work.pop(op)
        if self.store is not None:
            stays = self.store.begin(places_of(op))
            kept = [stay for stay in stays if not is_workspace(stay.place)]
            opens = partial(self.store.open, kept) if kept else None  # serving takes none
            work = replace(work, leave=partial(self.store.end, stays), open=opens)
        mark = self._marks[op] = self._lane(op.lane).start(work, waits)

        def settle(span: Span) -> None:
            del self._marks[op]
            done(span)

        event = self.clock.watch(mark.is_past, mark.span, mark.rings)
        event.callbacks.append(lambda event: settle(event.value))

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """Gives the memory of KV pages in nobody's use back to the system."""
        self.machine.release(pool, pages)

    def close(self) -> None:
        """Ends all lanes; what has not started never runs."""
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
    """What an operation touches that is no KV."""
    touched = (op.src, op.dst) if isinstance(op, Copy) else (*op.reads, *op.writes)
    return tuple(place for place in touched if place.region.kind is not Kind.KV)


def split_copy(launch: Launch, chunk_bytes: int | None) -> list[Launch]:
    """A copy of KV pages as copies of at most `chunk_bytes` (at least a page); else unchanged."""
    count = len(launch.src_pages)
    if chunk_bytes is None or count < 2 or launch.nbytes <= chunk_bytes:
        return [launch]
    page_bytes = launch.nbytes // count
    each = max(1, chunk_bytes // page_bytes)
    return [
        replace(
            launch,
            nbytes=page_bytes * min(each, count - first),
            src_pages=launch.src_pages[first : first + each],
            dst_pages=launch.dst_pages[first : first + each],
        )
        for first in range(0, count, each)
    ]
