"""What all parts of the loop share: clock, executor, ledger, job lists, operations in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Any, NamedTuple, Protocol

import simpy

from engine.contract.adapters import AdapterVersion
from engine.contract.executor import Executor, Launch, Span, Store
from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import HOST_LANE, Compute, Free, Op, Plan
from engine.contract.plan_check import Jobs
from engine.contract.policy import Router
from engine.contract.regions import Kind, PageSize, Place
from engine.contract.rules import ContractError, ReadOnlyList, Rule, as_write, made_at
from engine.contract.view import Cost
from engine.loop.adapters import PublishedAdapters
from engine.loop.profile import EngineProfile
from engine.loop.records import RecordBook
from engine.loop.service import Service
from engine.memory.ledger import Ledger
from engine.results.recorder import Recorder


class VirtualClock(simpy.Environment):
    """Virtual time in ns, which can pass over a stretch without an event.

    simpy keeps its time in `_now`, which it leaves to subclasses and has no public way to set, and
    its events in the heap `_queue`.
    """

    def passes_to(self, at_ns: int) -> bool:
        """Sets the clock to a moment, unless an event lies before it.

        Args:
            at_ns: the moment, in ns.

        Returns:
            Whether the clock was set; False leaves it unchanged.
        """
        if self._queue and self._queue[0][0] <= at_ns:
            return False
        self._now = at_ns
        return True


def has_event_by(env: simpy.Environment, at_ns: int) -> bool:
    """Whether an event comes before a clock has passed a moment.

    Args:
        env: the clock of the run.
        at_ns: the moment, in ns.

    Returns:
        True where an event lies up to the moment, and of every clock that is not virtual.
    """
    return not isinstance(env, VirtualClock) or env.peek() <= at_ns


def passed_to(env: simpy.Environment, at_ns: int) -> bool:
    """Passes a virtual clock to a moment.

    Args:
        env: the clock of the run.
        at_ns: the moment, in ns.

    Returns:
        Whether the clock is there now. Where it is False the caller waits for an event.
    """
    return isinstance(env, VirtualClock) and env.passes_to(at_ns)


class Wakeup:
    """One event at a time, which the loop waits for and every part of the engine may trigger.

    `at_a_moment` is called at each moment that a policy has asked for.
    """

    def __init__(self, env: simpy.Environment, at_a_moment: Callable[[], None]) -> None:
        self._env, self._at_a_moment = env, at_a_moment
        self._moments_ns: set[int] = set()  # moments that lie ahead
        self.next = env.event()

    @property
    def will_come(self) -> bool:
        """Whether a policy's moment lies ahead."""
        return bool(self._moments_ns)

    def tell(self) -> None:
        """Something happened."""
        self.next.succeed()
        self.next = self._env.event()

    def wake_at(self, wake_ns: int) -> None:
        """Triggers the event at that moment, if it is still to come."""
        delay_ns = wake_ns - int(self._env.now)
        if delay_ns > 0 and wake_ns not in self._moments_ns:
            self._moments_ns.add(wake_ns)
            simpy.Timeout(self._env, delay_ns).callbacks.append(lambda _: self._wake(wake_ns))

    def _wake(self, wake_ns: int) -> None:
        self._moments_ns.discard(wake_ns)
        self._at_a_moment()
        self.tell()


class IssuedOp(NamedTuple):
    """An operation in flight: its plan (of all, and of its device), and when it was issued."""

    step: int
    device: int
    number: int
    issue_ns: int
    host_ns: int  # of the whole plan, on its first operation
    launch: Launch


