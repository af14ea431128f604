"""For how many steps the same slices are wanted again."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from engine.job import Job
from engine.plan import Compute, Grow, Plan, Slice, one_token
from engine.view import View

FOREVER = 1 << 30
_job = itemgetter(0)  # of a slice


class Course(NamedTuple):
    """For how many steps slices are wanted, and what the last of them become on the way."""

    steps: int
    later: tuple[tuple[int, tuple[Slice, ...]], ...] = ()


ONCE, ENDLESS = Course(1), Course(FOREVER)


class Said(NamedTuple):
    """An answer of `course`, of which plan and in which state, and how many of its slices are
    known decodes, and decodes at all."""

    plan: Plan
    view: View
    course: Course
    lead: int
    num_decodes: int


_said: Said | None = None  # the last one


def decodes_before_prompts(slices: Sequence[Slice], known: int) -> int:
    """How many slices are before the prompts at the end, if so many are known to be decodes."""
    count = len(slices)
    while count > known and slices[count - 1].job.is_prefilling:
        count -= 1
    return count


def last_said() -> Said | None:
    """The last answer of `course` but for ONCE."""
    return _said


def course(plan: Plan, view: View, appends: bool) -> Course:
    """For how many steps a plan holds if no job arrives, ends or comes in, and how it goes on.

    All in service must have a slice: single tokens, and behind them prompts, the last perhaps cut
    by the budget. Where the scheduling `appends` what it has begun last to its decodes, their rest
    follows, and then their decodes if no job waits for what the prompts leave of the budget.
    Anything else than growth and one launch is not repeated.
    """
    global _said
    _said = None
    if not plan.ops or plan.restart or plan.refuse or view.training:
        return ONCE
    *before, launch = plan.ops
    if not isinstance(launch, Compute) or {*map(type, before)} - {Grow}:
        return ONCE
    slices = launch.slices
    lead = view.lead(slices)
    num_decodes = decodes_before_prompts(slices, lead)
    prompts = list(map(_job, slices[num_decodes:]))
    is_new = [not job.computed_tokens for job in prompts]
    if len(slices) - sum(is_new) != len(view.serving):
        return ONCE
    if lead < num_decodes and any([s.job.is_prefilling for s in slices[lead:num_decodes]]):
        return ONCE
    found = _of_prompts(slices, num_decodes, prompts, view, appends) if prompts else ENDLESS
    _said = Said(plan, view, found, lead, num_decodes)
    return found


def _of_prompts(
    slices: Sequence[Slice], num_decodes: int, prompts: list[Job], view: View, appends: bool
) -> Course:
    """The course of decodes with prompts behind them."""
    queue = [*view.serving[num_decodes:], *view.waiting]
    if appends and queue[: len(prompts)] == prompts:
        return _through(slices, num_decodes, others_wait=len(queue) > len(prompts))
    last = slices[-1]
    cut = (last.job.remaining_tokens - 1) // last.tokens  # slices like this that leave a rest
    return Course(cut) if cut and len(prompts) == 1 else ONCE


def _through(slices: Sequence[Slice], num_decodes: int, others_wait: bool) -> Course:
    """The way of prompts into decodes: all but the last end now, the last may take more steps.

    If others wait, only while the last of them takes all that the budget leaves.
    """
    *ended, last = slices[num_decodes:]
    ones: tuple[Slice, ...] = ()
    tokens = last.tokens  # of the last one beside decodes
    for piece in ended:
        if piece.tokens < piece.job.remaining_tokens:
            return ONCE
        ones += (one_token(piece.job),)
        tokens += piece.tokens - 1
    job, left = last.job, last.job.remaining_tokens - last.tokens
    later: list[tuple[int, tuple[Slice, ...]]] = []
    step = 1
    if left:
        full = (left - 1) // tokens
        if full and tokens > last.tokens:
            later.append((step, (*ones, Slice(job, tokens))))
        step += full
        if others_wait:
            return Course(step, tuple(later))
        later.append((step, (*ones, Slice(job, left - full * tokens))))
        step += 1
    if others_wait:
        return ONCE
    return Course(FOREVER, (*later, (step, (*ones, one_token(job)))))
