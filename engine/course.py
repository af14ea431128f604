"""For how many steps the same slices are wanted again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.plan import Compute, Grow, Plan, Slice, one_token
from engine.view import View

FOREVER = 1 << 30


class Course(NamedTuple):
    """For how many steps slices are wanted, and what the last of them become on the way."""

    steps: int
    later: tuple[tuple[int, tuple[Slice, ...]], ...] = ()


ONCE = Course(1)


def course(plan: Plan, view: View, appends: bool) -> Course:
    """How a plan goes on if nobody arrives, ends or comes in.

    All in service must have a slice: single tokens, and behind them prompts, the last perhaps cut
    by the budget. Where the scheduling `appends` what it has begun last to its decodes, their rest
    follows, and then their decodes if nobody waits for what the prompts leave of the budget.
    Anything else than growth and one launch is not repeated.
    """
    if not plan.ops or plan.restart or plan.refuse or view.training:
        return ONCE
    *before, launch = plan.ops
    if not isinstance(launch, Compute) or not all([type(op) is Grow for op in before]):
        return ONCE
    slices = launch.slices
    num_decodes = len(slices)
    while num_decodes and slices[num_decodes - 1].job.is_prefilling:
        num_decodes -= 1
    prompts = [piece.job for piece in slices[num_decodes:]]
    is_new = [not job.computed_tokens for job in prompts]
    if len(slices) - sum(is_new) != len(view.serving):
        return ONCE
    if any([piece.job.is_prefilling for piece in slices[view.lead(slices) : num_decodes]]):
        return ONCE
    if not prompts:
        return Course(FOREVER)
    queue = [*view.serving[num_decodes:], *view.waiting]
    if appends and queue[: len(prompts)] == prompts:
        return _through(slices, num_decodes, somebody_waits=len(queue) > len(prompts))
    last = slices[-1]
    cut = (last.job.remaining_tokens - 1) // last.tokens  # slices like this that leave a rest
    return Course(cut) if cut and len(prompts) == 1 else ONCE


def _through(slices: Sequence[Slice], num_decodes: int, somebody_waits: bool) -> Course:
    """The way of prompts into decodes: all but the last end now, the last may take more steps.

    If somebody waits, only while the last of them takes all that the budget leaves.
    """
    *ended, last = slices[num_decodes:]
    if any([piece.tokens < piece.job.remaining_tokens for piece in ended]):
        return ONCE
    ones = tuple([one_token(piece.job) for piece in ended])
    job, left = last.job, last.job.remaining_tokens - last.tokens
    later: list[tuple[int, tuple[Slice, ...]]] = []
    step = 1
    if left:
        tokens = last.tokens + sum([piece.tokens - 1 for piece in ended])  # beside decodes
        full = (left - 1) // tokens
        if full and tokens > last.tokens:
            later.append((step, (*ones, Slice(job, tokens))))
        step += full
        if somebody_waits:
            return Course(step, tuple(later))
        later.append((step, (*ones, Slice(job, left - full * tokens))))
        step += 1
    if somebody_waits:
        return ONCE
    return Course(FOREVER, (*later, (step, (*ones, one_token(job)))))
