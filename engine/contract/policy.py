"""The policy contract: pure functions from a View to a Plan, usually in two halves; and routers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import index
from typing import Literal, Protocol

from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Collective, Compute, Grow, Plan, Slice
from engine.contract.regions import Place, Pool, Tier
from engine.contract.rules import ContractError, ReadOnlyList, as_write
from engine.contract.view import Cost, RunningDecodes, View
from models.training.shape import TrainingShape
from traces.serving.request import TrainingJob


@dataclass(frozen=True)
class Traits:
    """What a policy, or a half of one, promises beyond its answers.

    The defaults promise nothing: the engine then asks whenever an answer might be another. A
    promise that does not hold breaks law 15: results would depend on how often the engine asks.

    Of a scheduling:
        repeats          Until a job arrives, ends, is admitted or finds new room, the next batch
                         is the decodes of this one, in their order, and behind them the prompt
                         that the token budget has cut.
        appends          A prompt that is complete decodes behind all jobs admitted before it.
        step_tokens      The most tokens of a batch; 0 where there is no bound.
        trains_only      The batch never holds a request.
    Of a memory policy:
        kv_growth        How the KV of running jobs grows: `page` by page when the last one is full,
                         not at all within a job's `reserved` tokens, or `asked` for at each plan.
        spare_pages      Free pages without which a decode does not run.
        reserved_tokens  Tokens that a job's reservation holds, with `reserved`.
        swaps            A preempted job's KV may come back from the host.
        prefix_caching   Full pages are kept, and jobs start on those that hold their beginning.
        states_in        Tiers in which states of training may lie for good.
    Of both:
        recurs           Of times, durations and numbers of plans the policy knows nothing, and of
                         steps, microbatches and stamps only which are equal and which come first:
                         a step of training that begins as the one before is planned like it.
    """

    repeats: bool = False
    appends: bool = False
    step_tokens: int = 0
    trains_only: bool = False
    kv_growth: Literal["asked", "page", "reserved"] = "asked"
    spare_pages: int = 0
    reserved_tokens: int = 0
    swaps: bool = False
    prefix_caching: bool = False
    states_in: tuple[Tier, ...] = tuple(Tier)
    recurs: bool = False

    def with_memory(self, memory: Traits) -> Traits:
        """The traits of a scheduling and a memory policy together."""
        return replace(
            memory,
            repeats=self.repeats,
            appends=self.appends,
            step_tokens=self.step_tokens,
            trains_only=self.trains_only,
            recurs=self.recurs and memory.recurs,
        )

    def __str__(self) -> str:
        """The promises that differ from the defaults, for `tandem list`."""
        told = list[str]()
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                named = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
                told.append(field.name if value is True else f"{field.name}={named}")
        return ", ".join(told)


PROMISES_NOTHING = Traits()
RETIRED_TRAITS = {  # attributes of policies by which earlier versions looked abilities up
    "repeats": "repeats=True",
    "appends": "appends=True",
    "cuts": "step_tokens=self.token_budget",
    "trains_only": "trains_only=True",
    "recurs": "recurs=True",
    "states_in": "states_in=(...)",
    "stretch": 'kv_growth="page"',
}


def traits_of(policy: object) -> Traits:
    """The traits that a policy or half declares as `traits`; none promised where it does not.

    Raises:
        ValueError: `traits` is no Traits, or a promise is made by the name of an attribute.
    """
    name = type(policy).__name__
    for attribute, trait in RETIRED_TRAITS.items():
        if hasattr(policy, attribute):
            raise ValueError(
                f"{name}.{attribute} is read no more; declare `traits = Traits({trait})` "
                "(engine.contract.policy) instead"
            )
    traits = getattr(policy, "traits", PROMISES_NOTHING)
    if not isinstance(traits, Traits):
        raise ValueError(f"{name}.traits is {named(traits)}; it must be a Traits")
    return traits


class Policy(Protocol):
    """Pure: equal views give equal plans; touches no clock and changes nothing it is shown.

    May declare `traits: Traits`, as may its halves.
    """

    def plan(self, view: View) -> Plan: ...


class Scheduling(Protocol):
    """Says what to compute next."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        """Wanted slices, most wanted first."""


class PlanBuilder(Protocol):
    """The plan that a memory policy writes: each operation is tried on a dry run as it is added.

    The dry run counts free and coming bytes, so a launch may wait for bytes that come back. Adding
    what does not fit raises Shortage; nothing is booked until the engine has the whole plan.
    """

    def room(self, pool: Pool) -> int:
        """Bytes that are left behind the operations so far."""

    def held(self, place: Place) -> int:
        """Bytes at a place behind the operations so far; 0 where nothing is."""

    def holds(self, place: Place) -> bool:
        """Whether a place is there, be it of no bytes."""

    def found(self, job: Job) -> tuple[int, ...]:
        """Kept pages on which a job could start behind the operations so far (prefix caching)."""

    def idle(self, pages: Sequence[int]) -> int:
        """How many of these pages no job holds: sharing them takes room."""

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        """Starts a place on pages that are there; on none is no operation."""

    def grow(self, place: Place, nbytes: int) -> None:
        """Adds bytes to a place; none is no operation."""

    def grow_all(self, grows: Sequence[Grow]) -> None:
        """Adds bytes to places."""

    def grow_running(self, running: RunningDecodes) -> bool:
        """Adds the pages that running decodes need, if all find room; whether they did."""

    def free(self, place: Place) -> None:
        """Gives a place back."""

    def move(self, src: Place, dst: Place) -> None:
        """Copies a region whole and gives its source back."""

    def copy(self, src: Place, dst: Place) -> None:
        """Copies a region whole; the source stays."""

    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        """One launch of all slices. That its places are held is checked at booking."""

    def launch(self, op: Compute) -> None:
        """A launch as it is. That its places are held is checked at booking."""

    def exchange(self, op: Collective) -> None:
        """A device's part in an exchange of its group."""

    def restart(self, job: Job) -> None:
        """The tokens of a job will be computed again."""

    def refuse(self, job: Job) -> None:
        """A job will never fit."""

    def discard(self) -> None:
        """Empties the plan: nothing of it fits for now."""

    def within(self, room_bytes: Mapping[Pool, int]) -> PlanBuilder:
        """A builder of this plan for a policy that may take no more than these bytes of pools."""

    def __bool__(self) -> bool:
        """Whether the plan does anything so far."""


