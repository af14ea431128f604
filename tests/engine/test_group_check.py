"""Hostile exchanges of a data-parallel group: each is refused in one line, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.plan import (
    Collective,
    Copy,
    Grow,
    Pattern,
    Plan,
)
from engine.contract.regions import (
    Kind,
    gathered,
    gradient,
    unreduced,
    weight,
)
from engine.contract.rules import Rule
from engine.contract.view import View
from tests.engine.lying_training import (
    COPIES,
    DEVICE,
    GROUP,
    REUSING_GROUP,
    STAYING,
    B,
    F,
    Fault,
    Ops,
    U,
    World,
    at,
    before,
    behind,
    gathers,
    is_task,
    less,
    never,
    reduces,
    refused,
)


def changed(is_meant: Callable[[Any], bool], **fields: Any) -> Fault:
    """A collective with other fields."""

    def fault(plan: Plan, view: View) -> Ops | None:
        for i, op in enumerate(plan.ops):
            if is_meant(op):
                given = {"pattern": op.pattern, "reads": op.reads, "writes": op.writes}
                given |= {"nbytes": op.nbytes, "device": op.device, **fields}
                return [*plan.ops[:i], Collective(**given), *plan.ops[i + 1 :]]
        return None

    return fault


def last(is_meant: Callable[[Any], bool]) -> Fault:
    """Collectives at the end of their plans."""

    def fault(plan: Plan, view: View) -> Ops | None:
        rest, moved = [x for x in plan.ops if not is_meant(x)], [*filter(is_meant, plan.ops)]
        return [*rest, *moved] if [*rest, *moved] != [*plan.ops] else None

    return fault


def twice(is_meant: Callable[[Any], bool]) -> Fault:
    def fault(plan: Plan, view: View) -> Ops | None:
        for i, op in enumerate(plan.ops):
            if is_meant(op):
                again = Collective(op.pattern, op.reads, op.writes, op.nbytes, op.device)
                return [*plan.ops[: i + 1], again, *plan.ops[i + 1 :]]
        return None

    return fault


def first_gathers(plan: Plan, view: View) -> Ops | None:
    """Weights that stay are gathered before the new ones have come from the host."""
    found = sorted(plan.ops, key=lambda op: 0 if not _renews(op) else 1 if gathers(op) else 2)
    is_renewing = any(map(gathers, plan.ops)) and any(is_task(op, U, 4) for op in plan.ops)
    return found if is_renewing else None


def _renews(op: Any) -> bool:
    return gathers(op) or (isinstance(op, Copy) and op.src.region.kind is Kind.WEIGHT)


ALONE = Collective(Pattern.ALL_GATHER, (weight(0, 1),), (weight(0, 1),), 40)
EARLY = Collective(Pattern.REDUCE_SCATTER, (unreduced(0, 0),), (gradient(0, 0),), 40)
EXCHANGED: dict[str, tuple[World, Fault]] = {
    "fewer bytes gathered": (GROUP, changed(gathers, nbytes=4)),
    "fewer bytes reduced": (GROUP, changed(reduces, nbytes=4)),
    "another pattern": (GROUP, changed(reduces, pattern=Pattern.ALL_REDUCE)),
    "no pattern": (GROUP, changed(reduces, pattern="reduce")),
    "a gather that reduces": (GROUP, changed(gathers, pattern=Pattern.ALL_REDUCE)),
    "a reduction that gathers": (GROUP, changed(reduces, pattern=Pattern.ALL_GATHER)),
    "of another chunk": (GROUP, changed(gathers, reads=(weight(0, 3),))),
    "into the weights": (GROUP, changed(reduces, writes=(weight(0, 4),))),
    "of nothing": (GROUP, changed(reduces, reads=(), writes=())),
    "no reduction": (GROUP, never(reduces)),
    "no sum of copies": (COPIES, never(reduces)),
    "reduced twice": (GROUP, twice(reduces)),
    "summed twice": (COPIES, twice(reduces)),
    "reduced too early": (
        replace(GROUP, tied=True),
        at(B, 1, lambda op: (op, Grow(gradient(0, 0), 999), EARLY)),
    ),
    "summed behind its copy": (COPIES, last(reduces)),
    "reduced behind its gradients' end": (GROUP, last(reduces)),
    "old weights gathered": (STAYING, first_gathers),
    "too little room": (GROUP, less(gathered(0, 2))),
    "reused, no reduction": (REUSING_GROUP, never(reduces)),
    "reused, gathered over": (
        REUSING_GROUP,
        at(B, 2, behind(Collective(Pattern.ALL_GATHER, (weight(0, 2),), (gathered(0, 2),), 40))),
    ),
    "alone": (DEVICE, at(F, 1, before(ALONE))),
    "of a job that is none": (
        DEVICE,
        at(F, 1, before(Collective(Pattern.ALL_GATHER, (weight(7, 1),), (weight(7, 1),), 40))),
    ),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_a_collective_is_what_the_group_says_and_when(name: str) -> None:
    error = refused(*EXCHANGED[name])
    assert error.rule is Rule.EXCHANGE, error


def test_a_collective_runs_on_the_device_that_is_asked() -> None:
    assert refused(GROUP, changed(gathers, device=1)).rule is Rule.DEVICE


@pytest.mark.parametrize("tasks", [0, 4])
def test_a_plan_of_many_tasks_is_read_to_its_exchange(tasks: int) -> None:
    """What stands before the fault is not booked either."""
    world, fault = EXCHANGED["reduced twice"]
    refused(replace(world, tasks=tasks), fault)
