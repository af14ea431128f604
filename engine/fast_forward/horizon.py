"""For how many steps a plan holds, and how its pages grow meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.plan import Compute, Grow, GrowCycle, Plan, Slice, one_token
from engine.contract.regions import PageSize, Tier
from engine.contract.view import View

FOREVER = 1 << 30
_job = itemgetter(0)  # of a slice


class Horizon(NamedTuple):
    """For how many steps slices are wanted, and what the last of them become on the way."""

    steps: int
    later: tuple[tuple[int, tuple[Slice, ...]], ...] = ()


ONCE, ENDLESS = Horizon(1), Horizon(FOREVER)


class SaidHorizon(NamedTuple):
    """An answer of `horizon`, of which plan and in which state, and how many of its slices are
    known decodes, and decodes at all."""

    plan: Plan
    view: View
    horizon: Horizon
    lead: int
    num_decodes: int


_said: SaidHorizon | None = None  # the last one


def decodes_before_prompts(slices: Sequence[Slice], known: int) -> int:
    """How many slices are before the prompts at the end, if so many are known to be decodes."""
    count = len(slices)
    while count > known and slices[count - 1].job.is_prefilling:
        count -= 1
    return count


def last_said() -> SaidHorizon | None:
    """The last answer of `horizon` but for ONCE."""
    return _said


def horizon(plan: Plan, view: View, appends: bool) -> Horizon:
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
    _said = SaidHorizon(plan, view, found, lead, num_decodes)
    return found


def _of_prompts(
    slices: Sequence[Slice], num_decodes: int, prompts: list[Job], view: View, appends: bool
) -> Horizon:
    """The horizon of decodes with prompts behind them."""
    queue = [*view.serving[num_decodes:], *view.waiting]
    if appends and queue[: len(prompts)] == prompts:
        return _through(slices, num_decodes, others_wait=len(queue) > len(prompts))
    last = slices[-1]
    cut = (last.job.remaining_tokens - 1) // last.tokens  # slices like this that leave a rest
    return Horizon(cut) if cut and len(prompts) == 1 else ONCE


def _through(slices: Sequence[Slice], num_decodes: int, others_wait: bool) -> Horizon:
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
            return Horizon(step, tuple(later))
        later.append((step, (*ones, Slice(job, left - full * tokens))))
        step += 1
    if others_wait:
        return ONCE
    return Horizon(FOREVER, (*later, (step, (*ones, one_token(job)))))


_made: tuple[Plan, Plan, View] | None = None  # the last repeated plan, of which one, and when


def stretched(plan: Plan, view: View, count: int, spare_pages: int) -> Plan:
    """A plan of decodes, perhaps with prompts behind them, for up to `count` steps.

    It ends when pages run out: perhaps early where there are prompts, never late. `spare_pages`
    stay free, as a decode wants to find them.
    """
    global _made
    launch, page, said = plan.ops[-1], view.page, last_said()
    assert isinstance(launch, Compute)
    if said is not None and (said.plan.ops is not plan.ops or said.view is not view):
        said = None
    if said is not None:
        lead, num_decodes = said.lead, said.num_decodes
    else:
        lead = view.lead(launch.slices)
        num_decodes = decodes_before_prompts(launch.slices, lead)
    grown: dict[int, int] = {}
    grows: list[Grow | GrowCycle]
    if view.decodes is not None and 0 < lead == num_decodes:
        due = view.decodes.growth.by_step[0]
        grows = [view.decodes.growth]
        _add(grown, plan.ops[len(due) : -1] if plan.ops[: len(due)] == due else plan.ops)
    else:
        _add(grown, plan.ops)
        grows = _of_decodes(launch, num_decodes, view, grown)
    for i in range(num_decodes, len(launch.slices)):
        grows += _of_prompt(plan, i, view, count, grown)
    free = view.room((Tier.GPU, view.device)) // page.nbytes - spare_pages
    steps = min(count, _steps(grows, free, page))
    if steps < 2:
        return replace(plan, later=())
    made = Plan((*grows, launch), repeats=steps, later=plan.later)
    is_said = said is not None and plan.later is said.horizon.later and count <= said.horizon.steps
    _made = (made, said.plan, view) if said is not None and is_said else None
    return made


def _add(grown: dict[int, int], ops: Sequence[object]) -> None:
    """What operations take, by owner."""
    for op in ops:
        if isinstance(op, Grow):
            owner = op.place.region.owner
            grown[owner] = grown.get(owner, 0) + op.nbytes


def base_of(plan: Plan, view: View) -> Plan | None:
    """The plan of one step that `stretched` has made a repeated one of, in this state.

    If that keeps the rules, so does the repeated one. None where it was made otherwise.
    """
    global _made
    made, _made = _made, None  # the state that it was made in is not kept longer
    if made is None or made[0] is not plan or made[2] is not view:
        return None
    return made[1]


def _steps(grows: Sequence[Grow | GrowCycle], free: int, page: PageSize) -> int:
    """For how many steps there are pages: what grows once counts from the first one on."""
    turns = [0] * page.tokens
    for op in grows:
        if isinstance(op, GrowCycle):
            turns = list(map(len, op.by_step))  # comes first
        elif op.every:
            turns[op.first % page.tokens] += 1
        else:
            free -= op.nbytes // page.nbytes
    if free < 0 or not any(turns):
        return 0 if free < 0 else FOREVER
    rounds, left = divmod(free, sum(turns))
    return page.tokens * rounds + bisect_right([*accumulate(turns)], left)


def has_prompt(plan: Plan) -> bool:
    """Whether a plan of one launch computes tokens of a prompt."""
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    for piece in reversed(launch.slices):  # most likely the last one does
        job = piece.job
        if job.computed_tokens < job.prompt_tokens:
            return True
    return False


def _of_decodes(
    launch: Compute, num_decodes: int, view: View, grown: Collection[int]
) -> list[Grow | GrowCycle]:
    """The growth of decodes, a page each in turn; one by one if somebody holds pages to spare."""
    page, held = view.page, view.held_bytes
    grows: list[Grow] = []
    for piece, place in zip(launch.slices[:num_decodes], launch.writes, strict=False):
        job, first = piece.job, 0
        if job.job_id not in grown:
            first = held[place] // page.nbytes * page.tokens - job.computed_tokens
        grows.append(Grow(place, page.nbytes, first, page.tokens))
    if any([op.first >= page.tokens for op in grows]):
        return [*grows]
    turns: list[list[Grow]] = [[] for _ in range(page.tokens)]
    for op in grows:
        turns[op.first].append(op)
    return [GrowCycle(tuple(map(tuple, turns)))]


def _of_prompt(plan: Plan, i: int, view: View, count: int, grown: Mapping[int, int]) -> list[Grow]:
    """The growth of one prompt's slices, step by step, since slices need not end where pages end;
    and of the decodes behind them."""
    launch, page = plan.ops[-1], view.page
    assert isinstance(launch, Compute)
    piece, place = launch.slices[i], launch.writes[i]
    job, known = piece.job, piece.job.known_tokens
    first = grown.get(job.job_id, 0)
    grows, held = [Grow(place, first)] if first else [], view.held_bytes.get(place, 0) + first
    done, step = job.computed_tokens + piece.tokens, 1
    if plan.later and done < known and held >= page.bytes_for(known):
        if count < FOREVER:  # its prompt grows no more, and does not end in this plan
            return grows
        done, step = known, plan.later[-1][0]
    while done < known and step < count:
        done = min(known, done + plan.slices_at(step)[i].tokens)
        need = page.bytes_for(done) - held
        if need > 0:
            grows.append(Grow(place, need, step))
            held += need
        step += 1
    if done == known and (plan.later or step < count):  # a prompt of one token looks like a decode
        reach = held // page.nbytes * page.tokens - known
        grows.append(Grow(place, page.nbytes, step + reach, page.tokens))
    return grows
