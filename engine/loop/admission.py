"""When work reaches the engine, and where jobs enter service and leave it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import simpy

from engine.contract.job import Job, TrainingProgress
from engine.memory.prefix import Chain
from traces.serving.request import Request, TrainingJob

if TYPE_CHECKING:
    from engine.loop.engine import Engine


Item = Request | TrainingJob


class ArrivalQueue:
    """Hands over each item of a trace once; `pending` counts those still to come."""

    def __init__(
        self, env: simpy.Environment, work: Iterable[Item], admit: Callable[[Item, int], None]
    ) -> None:
        self._env, self._admit = env, admit
        self._turns: dict[tuple[int, int], Request] = {}
        first = []
        for item in work:
            if isinstance(item, Request) and item.session is not None and item.turn > 0:
                if (item.session, item.turn) in self._turns:
                    raise ValueError(f"session {item.session} has two turns {item.turn}")
                self._turns[item.session, item.turn] = item
            else:
                first.append(item)
        self._check_turns({i.session for i in first if isinstance(i, Request)})
        self._first = sorted(first, key=lambda item: item.arrival_ns)
        self._handed = 0  # of the first ones
        self._timed: list[int] = []  # a heap: when turns that wait for their time will come
        self.pending = len(self._first) + len(self._turns)
        self.next_ns: int | None = None  # when something will arrive; None: answers alone bring it
        self._look_ahead()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The process of all that arrives by the clock."""
        for item in self._first:
            if item.arrival_ns > self._env.now:
                yield self._env.timeout(item.arrival_ns - int(self._env.now))
            self._handed += 1
            self._look_ahead()
            self._hand_over(item, item.arrival_ns)
        yield self._env.timeout(0)  # a process needs one event to be one

    def _look_ahead(self) -> None:
        first, handed = self._first, self._handed
        at_ns = first[handed].arrival_ns if handed < len(first) else None
        if self._timed:
            at_ns = self._timed[0] if at_ns is None else min(at_ns, self._timed[0])
        self.next_ns = at_ns

    def release_turn(self, job: Job) -> None:
        """The client has its answer (or was refused): its next turn comes after it has thought."""
        if job.session is None:
            return
        request = self._turns.pop((job.session, job.turn + 1), None)
        if request is None:
            return
        now_ns = int(self._env.now)
        at_ns = max(request.arrival_ns, now_ns + request.think_ns)
        timer = self._env.timeout(at_ns - now_ns)
        heappush(self._timed, at_ns)
        self._look_ahead()
        timer.callbacks.append(lambda _: self._hand_over_turn(request, at_ns))

    def _hand_over_turn(self, request: Request, at_ns: int) -> None:
        heappop(self._timed)
        self._look_ahead()
        self._hand_over(request, at_ns)

    def _hand_over(self, item: Item, at_ns: int) -> None:
        self.pending -= 1
        self._admit(item, at_ns)

    def _check_turns(self, sessions: set[int | None]) -> None:
        for session, turn in self._turns:
            before = turn == 1 and session in sessions
            if not (before or (session, turn - 1) in self._turns):
                raise ValueError(f"session {session} has a turn {turn} but no turn {turn - 1}")


class Admission:
    """Makes a job of what arrives; says goodbye to what is served or refused."""

    def __init__(self, engine: Engine, returns_memory: bool) -> None:
        self._engine, self._returns_memory = engine, returns_memory

    def admit(self, item: Request | TrainingJob, arrival_ns: int) -> None:
        """A request or training job has arrived: it waits."""
        engine = self._engine
        if isinstance(item, Request):
            job = self._serving(item, arrival_ns)
        else:
            recorded = engine.launcher.recorded_tokens(item.record_of)
            layout = engine.layout.training.get(item.job_id)
            job = Job.trains(TrainingProgress(item, layout, recorded), arrival_ns)
            engine.training.admit(job)
        engine.standing.drop()
        engine.moments = 0
        engine.roster.wait(job)
        if min(engine.flights.level) < engine.depth:  # else an end will tell
            engine.news.tell()

    def _serving(self, item: Request, arrival_ns: int) -> Job:
        engine, job = self._engine, Job.serving(item, arrival_ns)
        if engine.fleet is not None:
            if item.prompt_ids is not None:
                job._name_prefix(Chain(item, engine.page.tokens).of_prompt())
            engine.fleet.assign(job)
        elif engine.devices == 1:
            job._route(0)
        engine.ends.expect(job, item.output_tokens)
        engine.recorder.arrived(item, arrival_ns, job.device)
        if engine.reuse is not None:
            engine.reuse.arrived(item)
        return job

    def refuse(self, job: Job) -> None:
        """It will never fit."""
        self._engine.roster.refuse(job)
        self._engine.give_all(job.job_id)
        self._leave(job, int(self._engine.env.now), "refused")

    def finish(self, job: Job, now_ns: int, device: int, number: int) -> None:
        """It is complete with the device's plan of that number."""
        if self._returns_memory:
            self._engine.leftovers.leave(device, number, job)
        else:
            self._engine.ledger.ended.add(job.job_id)
        self._leave(job, now_ns, "finished")

    def _leave(self, job: Job, now_ns: int, status: str) -> None:
        engine = self._engine
        if job.training is not None:
            engine.training.leave(job.job_id)
        else:
            engine.check.left(job)
            engine.recorder.ended(job.job_id, now_ns, status)
            if engine.fleet is not None:
                engine.fleet.left(job)
            if engine.reuse is not None:
                engine.reuse.left(job)
            engine.arrivals.release_turn(job)