class InFlight:
    """Numbers plans as they are issued and counts those of which a Compute has not ended.

    A plan counts until those before it have ended, too: with two compute lanes a later one may end
    first. So a plan has settled when the one `depth` plans later is asked for.
    """

    def __init__(self, devices: int) -> None:
        self.steps = 0  # plans issued
        self.issued = [0] * devices  # plans issued per device
        self.level = [0] * devices  # plans in flight per device: the run-ahead
        self._tails: dict[Op, list[int]] = {}  # the last Compute on each lane of a plan in flight
        # Per device, how many of these are left of each plan, in issue order.
        self._left: list[deque[list[int]]] = [deque() for _ in range(devices)]
        self._issued_ops: dict[Op, IssuedOp] = {}

    @property
    def tails(self) -> tuple[Op, ...]:
        """The last Compute on each lane of the plans in flight, in issue order."""
        return tuple(self._tails)

    def number(self, device: int, count: int = 1) -> tuple[int, int]:
        """Numbers plans that are being issued: the first one's, of all and of its device."""
        step, number = self.steps, self.issued[device]
        self.steps += count
        self.issued[device] += count
        return step, number

    def last_compute(self, ops: Iterable[Op], device: int) -> None:
        """The plan of these operations is in flight until the last launch of each lane ends."""
        tails = {op.on: op for op in ops if isinstance(op, Compute) and op.on != HOST_LANE}
        if tails:
            self.add_tails(tails.values(), device)

    def add_tails(self, ops: Collection[Compute], device: int) -> None:
        """A plan is in flight until these launches end, each the last one of its lane."""
        self.level[device] += 1
        left = [len(ops)]
        self._left[device].append(left)
        for op in ops:
            self._tails[op] = left

    def start(self, issued: IssuedOp) -> None:
        """An operation is in flight."""
        self._issued_ops[issued.launch.op] = issued

    def launch_of(self, op: Op) -> Launch:
        """An operation in flight as it was issued. LookupError where it has ended."""
        return self._issued_ops[op].launch

    def pop(self, op: Op) -> IssuedOp:
        """An operation has ended; returns what was known of it."""
        return self._issued_ops.pop(op)

    def land(self, op: Op) -> None:
        """An operation has ended; its plan ends with the last Compute of all its lanes."""
        if (left := self._tails.pop(op, None)) is None:
            return
        left[0] -= 1
        device = op.lane[0]
        plans = self._left[device]
        while plans and not plans[0][0]:
            plans.popleft()
            self.level[device] -= 1


NAMED = 8  # jobs of a list that a message names


