"""The policy contract: pure functions from a View to a Plan, usually in two halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.contract import ContractError, Rule
from engine.course import course
from engine.fleet import Fleet
from engine.job import Job
from engine.layout import Layout
from engine.plan import Plan, Pool, Slice, Tier
from engine.training_shape import TrainingShape
from engine.view import Cost, View
from traces.request import TrainingJob

Stretch = Callable[[Plan, View, int], Plan]


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


def _named(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Composed:
    """A policy in two halves.

    Where no wanted slice fits, it is asked once more as if nobody waited: a prompt that finds no
    room must not keep running jobs from decoding (law 9). Where both halves allow it, one answer
    holds for many steps.
    """

    scheduling: Scheduling
    memory: Memory

    @property
    def prefix_caching(self) -> bool:
        """Whether the memory half shares pages that are kept: then the engine keeps them."""
        return bool(getattr(self.memory, "prefix_caching", False))

    @property
    def states_in(self) -> tuple[Tier, ...]:
        """The tiers in which states that train may lie for good: see Memory."""
        return getattr(self.memory, "states_in", tuple(Tier))

    @property
    def recurs(self) -> bool:
        """Whether equal beginnings of steps are planned alike: see Memory."""
        return all(getattr(half, "recurs", False) for half in (self.scheduling, self.memory))

    def plan(self, view: View) -> Plan:
        plan = self._fitted(view)
        if not plan and view.waiting and view.serving:
            plan = self._fitted(replace(view, waiting=()))
        return self._stretched(plan, view)

    def _fitted(self, view: View) -> Plan:
        """What the memory half makes of the batch. ContractError where that is none."""
        batch = self.scheduling.batch(view)
        if type(batch) is not tuple and not isinstance(batch, list):
            raise ContractError(Rule.ANSWER, f"batch returns {_named(batch)}: a tuple of Slices")
        try:
            plan = self.memory.fit(batch, view)
        except (AttributeError, TypeError) as error:
            if wrong := [item for item in batch if not isinstance(item, Slice)]:
                what = f"batch returns a tuple with {_named(wrong[0])}: only Slices belong in it"
                raise ContractError(Rule.ANSWER, what) from error
            raise
        if not isinstance(plan, Plan):
            raise ContractError(Rule.ANSWER, f"fit returns {_named(plan)}: a Plan is wanted")
        return plan

    def _stretched(self, plan: Plan, view: View) -> Plan:
        stretch: Stretch | None = getattr(self.memory, "stretch", None)
        if (
            stretch is None
            or plan.wake_ns is not None
            or not getattr(self.scheduling, "repeats", False)
        ):
            return plan
        steps, later = course(plan, view, getattr(self.scheduling, "appends", False))
        if steps < 2:
            return plan
        return stretch(Plan(plan.ops, later=later) if later else plan, view, steps)
