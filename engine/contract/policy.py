"""The policy contract: pure functions from a View to a Plan, usually in two halves; and routers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from operator import index
from typing import Protocol

from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Plan, Slice
from engine.contract.regions import Pool
from engine.contract.rules import ContractError, ReadOnlyList, as_write
from engine.contract.view import Cost, View
from models.training.shape import TrainingShape
from traces.serving.request import TrainingJob


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


class Policy(Protocol):
    """Pure: equal views give equal plans; touches no clock and changes nothing it is shown."""

    def plan(self, view: View) -> Plan: ...


class Scheduling(Protocol):
    """Says what to compute next.

    May declare `repeats = True`: while nobody arrives, ends, comes in or is given room, it wants
    all decodes again in the same order, and behind them the prompt that its budget has cut. With
    `appends = True` a prompt that is complete decodes behind all others that were admitted before.
    `cuts = True`: no step has more tokens than its `token_budget`, since it cuts prompts; memory
    on a GPU is then set aside for no more. `trains_only = True`: it never wants a request.
    """

    def batch(self, view: View) -> tuple[Slice, ...]:
        """Wanted slices, most wanted first."""


class Memory(Protocol):
    """Makes wanted work fit."""

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        """A plan for as many slices as fit, in their order.

        May take memory from less wanted jobs; admits no waiting job after a preemption. With
        `prefix_caching` set it may start jobs on pages that are kept (`Draft.share`). May also
        have `stretch(plan, view, count) -> Plan`: the plan for up to `count` steps (and with its
        `later` slices), with all that grows meanwhile, if it would decide the same at each of them.
        With `recurs = True`, as of a scheduling, it knows of times, durations and numbers of plans
        nothing, and of steps, microbatches and stamps only which are equal and which come first: a
        step that begins as those before, of a job that trains alone, is then planned like them.
        With `states_in = (Tier.HOST,)`, or the other, states that train need room there in the end,
        all of them, wherever a planner puts them; without it they may lie in either.
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