class Memory(Protocol):
    """Makes wanted work fit."""

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        """Writes a plan for as many slices as fit, in their order; none where none does.

        May take memory from less wanted jobs; admits no waiting job after a preemption.
        """


class Router(Protocol):
    """Says which of several replicas serves a request. Pure: equal fleets give equal answers."""

    def route(self, job: Job, fleet: Fleet) -> int:
        """The number of a replica. Asked once, at the arrival; nothing moves a request later."""


class Planner(Protocol):
    """Decides once, before the first step, where everything lies."""

    def prepare(
        self,
        shapes: Mapping[int, TrainingShape],
        jobs: Sequence[TrainingJob],
        capacity_bytes: Mapping[Pool, int],
        cost: Cost,
    ) -> Layout:
        """Lays the jobs out, whose models have these shapes (by job). ValueError where they cannot
        fit, in one line with the deficit and what would help."""


def name_of(policy: object) -> str:
    """A policy's name, for messages: those of its halves where it has two."""
    halves = [getattr(policy, half, None) for half in ("scheduling", "memory")]
    names = [type(half).__name__ for half in halves if half is not None]
    return " with ".join(names) or type(policy).__name__


class Fleet:
    """The replicas of a run as those who send requests see them. Only the engine changes it.

    A request is outstanding from its arrival until its last token has been delivered (or it was
    refused): a router learns of an end when the client does.
    """

    def __init__(self, size: int, router: Router) -> None:
        self.assigned: list[int] = ReadOnlyList([0] * size)  # requests so far, by replica
        self._router = router
        self._outstanding: list[dict[int, Job]] = [{} for _ in range(size)]
        self._chains = Chains()

    def __len__(self) -> int:
        return len(self.assigned)

    def outstanding(self, replica: int) -> int:
        """Requests that a replica has not answered yet."""
        return len(self._outstanding[replica])

    def outstanding_tokens(self, replica: int) -> int:
        """Their prompts and what was generated of them so far, as issued: what they need of KV."""
        return sum(job.known_tokens for job in self._outstanding[replica].values())

    def last_with(self, job: Job) -> int | None:
        """The replica that last got the longest chain of blocks that this prompt begins with.

        Token ids name a prompt's full pages, by the keys of the page cache. Where a prompt has
        neither names nor a full page of ids, the turns of its session count as one chain.
        None where no replica got any of it.
        """
        return self._chains.last(_chain(job))

    def assign(self, job: Job) -> None:
        """Routes a job that has just arrived. ValueError where the router names no replica."""
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
            raise ValueError(
                f"router {name} sends request {job.job_id} to replica {answer!r}, but there are "
                f"{len(self)}: it must name one of 0 to {len(self) - 1}"
            )
        job._route(replica)
        list.__setitem__(self.assigned, replica, self.assigned[replica] + 1)
        self._outstanding[replica][job.job_id] = job
        self._chains.note(_chain(job), replica)

    def left(self, job: Job) -> None:
        """A job was answered or refused."""
        assert job.device is not None, f"job {job.job_id} was never routed"
        del self._outstanding[job.device][job.job_id]


def _chain(job: Job) -> Sequence[Hashable]:
    if job.prefix_ids or job.session is None:
        return job.prefix_ids
    return (("session", job.session),)


class Chains:
    """Chains of block names as a tree; each node knows who got it last."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}  # (parent, name) -> node
        self._last: list[int] = [-1]  # by node; the root is 0

    def last(self, chain: Sequence[Hashable]) -> int | None:
        """Who got the longest known beginning of a chain last; None where not even one block."""
        node = 0
        for name in chain:
            child = self._nodes.get((node, name))
            if child is None:
                break
            node = child
        return self._last[node] if node else None

    def note(self, chain: Sequence[Hashable], who: int) -> None:
        """Somebody got a chain."""
        node = 0
        for name in chain:
            node = self._nodes.setdefault((node, name), len(self._last))
            if node == len(self._last):
                self._last.append(who)
            self._last[node] = who


def named(value: object) -> str:
    """What a value is, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"
