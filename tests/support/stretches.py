"""A decided plan, stretched as fast-forward does, and read step by step."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.plan import Compute, Grow, Plan, Slice
from engine.contract.view import View
from engine.fast_forward.decode_batch import DecodeBatch, GrowCycle
from engine.fast_forward.horizon import horizon, stretched
from engine.fast_forward.repeated_plan import RepeatedPlan, StretchedPlan, TimedGrow, part_at
from policies.composed import Composed


def stretch(policy: Composed, view: View) -> StretchedPlan:
    """A policy's plan for as many steps as it holds."""
    return stretched_plan(policy, policy.plan(view), view, None)


def stretched_plan(
    policy: Composed, plan: Plan, view: View, cycle: GrowCycle | None
) -> StretchedPlan:
    """A plan of a policy for as many steps as it holds: one where it holds for no more."""
    found, traits = horizon(plan, view, policy.traits.appends), policy.traits
    made = stretched(plan, view, found, traits, cycle) if found.steps > 1 else None
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    return made or StretchedPlan.once(plan, launch)


def slices_at(made: StretchedPlan, step: int) -> tuple[Slice, ...]:
    """The slices of a step."""
    last = next((tail for first, tail in reversed(made.later) if first <= step), ())
    slices = made.launch.slices
    return (*slices[: len(slices) - len(last)], *last)


def grows_at(made: StretchedPlan, step: int) -> list[Grow]:
    """What grows at a step, in the order of booking."""
    cycle = () if made.cycle is None else made.cycle.by_step[step % len(made.cycle.by_step)]
    return [*cycle, *[Grow(op.place, op.nbytes) for op in made.grows if is_due(op, step)]]


def is_due(op: TimedGrow, step: int) -> bool:
    """Whether a place grows at a step."""
    since = step - op.first
    return not since or (since > 0 and op.every > 0 and not since % op.every)


def tokens_of(made: StretchedPlan, count: int) -> list[list[tuple[int, int]]]:
    """Jobs and their tokens at each of the first steps."""
    return [
        [(piece.job.job_id, piece.tokens) for piece in slices_at(made, step)]
        for step in range(count)
    ]


def changes_of(made: StretchedPlan, view: View, steps: Sequence[int]) -> list[int]:
    """For each step the one at which slices become others, as the engine reads the plan."""
    repeat = RepeatedPlan(made, DecodeBatch(view.page))
    assert all(part_at(repeat.parts, step)[0] == slices_at(made, step) for step in steps)
    return [part_at(repeat.parts, step)[1] for step in steps]
