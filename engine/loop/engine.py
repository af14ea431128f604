"""The one loop: ask the policy, issue its plan, settle what has ended; repeat."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import simpy

from engine.contract.adapter_check import AdapterCheck, publications
from engine.contract.executor import Executor, Launch, Span, due_ns
from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import COMPUTE_LANE, Op, Plan
from engine.contract.plan_check import PlanCheck
from engine.contract.policy import Policy, Router, Traits, traits_of
from engine.contract.progress import restart
from engine.contract.records import RecordCheck
from engine.contract.regions import Kind, PageSize, Place, Pool, Tier
from engine.contract.rules import name_of
from engine.contract.training_check import TrainingContract
from engine.contract.view import Cost
from engine.fast_forward.fast_forward import FastForward
from engine.loop.adapters import PublishedAdapters
from engine.loop.admission import Admission, ArrivalQueue
from engine.loop.asking import Asking, LoopParts, PlanReuse
from engine.loop.completions import Completions, DeferredFrees, check_end, check_requests
from engine.loop.issuing import Issuing, Moves, PrefixReuse
from engine.loop.profile import EngineProfile
from engine.loop.records import RecordBook
from engine.loop.service import Service
from engine.loop.state import (
    EngineState,
    InFlight,
    IssuedOp,
    JobLists,
    Lifecycle,
    RoutedFleet,
    Turn,
    Wakeup,
    passed_to,
)
from engine.memory.ledger import Ledger
from engine.memory.pool import Chain
from engine.memory.scoreboard import Journal
from engine.results.recorder import Recorder
from traces.serving.request import Request, Sample, TrainingJob

THRESHOLDS = (50_000_000, 1000, 1000)  # objects before a collection: 300,000 requests have fewer


@contextmanager
def few_collections() -> Iterator[None]:
    """Garbage collection is rare while a run lasts.

    A run keeps all its facts, so each collection would look through all of them. Facts form no
    cycles; cycles are still found, only later. At the end the facts join the oldest generation
    without a look (frozen, and thawed at once).
    """
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        gc.set_threshold(*before)


FRUITLESS = 10_000  # plans in a row without an operation: the policy will never do anything


def _check_brings(traits: Traits, name: str) -> None:
    """ValueError where no memory policy brings adapters to the device."""
    if traits.adapters and traits.kv_growth != "asked":
        raise ValueError(
            f"policy {name} declares kv_growth={traits.kv_growth} with adapters: what a launch "
            'reads is known where it is asked for; declare kv_growth="asked"'
        )
    if not traits.adapters:
        raise ValueError(
            f"policy {name} brings no adapters to the device: put its memory half into an "
            "AdapterMemory (policies.sharing.adapters), or serve none"
        )


class Stalled(RuntimeError):
    """Jobs are left, and the policy plans nothing for them. The message names the jobs."""


class Engine(Lifecycle):
    """One engine for every backend: a SimPy process over an environment and an executor.

    The policy's Traits decide which questions it is spared, and whether full pages are kept.

    Args:
        env: the clock; a live one passes by itself.
        policy: answers each View with a Plan.
        executor: runs the launches.
        capacity_bytes: bytes of each pool.
        page: the page size of KV.
        devices: how many devices plans are made for.
        depth: the run-ahead, in plans of a device that may be in flight. A plan is in flight until
            its last Compute ends.
        forced: whether a request ends at its recorded output length; else sampling ends it, which
            needs depth 1.
        layout: what a planner has decided; places that are held before the first step.
        cost: predicted durations, for policies that plan by time.
        recorder: collects the facts of the run.
        journal: gets every life of a place; with it the laws are checked at each step.
        returns_memory: whether the engine gives back a finished job's memory; False leaves it to
            the policy (playing back a plan log).
        fast_forward: whether questions are spared and steps are issued at once; results are equal
            without.
        router: makes each device a replica, which is shown only requests that are routed to it.
        lanes: the compute lanes of a device; launches that serve run on no other lane.

    Raises:
        ValueError: `depth` is below 1, or above 1 without `forced`; a trait is declared wrongly, or
            adapters are laid out and the policy brings none to the device.
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
            raise ValueError(f"depth is {depth}: sampled lengths need at most one plan in flight")
        traits, recorder = traits_of(policy), recorder or Recorder()
        recorder.predicted_bytes = executor.peak_bytes
        recorder.predicted_peaks = executor.served_peaks
        recorder.keeps_service = traits.service is not None
        shown = (layout or Layout()).shown()
        chains: dict[int, Chain] | None = {} if traits.prefix_caching else None
        ledger = Ledger(capacity_bytes, page, shown.places, journal, chains)
        self._policy_name = name_of(policy)
        self.state = state = EngineState(
            env,
            executor,
            page,
            devices,
            depth,
            forced,
            shown,
            cost,
            journal is not None,
            recorder,
            executor.store,
            ledger,
            None if router is None else RoutedFleet(devices, router),
            JobLists(traits.service and Service(traits.service, devices, router is not None)),
            PublishedAdapters(shown.adapters) if shown.adapters else None,
            InFlight(devices),
            EngineProfile(None if cost is None else cost.launch_ns),
            Wakeup(env, self._changed),
            [],
            RecordBook(),
        )
        self.reuse = PlanReuse(self._issue)
        if fast_forward and devices == 1:
            self.reuse = FastForward(
                self._issue,
                policy,
                state,
                lambda job: self._completions.tokens_left(job),
            )
        self._completions = Completions(
            state.jobs, ledger.open, self.reuse.ended, self.reuse.changed
        )
        self._training = TrainingContract(
            shown, ledger.marks, ledger.held_bytes, ledger.capacity_bytes, page
        )
        frees = DeferredFrees(state.give_all, recorder, devices)
        prefix = None if chains is None else PrefixReuse(chains, ledger, recorder)
        self._issuing = Issuing(state, self._completions, prefix)
        adapters, records = None, None
        if state.adapters is not None:
            _check_brings(traits, self._policy_name)
            adapters = AdapterCheck(state.adapters.newest, state.jobs.jobs, ledger.held_bytes)
            if shown.training:
                books = ledger.held_bytes, ledger.places_of, ledger.page.tokens
                records = RecordCheck(state.records.records, state.jobs.jobs, *books)
        check = PlanCheck(
            ledger,
            state.jobs,
            self.reuse.leading,
            lanes,
            self._training,
            router is not None,
            adapters,
            records,
        )
        self._admission = Admission(
            state,
            self._completions,
            frees if returns_memory else None,
            self._issuing,
            self._training,
            check.left,
        )
        self._arrivals = ArrivalQueue(env, (), self._admit)
        self._asking = Asking(state, policy, check, self.reuse, frees, prefix)
        self.reuse.carried_out_by(
            LoopParts(
                self._completions,
                frees,
                self._issuing,
                self,
                lambda: self._arrivals.next_ns,
                lambda: self._arrivals.serves_only,
                lambda job: self._arrivals.awaits_answer(job),
                returns_memory,
            )
        )
        self._fruitless = 0  # plans in a row that launched and refused nothing
        self._moments = 0  # asked for in a row, while nothing was issued, arrived or ended
        self._num_requests = 0  # of the trace
        self._may_stop = False  # whether a training job ends with the last request
        self._is_issuing = False  # a plan is booked, and its operations have not started

    @property
    def recorder(self) -> Recorder:
        """The facts of the run."""
        return self.state.recorder

    @property
    def ledger(self) -> Ledger:
        """The predicted memory."""
        return self.state.ledger

    @property
    def steps(self) -> int:
        """Plans issued."""
        return self.state.in_flight.steps

    @property
    def asked(self) -> int:
        """Questions to the policy."""
        return self._asking.asked

    def replay(self, work: Iterable[Request | TrainingJob]) -> None:
        """Runs a trace to its end.

        Raises:
            Stalled: the replay cannot end.
            ContractError: a plan breaks a rule.
            BrokenLaw: at the end a request is unfinished or of another length, or memory is held.
        """
        items, state = list(work), self.state
        requests = [item for item in items if isinstance(item, Request)]
        (state.adapters or PublishedAdapters(())).check(requests)
        self._num_requests = len(requests)
        self._may_stop = any([i.until_served for i in items if isinstance(i, TrainingJob)])
        self._arrivals = ArrivalQueue(state.env, items, self._admit)
        state.env.process(self._arrivals.run())
        with few_collections():
            state.env.run(state.env.process(self._serve()))
        recorder, ledger = state.recorder, state.ledger
        if state.jobs.service is not None:
            recorder.service = state.jobs.service.rows()
        recorder.records = state.records.rows()
        training = [(i, recorder.steps_of(i.job_id)) for i in items if isinstance(i, TrainingJob)]
        outcomes, held = recorder.outcomes.values(), ledger.held_bytes
        check_end(outcomes, training, held, self._resident(), ledger.ended, state.forced)
        ledger.conserved()

    def _resident(self) -> set[Place]:
        """Places of no job that may be held to the end: of adapters the homes of newest versions.

        Where plans give memory back, a home of an older version may be held, too.
        """
        state, kind = self.state, Kind.ADAPTER
        found = {place for place in state.layout.places if place.region.kind is not kind}
        if state.adapters is not None:
            devices, newest = range(state.devices), state.adapters.newest.values()
            found |= {version.home(device) for version in newest for device in devices}
            if state.ledger.ended:
                found |= {place for place in state.ledger.held_bytes if place.region.kind is kind}
        return found

    # ---- the loop
    def _serve(self) -> Turn:
        state, asking = self.state, self._asking
        while self._arrivals.pending or state.jobs or state.ledger.open:
            asked = yield from self._ask_devices()
            if asked:
                continue
            if not state.jobs:
                asking.give_all_back()
            comes = self._arrivals.next_ns is not None or state.wakeup.will_come
            if not (state.ledger.open or comes):  # turns that only answers release never come
                raise self._stalled("the policy plans nothing although nothing is in flight")
            self._rest()
            yield state.wakeup.next
        asking.give_all_back()
        self._rest()

    def _ask_devices(self) -> Generator[simpy.Event, Any, bool]:
        """Asks for idle devices first, then for devices with one plan in flight, and so on."""
        asked, state = False, self.state
        levels = state.in_flight.level
        for level in range(state.depth):
            for device in range(state.devices):
                if levels[device] != level or not state.jobs:
                    continue
                plan = self._asking.decide(device)
                if plan.wake_ns is not None:
                    self._wake_at(plan.wake_ns)
                if plan:
                    self._moments = 0
                    yield from self.reuse.advance(plan, device)
                    asked = True
        return asked

    def _wake_at(self, wake_ns: int) -> None:
        """Notes the moment that the policy waits for. Stalled where it only ever waits."""
        self._moments += 1
        is_last = self._arrivals.next_ns is None and not self.state.ledger.open
        if self._moments >= FRUITLESS * (1 if is_last else 10):
            raise self._stalled(
                f"the policy has asked for {self._moments:,} moments and does nothing"
            )
        self.state.wakeup.wake_at(wake_ns)

    def _rest(self) -> None:
        recorder, state = self.state.recorder, self.state
        if recorder.lacks_return:
            recorder.rested(state.now_ns, self.steps - 1, state.ledger.figures())

    def _admit(self, item: Request | TrainingJob, arrival_ns: int) -> None:
        """A request or training job has arrived."""
        if isinstance(item, Request):
            self.reuse.arrived()
        else:
            self._changed()
        self._moments = 0
        gets = isinstance(item, Request) and self._arrivals.gets_feedback(item)
        job = self._admission.admit(item, arrival_ns, gets)
        if job.training is not None:
            self._arrivals.release_samples(job, partial(self._released, job))
            if self._may_stop:
                self._stop_with_serving()

    def _changed(self) -> None:
        self.reuse.changed()

    def _released(self, job: Job, sample: Sample | None) -> None:
        """A sample of a finetuning job is there; one that is feedback is given."""
        if sample is not None and sample.request is not None:
            self.state.recorder.released(job.job_id, self.state.now_ns)
            self.state.records.learned(sample.request, sample.release_ns)
        self._changed()
        self._moments = 0
        self.state.wakeup.tell()

    def _stop_with_serving(self) -> None:
        """Training jobs that go on only while requests are served end with the last of them.

        A plan that is booked starts before: it may take and free memory of these jobs.
        """
        state, count = self.state, self._num_requests
        if not count or state.recorder.ended_requests < count:
            return
        if self._is_issuing:
            return
        for job in [*state.jobs.training, *state.jobs.waiting]:
            if job.training is not None and job.training.spec.until_served:
                self._admission.stop(job)
                self._changed()

    def _stalled(self, why: str) -> Stalled:
        ledger, jobs = self.state.ledger, self.state.jobs
        free = {f"{tier}:{device}": n for (tier, device), n in ledger.free_bytes().items()}
        return Stalled(f"policy {self._policy_name}: {why}: {jobs}; free bytes {free}")

    # ---- issue: state moves on
    def _issue(self, plan: Plan, device: int, moves: Moves | None = None) -> Turn:
        """Books a plan, moves its jobs on, launches it and lets the host's time pass."""
        launches = self._booked(plan, device, moves)
        self._check_progress(plan, launches)
        host_ns = self._prepared(plan, device, launches)
        state = self.state
        wait_ns, env = due_ns(state.executor, host_ns), state.env
        self._is_issuing = True
        if wait_ns and not passed_to(env, state.now_ns + wait_ns):
            yield simpy.Timeout(env, wait_ns)
        self._issuing.start(plan, launches, self.settle)
        state.retire()
        self._is_issuing = False
        if self._may_stop:
            self._stop_with_serving()

    def _booked(self, plan: Plan, device: int, moves: Moves | None) -> list[Launch]:
        """Books a plan; jobs restart, leave and move on as it says."""
        state = self.state
        booked = state.ledger.book(plan, 0 if moves is None else moves.num_held)
        for job in plan.restart:
            state.jobs.wait_again(job)
            restart(job)
        for job in plan.refuse:
            self._admission.refuse(job, self._arrivals.answered)
        for job, number in plan.relaid:
            self._training.relay(job, number)
        if self._issuing.prefix is not None:
            self._issuing.prefix.start(plan)
            state.release_idle()  # what kept pages gave way to
        launches = [self._issuing.launch(op, b, device, moves) for op, b in booked.items()]
        if state.adapters is not None:
            over = state.records.booked(plan, state.ledger.places_of, state.now_ns)
            state.records_over(over)
            self._publish(plan)  # behind the launches, whose jobs have the versions before
        return launches

    def _publish(self, plan: Plan) -> None:
        """New versions are the newest from now on, for jobs that are not admitted yet."""
        state, adapters = self.state, self.state.adapters
        assert adapters is not None, "a run with adapters"
        for op in publications(plan):
            made = op.dst.region
            over, moved = adapters.publish(made.part, made.slot, state.jobs.waiting)
            for job in moved:
                if self._issuing.prefix is not None:
                    self._issuing.prefix.renew(job)
            if over is not None:
                state.over.append(over)

    def _check_progress(self, plan: Plan, launches: Sequence[Launch]) -> None:
        """Raises Stalled where many plans in a row hold no operation."""
        self._fruitless = 0 if launches or plan.refuse else self._fruitless + 1
        if self._fruitless >= FRUITLESS:
            raise self._stalled(f"the policy's last {FRUITLESS:,} plans hold no operation")

    def _prepared(self, plan: Plan, device: int, launches: Sequence[Launch]) -> int:
        """Numbers and records a plan; returns the host's time in ns to prepare its launches."""
        state, now_ns = self.state, self.state.now_ns
        step, number = state.in_flight.number(device)
        state.in_flight.last_compute([launch.op for launch in launches], device)
        figures = state.ledger.figures(device=self._own(device) if step else None)
        state.recorder.issued(step, device, now_ns, plan, figures)
        self._check_books()
        host_ns = state.executor.prepare(launches)
        for i, launch in enumerate(launches):
            step_host_ns = 0 if i else host_ns
            state.in_flight.start(IssuedOp(step, device, number, now_ns, step_host_ns, launch))
        return host_ns

    def _own(self, device: int) -> int | None:
        """The device whose pools a plan can change; None for all of them, without a router."""
        return None if self.state.fleet is None else device

    def _check_books(self) -> None:
        state = self.state
        if state.is_watched:
            state.ledger.conserved()
            check_requests(state.recorder.outcomes.values(), (*state.jobs, *self._completions))

    # ---- settle: measurements and tokens arrive
    def settle(self, span: Span) -> None:
        """An operation has ended: its tokens are delivered, and bytes that it used come back."""
        self._moments, state = 0, self.state
        issued = state.in_flight.pop(span.op)
        device, number = issued.device, issued.number
        if state.profile.trains:
            state.profile.settled(span, issued.launch)
        state.recorder.delivered(device, issued.launch.pieces, span.end_ns)
        self.land(span.op, span.end_ns, device, number)
        if not state.forced:
            for job in self._completions.sampled(span, issued.launch):
                self.finish_job(job, span.end_ns, device, number)
        state.release_idle()
        self._check_books()
        early_bytes = self.reuse.unissued_bytes(span.end_ns)
        figures = state.ledger.figures((Tier.GPU, device), early_bytes, self._own(device))
        state.recorder.settled(
            issued.step, issued.issue_ns, issued.host_ns, span, issued.launch, figures
        )
        may_ask = min(state.in_flight.level) < state.depth  # for a device
        if may_ask or not state.jobs:
            state.wakeup.tell()

    def land(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """An operation has ended: its bytes, and operations and steps behind it, go on."""
        state = self.state
        state.ledger.settle(op)
        state.in_flight.land(op)
        for end in self._completions.settle(op, end_ns, device, number):
            state.recorder.trained(end.job, end.step, end.end_ns)
            if end.is_last:
                self.finish_job(end.job, end.end_ns, device, end.plans[device])
        self.finish(op, end_ns, device, number)

    def finish(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """The jobs that end with an operation finish."""
        for job in self._completions.pop(op):
            self.finish_job(job, end_ns, device, number)

    def finish_job(self, job: Job, now_ns: int, device: int, number: int) -> None:
        """A job is complete with the device's plan of that number."""
        self._admission.finish(job, now_ns, device, number, self._arrivals.answered)
        if self._may_stop:
            self._stop_with_serving()

    def give_back(self, device: int) -> None:
        """Gives back the memory of finished jobs that the device may be shown by now."""
        self._asking.give_back(device)