class JobLists(Jobs):
    """Waiting, serving and training jobs, in their order; each job is in one list or has left.

    Policies are shown these very lists, so only this class can write to them. `service` is told of
    each change; None where no scheduling goes by it.
    """

    def __init__(self, service: Service | None = None) -> None:
        self.service = service
        self.waiting: list[Job] = ReadOnlyList()
        self.serving: list[Job] = ReadOnlyList()
        self.training: list[Job] = ReadOnlyList()
        self.jobs: dict[int, Job] = {}  # all of them by number
        self._started: set[int] = set()  # jobs that are not waiting

    def __bool__(self) -> bool:
        """Whether a job is left."""
        return bool(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return chain(self.waiting, self.serving, self.training)

    def __str__(self) -> str:
        lists = (("waiting", self.waiting), ("serving", self.serving), ("training", self.training))
        return ", ".join(f"{name} {_some(jobs)}" for name, jobs in lists if jobs)

    @property
    def is_whole(self) -> bool:
        """Whether each job is in one of the lists: C code can write to a list past its class."""
        return len(self.waiting) + len(self.serving) + len(self.training) == len(self.jobs)

    def has_started(self, job: Job) -> bool:
        return job.job_id in self._started

    def wait(self, job: Job) -> None:
        """A job has arrived: it waits behind all other waiting jobs."""
        self.jobs[job.job_id] = job
        list.append(self.waiting, job)
        if self.service is not None:
            self.service.of(job).waits(job)

    def start(self, job: Job) -> None:
        """Moves a job from waiting into service or training."""
        self._started.add(job.job_id)
        list.remove(self.waiting, job)
        list.append(self.serving if job.training is None else self.training, job)
        if self.service is not None:
            self.service.of(job).begins(job)

    def wait_again(self, job: Job) -> None:
        """Moves a job from service back to the head of the waiting jobs, before it restarts."""
        if job in self.serving:
            list.remove(self.serving, job)
            list.insert(self.waiting, 0, job)
            self._started.discard(job.job_id)
            if self.service is not None:
                self.service.of(job).waits(job)

    def leave(self, job: Job) -> None:
        """Takes a job out of service or training."""
        del self.jobs[job.job_id]
        list.remove(self.serving if job.training is None else self.training, job)
        if self.service is not None:
            self.service.of(job).leaves(job)

    def refuse(self, job: Job) -> None:
        """Takes a job out of the list that it is in."""
        del self.jobs[job.job_id]
        for jobs in (self.waiting, self.serving, self.training):
            if job in jobs:
                list.remove(jobs, job)
        if self.service is not None:
            self.service.of(job).leaves(job)


def _some(jobs: list[Job]) -> str:
    """The first of them, for messages."""
    more = len(jobs) - NAMED
    named = str([job.job_id for job in jobs[:NAMED]])
    return f"{named} and {more} more" if more > 0 else named


class RoutedFleet:
    """The Fleet that a router is shown: requests by replica, as the router has decided.

    Args:
        size: how many replicas there are.
        router: decides for each request.
    """

    def __init__(self, size: int, router: Router) -> None:
        self.assigned: list[int] = ReadOnlyList([0] * size)
        self._router = router
        self._outstanding: list[dict[int, Job]] = [{} for _ in range(size)]
        self._chains = Chains()

    def __len__(self) -> int:
        return len(self.assigned)

    def outstanding(self, replica: int) -> int:
        """See Fleet."""
        return len(self._outstanding[replica])

    def outstanding_tokens(self, replica: int) -> int:
        """See Fleet."""
        return sum(job.known_tokens for job in self._outstanding[replica].values())

    def last_with(self, job: Job) -> int | None:
        """See Fleet."""
        return self._chains.last(_chain(job))

    def assign(self, job: Job) -> None:
        """Routes a job that has just arrived.

        Args:
            job: the job of the request.

        Raises:
            ValueError: the router names no replica.
            ContractError: the router writes to the job or the fleet.
        """
        name = type(self._router).__name__
        try:
            answer = self._router.route(job, self)
        except ContractError as error:
            raise error.located(name) from None
        except (TypeError, AttributeError) as error:
            if (write := as_write(error)) is None:
                raise
            raise write.located(name) from error
        replica = index(answer) if hasattr(answer, "__index__") else -1
        if not 0 <= replica < len(self):
            at = made_at(self._router, Rule.ANSWER)
            raise ValueError(
                f"router {name}{f' ({at})' if at else ''} sends request {job.job_id} to replica "
                f"{answer!r}, but there are {len(self)}: it must name one of 0 to {len(self) - 1}"
            )
        job._route(replica)
        list.__setitem__(self.assigned, replica, self.assigned[replica] + 1)
        self._outstanding[replica][job.job_id] = job
        self._chains.note(_chain(job), replica)

    def left(self, job: Job) -> None:
        """A job is answered or refused: it is outstanding no more.

        Args:
            job: a job that was assigned.
        """
        assert job.device is not None, f"job {job.job_id} was never routed"
        del self._outstanding[job.device][job.job_id]


def _chain(job: Job) -> Sequence[Hashable]:
    if job.prefix_ids or job.session is None:
        return job.prefix_ids
    return (("session", job.session),)


class Chains:
    """Chains of block names as a tree; each node has the replica that got it last."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}  # (parent, name) -> node
        self._last: list[int] = [-1]  # by node; the root is 0

    def last(self, chain: Sequence[Hashable]) -> int | None:
        """The replica that got the longest known beginning of a chain last.

        Args:
            chain: names of blocks, in order.

        Returns:
            Its number; None where no replica got the first block.
        """
        node = 0
        for name in chain:
            child = self._nodes.get((node, name))
            if child is None:
                break
            node = child
        return self._last[node] if node else None

    def note(self, chain: Sequence[Hashable], replica: int) -> None:
        """Notes that a replica gets a chain.

        Args:
            chain: names of blocks, in order.
            replica: the number of the replica.
        """
        node = 0
        for name in chain:
            node = self._nodes.setdefault((node, name), len(self._last))
            if node == len(self._last):
                self._last.append(replica)
            self._last[node] = replica


Turn = Generator[simpy.Event, Any, None]  # a part of the loop's process


@dataclass(slots=True, eq=False)
class EngineState:
    """The state of an engine, for its life; each part of the loop takes it, and callbacks."""

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
    fleet: RoutedFleet | None
    jobs: JobLists
    adapters: PublishedAdapters | None  # of requests; None for a run without any
    in_flight: InFlight
    profile: EngineProfile
    wakeup: Wakeup
    over: list[AdapterVersion]  # versions without a request, whose homes are held
    records: RecordBook

    @property
    def now_ns(self) -> int:
        return int(self.env.now)

    def give_all(self, owner: int, has_ended: bool = False) -> bool:
        """Gives back all memory of an owner; `has_ended`: no operation in flight will use it.

        Of a request that is recorded all memory stays, as does its version of an adapter, and
        False is returned. With a job that learns all records go that it could have learned from.
        """
        may_be_recorded = self.adapters is not None
        if may_be_recorded and self.records.holds(owner):
            return False
        for request in self.records.of_job(owner) if may_be_recorded else ():
            self._give_record(request)  # first, as a log tells it
        self._give(self.ledger.give_all(owner, has_ended))
        self._end_version(owner)
        return True

    def records_over(self, requests: Iterable[int]) -> None:
        """Records have been given back: versions of requests that are over are needed no more."""
        for request in requests:
            if request not in self.jobs.jobs:
                self._end_version(request)

    def _end_version(self, owner: int) -> None:
        """A job needs its version of an adapter no more."""
        if self.adapters is not None and (version := self.adapters.end(owner)) is not None:
            self.over.append(version)

    def _give(self, places: Iterable[Place]) -> None:
        """Places are given back: the store gives their memory back, too."""
        for place in places:
            if self.store is not None and place.region.kind is not Kind.KV:
                self.store.free(place)

    def _give_record(self, request: int) -> None:
        """Gives a record back, and the keys and values of a request that is over."""
        if request not in self.jobs.jobs:
            self._give(self.ledger.give_all(request))
            self.recorder.returned(request, 0)
            self._end_version(request)
            return
        kind = Kind.ACTIVATION
        places = [p for p in self.ledger.places_of.get(request, ()) if p.region.kind is kind]
        for place in places:
            self.ledger.give(place)
        self._give(places)

    def end_freed(self, plan: Plan) -> None:
        """Gives back the homes of versions whose last job a played-back plan frees.

        The plan is checked behind that: what it publishes needs their room.
        """
        ended, adapters = self.ledger.ended, self.adapters
        if adapters is None or not ended:
            return
        owners = {op.place.region.owner for op in plan.ops if isinstance(op, Free)}
        for owner in sorted(owners.intersection(ended)):
            if self.records.holds(owner):
                continue  # its record needs the version still
            if (version := adapters.end(owner)) is not None:
                self.over.append(version)
        self.retire()

    def retire(self) -> None:
        """Gives back the homes of versions that no request needs; copies are the policy's.

        A plan that is issued may copy from a home whose last request it refuses, or whose next
        version it publishes: homes go once its operations have started.
        """
        for version in self.over:
            for device in range(self.devices):
                home = version.home(device)
                if home in self.ledger.held_bytes:
                    self.ledger.give(home)
                    if self.store is not None:
                        self.store.free(home)
        self.over.clear()

    def release_idle(self) -> None:
        """Hands idle KV pages to the executor, which may return their memory to the system."""
        for pool, pages in self.ledger.drain_idle():
            self.executor.release(pool, pages)


class Lifecycle(ABC):
    """What the engine does where an operation has ended."""

    @abstractmethod
    def settle(self, span: Span) -> None:
        """An operation has ended: measurements and tokens arrive."""

    @abstractmethod
    def land(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """An operation of a device's plan of that number has ended; operations behind it go on."""

    @abstractmethod
    def finish(self, op: Op, end_ns: int, device: int, number: int) -> None:
        """The jobs that end with an operation finish."""

    @abstractmethod
    def give_back(self, device: int) -> None:
        """Gives back the memory of finished jobs that the device may be shown by now."""

    @abstractmethod
    def finish_job(self, job: Job, now_ns: int, device: int, number: int) -> None:
        """A job is complete with a device's plan of that number."""


class Issue(Protocol):
    """Books a plan, launches its operations and lets the host's time pass."""

    def __call__(self, plan: Plan, device: int, moves: Any = None) -> Turn: ...
