"""A policy in two halves: a scheduling says what to compute next, a memory policy makes it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.contract.plan import Plan, Slice
from engine.contract.policy import Memory, Scheduling
from engine.contract.regions import Tier
from engine.contract.rules import ContractError, Rule
from engine.contract.view import View
from engine.fast_forward.horizon import horizon as course

Stretch = Callable[[Plan, View, int], Plan]


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
