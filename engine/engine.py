"""The one loop: ask the policy, issue its plan, settle what has ended; repeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import simpy

from engine.arrivals import Arrivals
from engine.executor import Executor, Launch, Pieces, Span, due_ns
from engine.fleet import Fleet
from engine.garbage import few_collections
from engine.job import Job
from engine.journal import Journal
from engine.jump import Jump, Repeater, offers_jumps
from engine.ledger import Booking, Ledger
from engine.plan import (
    COMPUTE_LANE,
    Compute,
    Copy,
    Kind,
    Layout,
    Op,
    PageSize,
    Plan,
    Pool,
    Slice,
    Tier,
    kv_place,
)
from engine.policy import Policy, Router
from engine.prefix import Chain
from engine.profile import EngineProfile
from engine.progress import advance_serving, advance_training, restart
from engine.recorder import Recorder
from engine.repeat import Repeat
from engine.reuse import Reuse
from engine.run import growth
from engine.view import Cost, View
from traces.request import Request, TrainingJob


class Stalled(RuntimeError):
    """Work is left, nothing is in flight, and the policy wants nothing. Names the jobs."""


class Flight(NamedTuple):
    """An operation on its way: its plan (of all, and of its device), and when it was issued."""

    step: int
    device: int
    number: int
    issue_ns: int
    host_ns: int  # of the whole plan, on its first operation
    launch: Launch


class Engine:
    """One engine for every backend: a SimPy process over an environment and an executor.

    `depth` is the run-ahead: how many plans of a device may be in flight (until their last Compute
    ends). `forced` lengths end a request at its recorded output; else sampling ends it (depth 1).
    `returns_memory=False` leaves a finished job's memory to the policy (playing back a plan log).
    `fast_forward=False` asks for every step, also where a plan would hold for many; same results.
    With a `router` each device is a replica: it is shown only the requests that were routed to it.
    A policy with `prefix_caching` has full pages kept, which jobs that begin alike then share.
    """

    def __init__(
        self,
        env: simpy.Environment,
        policy: Policy,
        executor: Executor,
        capacity_bytes: Mapping[Pool, int],
        page: PageSize,
        *,
        devices: int = 1,
        depth: int = 2,
        forced: bool = True,
        layout: Layout | None = None,
        cost: Cost | None = None,
        recorder: Recorder | None = None,
        journal: Journal | None = None,
        returns_memory: bool = True,
        fast_forward: bool = True,
        router: Router | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: at least one plan must be in flight")
        if not forced and depth > 1:
            raise ValueError(f"depth is {depth}: sampled lengths need depth 1 (set depth=1)")
        self.env, self.policy, self.executor = env, policy, executor
        self.page, self.devices, self.depth, self.forced = page, devices, depth, forced
        self.layout = layout or Layout()
        self.recorder = recorder or Recorder()
        chains: dict[int, Chain] | None = {} if getattr(policy, "prefix_caching", False) else None
        self.ledger = Ledger(capacity_bytes, page, self.layout.places, journal, chains)
        self.reuse = None if chains is None else Reuse(chains, self.ledger, self.recorder)
        self.profile = EngineProfile()
        self.cost = cost
        self.waiting: list[Job] = []
        self.serving: list[Job] = []
        self.training: list[Job] = []
        self.fleet = None if router is None else Fleet(devices, router)
        self.steps = 0  # plans issued
        self.asked = 0  # questions to the policy
        self._returns_memory = returns_memory
        self._repeats = fast_forward and devices == 1
        self._repeat: Repeat | None = None  # a plan that is issued again without a question
        self._jump: Jump | None = None
        self._journal = journal
        self._issued = [0] * devices
        self._flight = [0] * devices
        self._tails: set[Op] = set()  # the last Compute of each plan in flight
        self._flights: dict[Op, Flight] = {}
        self._returned: list[deque[tuple[int, Job]]] = [deque() for _ in range(devices)]
        self._ends: dict[Op, list[Job]] = {}  # jobs that finish when an operation settles
        self._target: dict[int, int] = {}  # known tokens at which a request is complete
        self._started: set[int] = set()  # jobs that are not waiting
        self._recorded: dict[int, int] = {}
        self._waking = False
        self._arrivals = Arrivals(env, (), self._admit)
        self._news = env.event()
        if self._repeats and offers_jumps(self):
            self._jump = Jump(self, cast(Repeater, executor))

    def replay(self, work: Iterable[Request | TrainingJob]) -> None:
        """Runs a trace to its end. Raises Stalled where it cannot end."""
        self._arrivals = Arrivals(self.env, work, self._admit)
        self.env.process(self._arrivals.run())
        with few_collections():
            self.env.run(self.env.process(self._serve()))

    def _admit(self, item: Request | TrainingJob, arrival_ns: int) -> None:
        if isinstance(item, Request):
            job = Job.serving(item, arrival_ns)
            if self.fleet is not None:
                self.fleet.assign(job)
            elif self.devices == 1:
                job.device = 0
            self._target[job.job_id] = item.prompt_tokens + item.output_tokens
            self.recorder.arrived(item, arrival_ns, job.device)
            if self.reuse is not None:
                self.reuse.arrived(item)
        else:
            recorded = 0 if item.record_of is None else self._recorded.get(item.record_of, 0)
            job = Job.trains(item, arrival_ns, recorded)
        self._repeat = None
        self.waiting.append(job)
        self._tell()

    def _tell(self) -> None:
        self._news.succeed()
        self._news = self.env.event()

    # ---- the loop
    def _serve(self) -> Generator[simpy.Event, Any, None]:
        while self._arrivals.pending or self._has_jobs() or self.ledger.open:
            asked = yield from self._ask_devices()
            if asked:
                continue
            if not self._has_jobs():
                self._give_all_back()
            if not (self.ledger.open or self._arrivals.pending or self._waking):
                raise Stalled(self._stall_message())
            yield self._news
        self._give_all_back()

    def _give_all_back(self) -> None:
        for device in range(self.devices):
            self._give_back(device, self._issued[device])

    def _ask_devices(self) -> Generator[simpy.Event, Any, bool]:
        """Idle devices first, then those with one plan in flight, and so on."""
        asked, self._waking = False, False
        for level in range(self.depth):
            for device in range(self.devices):
                if self._flight[device] != level or not self._has_jobs():
                    continue
                plan = self._decide(device)
                if plan:
                    yield from self._carry_out(plan, device)
                    asked = True
                elif plan.wake_ns is not None:
                    self._wake_at(plan.wake_ns)
        return asked

    def _decide(self, device: int) -> Plan:
        """Asks the policy, and again where memory that has come back meanwhile may change its mind.

        What jobs of plan k held is shown from plan k + depth on, which run-ahead cannot ask for
        before k has settled, or when the policy wants nothing without it: so decisions do not
        depend on how soon the engine noticed an end (law 11).
        """
        returned = self._returned[device]
        self._give_back(device, self._issued[device] - self.depth)
        if (again := self._next_repeat()) is not None:
            return again
        while True:
            self.asked += 1
            plan = self.policy.plan(self.view(device))
            if plan or not returned:
                self._repeat = Repeat(plan) if plan.repeats > 1 and self._repeats else None
                return plan
            self._give_back(device, returned[0][0])

    def _next_repeat(self) -> Plan | None:
        """A plan that still holds; it ends where the growth of its next step finds no room."""
        repeat = self._repeat
        if repeat is not None and repeat.left:
            room = self.ledger.room_bytes()
            for _, op in growth(repeat.plan, repeat.done, 1):
                room[op.place.pool] -= op.nbytes
            if min(room.values()) >= 0:
                return repeat.plan
        self._repeat = None
        return None

    def _carry_out(self, plan: Plan, device: int) -> Generator[simpy.Event, Any, None]:
        """Issues a plan, or what can be issued of one that repeats."""
        repeat = self._repeat
        if repeat is None:
            yield from self._issue(plan if plan.repeats == 1 else plan.at(0), device)
        elif self._jump is None or not (yield from self._jump.carry_out(repeat, device)):
            yield from self._issue(repeat.next(), device)

    def _give_back(self, device: int, number: int) -> None:
        """Returns what finished jobs held, up to the device's plan of that number."""
        returned = self._returned[device]
        while returned and returned[0][0] <= number:
            if self.waiting:
                self._repeat = None  # somebody may come in now
            _, job = returned.popleft()
            for place in tuple(self.ledger.places_of.get(job.job_id, ())):
                self.ledger.give(place)
            self.recorder.returned(job.job_id, device)
        self._release_idle()

    def _has_jobs(self) -> bool:
        return bool(self.waiting or self.serving or self.training)

    def _wake_at(self, wake_ns: int) -> None:
        delay_ns = wake_ns - int(self.env.now)
        if delay_ns > 0:
            self._waking = True
            self.env.timeout(delay_ns).callbacks.append(lambda _: self._tell())

    def _stall_message(self) -> str:
        lists = (("waiting", self.waiting), ("serving", self.serving), ("training", self.training))
        named = ", ".join(f"{name} {[j.job_id for j in jobs]}" for name, jobs in lists if jobs)
        free = {f"{tier}:{device}": n for (tier, device), n in self.ledger.free_bytes().items()}
        return f"the policy wants nothing although nothing is in flight: {named}; free bytes {free}"

    def view(self, device: int) -> View:
        """What a policy is shown when a device is asked for."""
        ledger = self.ledger
        return View(
            int(self.env.now),
            device,
            self._issued[device],
            self._shown(self.serving, device),
            self.training,
            self._shown(self.waiting, device),
            ledger.free_bytes(),
            ledger.coming_bytes(),
            MappingProxyType(ledger.held_bytes),
            MappingProxyType(ledger.written),
            MappingProxyType(ledger.used),
            tuple(ledger.open),
            ledger.capacity_bytes,
            self.page,
            self.profile,
            self.layout,
            self.cost,
            None if self.reuse is None else self.reuse.trial(device),
        )

    def _shown(self, jobs: list[Job], device: int) -> list[Job]:
        """A replica sees its own requests; where nobody routes, every device sees all."""
        if self.fleet is None or self.devices == 1:
            return jobs
        return [job for job in jobs if job.device in (None, device)]

    def _own(self, device: int) -> int | None:
        """Whose pools a plan can change: its replica's; without a router, anybody's."""
        return None if self.fleet is None else device

    # ---- issue: state moves on
    def _issue(self, plan: Plan, device: int) -> Generator[simpy.Event, Any, None]:
        booked = self.ledger.book(plan)
        for job in plan.restart:
            self._restart(job)
        for job in plan.refuse:
            self._refuse(job)
        if self.reuse is not None:
            self.reuse.start(plan)
        launches = [self._launch(op, booking, device) for op, booking in booked.items()]
        step, number, now_ns = self.steps, self._issued[device], int(self.env.now)
        self.steps += 1
        self._issued[device] += 1
        tails = [op for op in booked if isinstance(op, Compute) and op.on == COMPUTE_LANE]
        if tails:
            self._flight[device] += 1
            self._tails.add(tails[-1])
        figures = self.ledger.figures(device=self._own(device) if step else None)
        self.recorder.issued(step, device, now_ns, plan, figures)
        self._check_books()
        host_ns = self.executor.prepare(launches)
        for i, launch in enumerate(launches):
            self.flies(step, device, number, now_ns, 0 if i else host_ns, launch)
        if wait_ns := due_ns(self.env, host_ns):
            yield self.env.timeout(wait_ns)
        for launch in launches:
            self.executor.run(launch, self._settle)

    def flies(
        self, step: int, device: int, number: int, issue_ns: int, host_ns: int, launch: Launch
    ) -> None:
        """An operation is on its way."""
        self._flights[launch.op] = Flight(step, device, number, issue_ns, host_ns, launch)

    def _launch(self, op: Op, booking: Booking, device: int) -> Launch:
        if isinstance(op, Copy):
            return Launch(op, booking.waits, (), *booking.copied)
        assert op.device == device, f"a plan for device {device} computes on {op.device}"
        jobs = [piece.job for piece in op.slices]
        ids = [job.job_id for job in jobs]
        contexts = [job.computed_tokens for job in jobs]
        tables = [self.ledger.pages.get(kv_place(i, Tier.GPU, op.device), ()) for i in ids]
        samples = [self._advance(op, piece) for piece in op.slices]
        if self.reuse is not None:
            self.reuse.keep(op, contexts)
        tokens = [piece.tokens for piece in op.slices]
        return Launch(op, booking.waits, Pieces(ids, tokens, contexts, samples, tables))

    def _advance(self, op: Compute, piece: Slice) -> bool:
        """Moves a slice's job on; returns whether it yields a token."""
        job = piece.job
        if job.job_id not in self._started:
            self._start(job)
        if job.training is not None:
            if self._train(op, piece):
                self.end_with(op, [job])
            return False
        samples = advance_serving(piece)
        if piece.record:
            self._recorded[job.job_id] = job.recorded_tokens
        if samples and self.forced and job.known_tokens >= self._target[job.job_id]:
            self.end_with(op, [job])
        return samples

    def end_with(self, op: Op, jobs: Sequence[Job]) -> None:
        """These jobs leave the service now and finish when the operation settles."""
        if self._repeat is not None:
            self._repeat = None if self.waiting else self._repeat.without(jobs)
        for job in jobs:
            self._ends.setdefault(op, []).append(job)
            (self.serving if job.training is None else self.training).remove(job)

    def is_calm(self, device: int) -> bool:
        """Whether no memory is on its way back and nobody's end is in flight."""
        return not (self._ends or self._returned[device]) and self.ledger.is_calm

    def _start(self, job: Job) -> None:
        self._started.add(job.job_id)
        self.waiting.remove(job)
        if job.training is not None:
            self.training.append(job)
        else:
            self.serving.append(job)
            self.recorder.scheduled(job.job_id, int(self.env.now))

    def _is_complete(self, job: Job) -> bool:
        return job.known_tokens >= self._target[job.job_id]

    def _train(self, op: Compute, piece: Slice) -> bool:
        """Returns whether the training job is complete with this slice."""
        job = piece.job
        if op.again:
            return False
        pool = (Tier.GPU, op.device)
        kinds = (Kind.KV, Kind.ACTIVATION, Kind.GRADIENT)
        self.profile.issued(op, sum(self.ledger.kind_bytes[pool, kind] for kind in kinds))
        if advance_training(piece):
            self.profile.completed_step(job.job_id)
        assert job.training is not None
        return job.step >= job.training.num_steps

    def _restart(self, job: Job) -> None:
        restart(job)
        if job in self.serving:
            self.serving.remove(job)
            self.waiting.insert(0, job)
            self._started.discard(job.job_id)

    def _refuse(self, job: Job) -> None:
        for jobs in (self.waiting, self.serving, self.training):
            if job in jobs:
                jobs.remove(job)
        for place in tuple(self.ledger.places_of.get(job.job_id, ())):
            self.ledger.give(place)
        self._leave(job, int(self.env.now), "refused")

    def _check_books(self) -> None:
        if self._journal is None:
            return
        self.ledger.conserved()
        settling = [job for jobs in self._ends.values() for job in jobs]
        inside = [j for j in (*self.waiting, *self.serving, *settling) if j.training is None]
        ended = sum(o.status != "unfinished" for o in self.recorder.outcomes.values())
        assert len(self.recorder.outcomes) == len(inside) + ended, "requests do not add up"

    # ---- settle: measurements and tokens arrive
    def _settle(self, span: Span) -> None:
        op = span.op
        flight = self._flights.pop(op)
        self.land(op)
        self.profile.settled(span)
        self._deliver(span, flight)
        self._release_idle()
        self._check_books()
        early_bytes = self._jump.unissued_bytes(span.end_ns) if self._jump else 0
        self.recorder.settled(
            flight.step,
            flight.issue_ns,
            flight.host_ns,
            span,
            flight.launch,
            self.ledger.figures((Tier.GPU, flight.device), early_bytes, self._own(flight.device)),
        )
        self._tell()

    def land(self, op: Op) -> None:
        """An operation has ended: what waited for it may go on."""
        self.ledger.settle(op)
        if op in self._tails:
            self._tails.discard(op)
            self._flight[op.lane[0]] -= 1

    def _release_idle(self) -> None:
        for pool, pages in self.ledger.drain_idle():
            self.executor.release(pool, pages)

    def _deliver(self, span: Span, flight: Flight) -> None:
        self.recorder.delivered(flight.launch.pieces, span.end_ns)
        for job in self._ends.pop(span.op, ()):
            self._finish(job, span.end_ns, flight.device, flight.number)
        if not self.forced:
            self._end_sampled(span, flight)

    def _end_sampled(self, span: Span, flight: Flight) -> None:
        """Ends what sampled an end of sequence, or reached the length of the trace as its limit."""
        sampled = {piece.job_id for piece in flight.launch.pieces if piece.samples}
        for job in [job for job in self.serving if job.job_id in sampled]:
            if job.job_id in span.ended or self._is_complete(job):
                self._repeat = None
                self.serving.remove(job)
                self._finish(job, span.end_ns, flight.device, flight.number)

    def _finish(self, job: Job, now_ns: int, device: int, number: int) -> None:
        if self._returns_memory:
            self._returned[device].append((number, job))
        self._leave(job, now_ns, "finished")

    def _leave(self, job: Job, now_ns: int, status: str) -> None:
        if job.training is None:
            self.recorder.ended(job.job_id, now_ns, status)
            if self.fleet is not None:
                self.fleet.left(job)
            if self.reuse is not None:
                self.reuse.left(job)
            self._arrivals.release_turn(job)
