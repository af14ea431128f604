"""Executors on a virtual clock that do the real work, in predicted or in measured time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import simpy
import torch

from engine.contract.executor import Executor, Lanes, Launch, ServedLaunches, Span, Store
from engine.contract.plan import COMPUTE_LANES, Compute, Op, Slice
from engine.contract.regions import Pool
from runtime.executors.machine import Machine
from runtime.executors.wall import Link
from runtime.measure.reference import ClockPace
from runtime.measure.tracker import Workspace


class LockstepExecutor(Executor):
    """Carries every launch out in issue order; its span is that of a predicting executor."""

    def __init__(self, machine: Machine[Any], predicted: Executor) -> None:
        self.machine, self._predicted = machine, predicted
        self._prepared: dict[Op, Any] = {}

    @property
    def store(self) -> Store | None:
        """See Executor."""
        return self.machine.store

    def prepare(self, launches: Sequence[Launch]) -> int:
        """See Executor: packs the launches; the host's time is predicted."""
        self._prepared.update((launch.op, self.machine.prepare(launch)) for launch in launches)
        return self._predicted.prepare(launches)

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """See Executor: the work is done now, and the span is predicted."""
        ended = self.machine.execute(self._prepared.pop(launch.op))
        self._predicted.run(launch, lambda span: done(span._replace(ended=ended)))

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Executor."""
        self.machine.release(pool, pages)

    def peak_bytes(self, launch: Launch) -> int | None:
        """See Executor."""
        return self._predicted.peak_bytes(launch)

    def served_peaks(self, launches: ServedLaunches) -> Any:
        """See Executor."""
        return self._predicted.served_peaks(launches)


class CpuExecutor(Executor):
    """The service clock: a compute takes the thread's CPU time, a copy the link's time.

    Work is done in issue order on one thread, so a busy machine cannot spoil a duration. The
    thread's time between launches (policy, ledger, packing, settling) is the host's time. Where a
    plan names two compute lanes, they take turns.
    """

    def __init__(
        self,
        env: simpy.Environment,
        machine: Machine[Any],
        links: Mapping[str, Link] | None = None,
        workspace: Workspace | None = None,
        pace: ClockPace | None = None,
    ) -> None:
        """
        Args:
            env: The virtual clock.
            machine: Does the work, on this thread.
            links: Speed of copy lanes by name ("gpu->host"); any other copy takes the time of its
                memcpy.
            workspace: Samples the workspace of launches, outside the time of launches and host.
            pace: Counts all times in those of reference works, so that the clock keeps its rate
                while the machine's speed wanders.
        """
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # denormals made a matmul 30 times slower
        self.machine = machine
        self._links = dict(links or {})
        self._workspace, self._pace = workspace, pace
        self._lanes = Lanes(env)
        self._prepared: dict[Op, Any] = {}
        self._since_ns: int | None = None  # the host's time is counted up to here
        self._host_ns = 0
        self._newest: dict[int, Op] = {}  # the last launch on a compute lane of each device

    @property
    def store(self) -> Store | None:
        """See Executor."""
        return self.machine.store

    def prepare(self, launches: Sequence[Launch]) -> int:
        """See Executor: packs the launches; returns the host's CPU time since the last call."""
        if self._since_ns is None:
            self._since_ns = time.thread_time_ns()  # all before the first plan is set-up
        for launch in launches:
            self._prepared[launch.op] = self.machine.prepare(launch)
        self._charge_host()
        spent, self._host_ns = self._host_ns, 0
        return self._paced(spent, ())

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """See Executor: the work is done now, and its measured duration is placed on its lane."""
        prepared = self._prepared.pop(launch.op)
        start, untimed_ns = self._charge_host(), self.machine.untimed_ns
        ended = self.machine.execute(prepared)
        self._since_ns = time.thread_time_ns()
        worked = self._since_ns - start - (self.machine.untimed_ns - untimed_ns)
        link = self._links.get(launch.op.lane[1])
        slices = launch.op.slices if isinstance(launch.op, Compute) else ()
        took = self._paced(worked, slices) if link is None else link.duration_ns(launch.nbytes)
        self._lanes.place(
            self._in_turn(launch), took, done, self._peak_bytes(launch.op, prepared), ended
        )
        if self._pace is not None and self._pace.is_due(worked):
            with self.paused():
                self._pace.measure()

    def _in_turn(self, launch: Launch) -> Launch:
        """The launch behind the last one on the other compute lane of its device."""
        op, (device, name) = launch.op, launch.op.lane
        if name not in COMPUTE_LANES:
            return launch
        before, self._newest[device] = self._newest.get(device), op
        if before is None or before.lane == op.lane:
            return launch
        return replace(launch, waits=(*launch.waits, before))

    def _paced(self, thread_ns: int, slices: Sequence[Slice]) -> int:
        return thread_ns if self._pace is None else round(thread_ns * self._pace.factor_of(slices))

    def _peak_bytes(self, op: Op, prepared: Any) -> int | None:
        if self._workspace is None or not self._workspace.is_due(op):
            return None
        with self.paused():
            return self._workspace.peak_bytes(prepared)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Executor."""
        self.machine.release(pool, pages)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the block, such as a meter's reading, out of all times, also if it fails."""
        self._charge_host()
        try:
            yield
        finally:
            self._since_ns = time.thread_time_ns()

    def _charge_host(self) -> int:
        now = time.thread_time_ns()
        if self._since_ns is not None:
            self._host_ns += now - self._since_ns
        self._since_ns = now
        return now
