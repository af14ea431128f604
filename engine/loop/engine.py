"""The one loop: ask the policy, issue its plan, settle what has ended; repeat."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import simpy

from engine.contract.executor import Executor, Span, Store, due_ns, skipped_to
from engine.contract.layout import Layout
from engine.contract.plan import COMPUTE_LANE, Op, Plan
from engine.contract.plan_check import PlanCheck
from engine.contract.policy import Fleet, Policy, Router
from engine.contract.progress import restart
from engine.contract.regions import Kind, PageSize, Pool, Tier
from engine.contract.training_check import TrainingContract
from engine.contract.view import Cost
from engine.fast_forward.jump import Jump, Repeater, offers_jumps
from engine.fast_forward.repeated_plan import RepeatedPlan
from engine.fast_forward.standing_plan import StandingPlan
from engine.laws.check_replay import check_end, check_requests
from engine.loop.admission import Admission, ArrivalQueue
from engine.loop.asking import Asking
from engine.loop.completions import Completions, DeferredFrees
from engine.loop.in_flight import InFlight, IssuedOp, Wakeup
from engine.loop.issuing import Issuing, Reuse
from engine.loop.job_lists import JobLists
from engine.loop.profile import EngineProfile
from engine.memory.ledger import Ledger
from engine.memory.prefix import Chain
from engine.memory.scoreboard import Journal
from engine.results.recorder import Recorder
from traces.serving.request import Request, TrainingJob

THRESHOLDS = (50_000_000, 1000, 1000)  # the facts of some 300,000 requests


@contextmanager
def few_collections() -> Iterator[None]:
    """While a run keeps all its facts, to look through them again and again is a third of its time.

    Facts form no cycles; what does is still found, only later. To look through the facts just once,
    at the end, would still be 6 %: they join the oldest generation unseen (frozen, thawed at once).
    """
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.set_threshold(*before)


FRUITLESS = 10_000  # plans without an operation, one after the other, are none too few


class Stalled(RuntimeError):
    """Work is left, and the policy wants nothing, or does nothing for ever. Names the jobs."""


class Engine:
    """One engine for every backend: a SimPy process over an environment and an executor.

    `depth` is the run-ahead: how many plans of a device may be in flight (until their last Compute
    ends). `forced` lengths end a request at its recorded output; else sampling ends it (depth 1).
    `returns_memory=False` leaves a finished job's memory to the policy (playing back a plan log).
    `fast_forward=False` asks for every step, also where a plan would hold for many, or a step of
    training is like the one before; same results.
    With a `router` each device is a replica: it is shown only the requests that were routed to it.
    `lanes` are the compute lanes that a device has: launches that serve run on no others.
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
        lanes: tuple[str, ...] = (COMPUTE_LANE,),
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: at least one plan must be in flight")
        if not forced and depth > 1:
            raise ValueError(f"depth is {depth}: sampled lengths need depth 1 (set depth=1)")
        self.env, self.executor = env, executor
        self.page, self.devices, self.depth, self.forced = page, devices, depth, forced
        self.layout, self.cost = (layout or Layout()).shown(), cost
        self.is_watched = journal is not None
        self.recorder = recorder or Recorder()
        self.recorder.predicted_bytes = getattr(executor, "peak_bytes", None)
        self.store: Store | None = getattr(executor, "store", None)
        chains: dict[int, Chain] | None = {} if getattr(policy, "prefix_caching", False) else None
        self.ledger = Ledger(capacity_bytes, page, self.layout.places, journal, chains)
        self.reuse = None if chains is None else Reuse(chains, self.ledger, self.recorder)
        self.fleet = None if router is None else Fleet(devices, router)
        self.profile = EngineProfile()
        self.roster, self.flights = JobLists(), InFlight(devices)
        self.standing = StandingPlan(
            fast_forward and devices == 1,
            page,
            self.ledger.pages,
            lambda job: self.ends.tokens_left(job),
        )
        self.ends = Completions(self.roster, self.standing, self.ledger.open)
        self.training = TrainingContract(
            self.layout, self.ledger.marks, self.ledger.held_bytes, self.ledger.capacity_bytes
        )
        self.leftovers = DeferredFrees(self.give_all, self.recorder, devices)
        self.launcher = Issuing(self)
        self._door = Admission(self, returns_memory)
        self.arrivals = ArrivalQueue(env, (), self._door.admit)
        self.news = Wakeup(env, self.standing.drop)
        self.check = PlanCheck(
            self.ledger,
            self.roster,
            self.standing,
            self.ends.tokens_left,
            lanes,
            self.training,
            is_routed=router is not None,
        )
        self.questions = Asking(self, policy, fast_forward and devices == 1, self.check)
        self._fruitless = 0  # plans in a row that launched and refused nothing
        self.moments = 0  # asked for in a row, while nothing was issued, came or ended
        self.jump: Jump | None = None
        if fast_forward and devices == 1 and offers_jumps(self):
            self.jump = Jump(self, cast(Repeater, executor))

    @property
    def steps(self) -> int:
        """Plans issued."""
        return self.flights.steps

    @property
    def asked(self) -> int:
        """Questions to the policy."""
        return self.questions.asked

    def replay(self, work: Iterable[Request | TrainingJob]) -> None:
        """Runs a trace to its end.

        Raises Stalled where it cannot end, ContractError where a plan breaks a rule, BrokenLaw
        where the end does: a request unfinished or of another length, memory that is held.
        """
        items = list(work)
        self.arrivals = ArrivalQueue(self.env, items, self._door.admit)
        self.env.process(self.arrivals.run())
        with few_collections():
            self.env.run(self.env.process(self._serve()))
        recorder = self.recorder
        training = [(i, recorder.steps_of(i.job_id)) for i in items if isinstance(i, TrainingJob)]
        outcomes, held = recorder.outcomes.values(), self.ledger.held_bytes
        resident = self.layout.places
        check_end(outcomes, training, held, resident, self.ledger.ended, self.forced)
        self.ledger.conserved()

    # ---- the loop
    def _serve(self) -> Generator[simpy.Event, Any, None]:
        while self.arrivals.pending or self.roster or self.ledger.open:
            asked = yield from self._ask_devices()
            if asked:
                continue
            if not self.roster:
                self.questions.give_all_back()
            comes = self.arrivals.next_ns is not None or self.news.will_come
            if not (self.ledger.open or comes):  # turns that only answers release never come
                raise self._stalled("the policy wants nothing although nothing is in flight")
            self._rest()
            yield self.news.next
        self.questions.give_all_back()
        self._rest()

    def _wake_at(self, wake_ns: int) -> None:
        """A moment for which the policy wants to wait, though not for ever."""
        self.moments += 1
        is_last = self.arrivals.next_ns is None and not self.ledger.open
        if self.moments >= FRUITLESS * (1 if is_last else 10):
            raise self._stalled(
                f"the policy has asked for {self.moments:,} moments and does nothing"
            )
        self.news.wake_at(wake_ns)

    def _rest(self) -> None:
        if self.recorder.lacks_return:
            self.recorder.rested(int(self.env.now), self.steps - 1, self.ledger.figures())

    def _ask_devices(self) -> Generator[simpy.Event, Any, bool]:
        """Idle devices first, then those with one plan in flight, and so on."""
        asked, levels = False, self.flights.level
        for level in range(self.depth):
            for device in range(self.devices):
                if levels[device] != level or not self.roster:
                    continue
                plan = self.questions.decide(device)
                if plan.wake_ns is not None:
                    self._wake_at(plan.wake_ns)
                if plan:
                    self.moments = 0
                    yield from self._carry_out(plan, device)
                    asked = True
        return asked

    def _carry_out(self, plan: Plan, device: int) -> Generator[simpy.Event, Any, None]:
        """Issues a plan, or what can be issued of one that repeats."""
        repeat = self.standing.repeat
        if repeat is None:
            yield from self._issue(plan if plan.repeats == 1 else plan.at(0), device)
        elif self.jump is None or not (yield from self.jump.carry_out(repeat, device)):
            yield from self._issue(repeat.next(), device, repeat)

    def give_all(self, owner: int) -> None:
        """All that an owner holds comes back."""
        for place in self.ledger.give_all(owner):
            if self.store is not None and place.region.kind is not Kind.KV:
                self.store.free(place)

    def release_idle(self) -> None:
        """Pages out of all use go back to the machine."""
        for pool, pages in self.ledger.drain_idle():
            self.executor.release(pool, pages)

    def _stalled(self, why: str) -> Stalled:
        free = {f"{tier}:{device}": n for (tier, device), n in self.ledger.free_bytes().items()}
        return Stalled(f"{why}: {self.roster}; free bytes {free}")

    # ---- issue: state moves on
    def _issue(
        self, plan: Plan, device: int, repeat: RepeatedPlan | None = None
    ) -> Generator[simpy.Event, Any, None]:
        booked = self.ledger.book(plan, 0 if repeat is None else len(repeat.cohort.jobs))
        for job in plan.restart:
            restart(job)
            self.roster.wait_again(job)
        for job in plan.refuse:
            self._door.refuse(job)
        if self.reuse is not None:
            self.reuse.start(plan)
        launches = [self.launcher.launch(op, b, device, repeat) for op, b in booked.items()]
        now_ns = int(self.env.now)
        step, number = self.flights.number(device)
        self.flights.last_compute(booked, device)
        self._fruitless = 0 if launches or plan.refuse else self._fruitless + 1
        if self._fruitless >= FRUITLESS:
            raise self._stalled(f"the policy's last {FRUITLESS:,} plans hold no operation")
        figures = self.ledger.figures(device=self._own(device) if step else None)
        self.recorder.issued(step, device, now_ns, plan, figures)
        self._check_books()
        host_ns = self.executor.prepare(launches)
        for i, launch in enumerate(launches):
            self.flights.start(IssuedOp(step, device, number, now_ns, 0 if i else host_ns, launch))
        wait_ns = due_ns(self.env, host_ns)
        if wait_ns and not skipped_to(self.env, now_ns + wait_ns):
            yield self.env.timeout(wait_ns)
        self.launcher.start(plan, launches)

    def _own(self, device: int) -> int | None:
        """Whose pools a plan can change: its replica's; without a router, anybody's."""
        return None if self.fleet is None else device

    def _check_books(self) -> None:
        if not self.is_watched:
            return
        self.ledger.conserved()
        check_requests(self.recorder.outcomes.values(), (*self.roster, *self.ends))

    # ---- settle: measurements and tokens arrive
    def settle(self, span: Span) -> None:
        """An operation has ended: what it sampled and held is there."""
        self.moments = 0
        flight = self.flights.pop(span.op)
        self.profile.settled(span)
        self.recorder.delivered(flight.device, flight.launch.pieces, span.end_ns)
        self.land(span.op, span.end_ns, flight.device, flight.number)
        if not self.forced:
            for job in self.ends.sampled(span, flight.launch):
                self._door.finish(job, span.end_ns, flight.device, flight.number)
        self.release_idle()
        self._check_books()
        early_bytes = self.jump.unissued_bytes(span.end_ns) if self.jump else 0
        self.recorder.settled(
            flight.step,
            flight.issue_ns,
            flight.host_ns,
            span,
            flight.launch,
            self.ledger.figures((Tier.GPU, flight.device), early_bytes, self._own(flight.device)),
        )
        if not self.roster or min(self.flights.level) < self.depth:  # else nobody may be asked
            self.news.tell()

    def land(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """An operation has ended: what waited for it may go on."""
        self.ledger.settle(op)
        self.flights.land(op)
        for end in self.ends.settle(op, end_ns, number):
            self.recorder.trained(end.job, end.step, end.end_ns)
            if end.is_last:
                self._door.finish(end.job, end.end_ns, device, end.number)
        self.finish(op, end_ns, device, number)

    def finish(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """Who was to finish with an operation finishes."""
        for job in self.ends.pop(op):
            self._door.finish(job, end_ns, device, number)
