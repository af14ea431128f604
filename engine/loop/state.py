"""What all parts of the loop share: clock, executor, books, job lists, and what is in flight."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import simpy

from engine.contract.executor import Executor, Span, Store
from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Op, Plan
from engine.contract.policy import Fleet
from engine.contract.regions import Kind, PageSize
from engine.contract.view import Cost
from engine.loop.in_flight import InFlight, Wakeup
from engine.loop.job_lists import JobLists
from engine.loop.profile import EngineProfile
from engine.memory.ledger import Ledger
from engine.results.recorder import Recorder

Turn = Generator[simpy.Event, Any, None]  # a part of the loop's process


@dataclass(slots=True, eq=False)
class EngineState:
    """One object for the life of an engine; each part of the loop is given it, and callbacks."""

    env: simpy.Environment
    executor: Executor
    page: PageSize
    devices: int
    depth: int  # run-ahead: plans of a device that may be in flight
    forced: bool  # the trace says when a request ends
    layout: Layout
    cost: Cost | None
    is_watched: bool  # laws are checked at each step
    recorder: Recorder
    store: Store | None
    ledger: Ledger
    fleet: Fleet | None
    jobs: JobLists
    in_flight: InFlight
    profile: EngineProfile
    wakeup: Wakeup

    @property
    def now_ns(self) -> int:
        return int(self.env.now)

    def give_all(self, owner: int) -> None:
        """All that an owner holds comes back."""
        for place in self.ledger.give_all(owner):
            if self.store is not None and place.region.kind is not Kind.KV:
                self.store.free(place)

    def release_idle(self) -> None:
        """Pages out of all use go back to the machine."""
        for pool, pages in self.ledger.drain_idle():
            self.executor.release(pool, pages)


class Lifecycle(Protocol):
    """What an operation that has ended means for the jobs of the engine."""

    def settle(self, span: Span) -> None:
        """An operation has ended: measurements and tokens arrive."""

    def land(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """An operation of a device's plan of that number has ended: what waited for it goes on."""

    def finish(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """The jobs that end with an operation finish."""

    def give_back(self, device: int) -> None:
        """Memory of finished jobs that a device may be shown by now comes back."""

    def finish_job(self, job: Job, now_ns: int, device: int, number: int) -> None:
        """A job is complete with a device's plan of that number."""


class Issue(Protocol):
    """Books a plan, launches its operations and lets the host's time pass."""

    def __call__(self, plan: Plan, device: int, moves: Any = None) -> Turn: ...
