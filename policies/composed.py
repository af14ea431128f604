"""A policy in two halves: a scheduling chooses the batch, a memory policy makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from inspect import signature
from types import FunctionType, NoneType
from typing import Any

from engine.contract.job import named
from engine.contract.plan import Plan, Slice
from engine.contract.policy import Memory, Scheduling, Traits, traits_of
from engine.contract.rules import ContractError, Rule, at_class, defined_at
from engine.contract.view import View
from engine.memory.dry_run import DryRunPlanBuilder

STILL = (int, float, str, bytes, tuple, frozenset, Enum, type, FunctionType, NoneType)


@dataclass(frozen=True)
class Composed:
    """A policy in two halves: what to compute next, and where it lies.

    Where no slice of the batch fits, the scheduling is asked once more for a view without waiting
    jobs: a prompt that finds no room must not keep running jobs from decoding (law 9).

    Args:
        scheduling: chooses the slices of a step and their order.
        memory: writes a plan for the slices that fit.
    """

    scheduling: Scheduling
    memory: Memory

    def __post_init__(self) -> None:
        """ValueError where a half lacks its method."""
        halves: tuple[tuple[object, str], ...] = (
            (self.scheduling, "batch(view)"),
            (self.memory, "fit(batch, view, plan)"),
        )
        for half, method in halves:
            if not callable(getattr(half, method.partition("(")[0], None)):
                told = f"{named(half)} has no {method}: give Composed(SCHEDULING, MEMORY)"
                raise ValueError(at_class(type(half), told))

    @property
    def notes_reads(self) -> bool:
        """The scheduling is shown a View that notes its reads.

        What the memory policy reads is not noted, so no state may pass from it to the scheduling.
        """
        return not _share_state(self.scheduling, self.memory)

    @property
    def traits(self) -> Traits:
        """What both halves promise."""
        return traits_of(self.scheduling).with_memory(traits_of(self.memory))

    def plan(self, view: View) -> Plan:
        plan = self._fitted(view)
        if not plan and view.waiting and view.serving:
            plan = self._fitted(replace(view, waiting=()))
        return plan

    def _fitted(self, view: View) -> Plan:
        """The plan that the memory half writes for the batch.

        Raises:
            ContractError: a half answers with something else than the contract says.
        """
        shown = view if view.reads is None else view.reads.shown(view)
        try:
            batch: Any = self.scheduling.batch(shown)
        except TypeError as error:
            if not _takes(self.scheduling.batch, 1):
                what = f"batch{signature(self.scheduling.batch)} takes no view: write batch(view)"
                raise _wrong_answer(what, self.scheduling.batch) from error
            raise
        if type(batch) is not tuple:
            if not isinstance(batch, Sequence) or isinstance(batch, str | bytes | Slice):
                what = f"batch returns {named(batch)}: a tuple or list of Slices is wanted"
                raise _wrong_answer(what, self.scheduling.batch)
            batch = tuple(batch)
        if view.reads is not None:
            batch = view.reads.slices(batch, self.scheduling)
        plan, fit = DryRunPlanBuilder(view), self.memory.fit
        try:
            answer: object = fit(batch, view, plan)
        except (AttributeError, TypeError) as error:
            if wrong := _no_slices(batch):
                what = f"batch returns {named(wrong[0])} among its Slices: only Slices belong there"
                raise _wrong_answer(what, self.scheduling.batch) from error
            if not _takes(fit, 3):
                what = f"fit{signature(fit)} takes no plan: fit(batch, view, plan) writes to one"
                raise _wrong_answer(what, fit) from error
            raise
        if answer is not None:
            what = f"fit returns {named(answer)}: it writes to the plan that it is given"
            raise _wrong_answer(what, fit)
        return plan.plan()


def _share_state(scheduling: object, memory: object) -> bool:
    """Whether the halves are one object, or one of them or both hold an object that may change."""
    one, other = ([half, *getattr(half, "__dict__", {}).values()] for half in (scheduling, memory))
    of_one = {id(value) for value in one if not isinstance(value, STILL)}
    return not of_one.isdisjoint(map(id, other))


def _wrong_answer(what: str, function: object) -> ContractError:
    """The error of a half whose function answers with what the contract does not know."""
    return ContractError(Rule.ANSWER, what, at=defined_at(function))


def _no_slices(batch: Sequence[object]) -> list[object]:
    return [item for item in batch if not isinstance(item, Slice)]


def _takes(method: Callable[..., object], count: int) -> bool:
    """Whether a method takes so many arguments by position."""
    try:
        signature(method).bind(*[None] * count)
    except TypeError:
        return False
    return True
