"""For how many steps a plan holds, and how its pages grow meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import NamedTuple

from engine.contract.plan import Compute, Grow, Plan, Slice, one_token
from engine.contract.policy import Traits
from engine.contract.regions import PageSize, Tier
from engine.contract.view import View
from engine.fast_forward.decode_batch import GrowCycle
from engine.fast_forward.repeated_plan import (
    Later,
    Part,
    RepeatedPlan,
    StretchedPlan,
    TimedGrow,
    part_at,
    parts_of,
)

FOREVER = 1 << 30
MANY_ROUNDS = 64  # after so many pages for each job it does not matter at which step none is left
_job = itemgetter(0)  # of a slice
_computed = attrgetter("computed_tokens")


class Horizon(NamedTuple):
    """For how many steps the slices of a plan hold, and what its last slices become.

    The first `lead` slices are running decodes, the first `num_decodes` are decodes. The prompts
    behind them are `in_turn` where the scheduling appends and they are first of those to come.
    """

    steps: int
    later: Later = ()
    lead: int = 0
    num_decodes: int = 0
    in_turn: bool = False


ONCE = Horizon(1)


def horizon(plan: Plan, view: View, appends: bool) -> Horizon:
    """For how many steps a plan holds if no job arrives, ends or is admitted, and how it goes on.

    All jobs in service must have a slice: single tokens, and behind them prompts, the last perhaps
    cut by the budget. Where the scheduling `appends` a prompt that is complete to its decodes, the
    rest of the prompts follows, and then their decodes if no job waits for what the prompts leave
    of the budget. A plan of anything but growth and one launch holds once.
    """
    if not plan.ops or plan.restart or plan.refuse or plan.relaid:
        return ONCE
    if (view.training or view.layout.training) and _trains(view):
        return ONCE
    *before, launch = plan.ops
    if not isinstance(launch, Compute) or {*map(type, before)} - {Grow}:
        return ONCE
    slices = launch.slices
    running = view.leading_decodes(slices)
    lead = 0 if running is None else len(running.slices)
    num_decodes = _decodes_before_prompts(slices, lead)
    prompts = list(map(_job, slices[num_decodes:]))
    begun = sum(map(bool, map(_computed, prompts)))
    if num_decodes + begun != len(view.serving):
        return ONCE
    if lead < num_decodes and any([s.job.is_prefilling for s in slices[lead:num_decodes]]):
        return ONCE
    if not prompts:
        return Horizon(FOREVER, (), lead, num_decodes)
    queue = [*view.serving[num_decodes:], *view.waiting]
    if appends and queue[: len(prompts)] == prompts:
        steps, later = _through(slices, num_decodes, others_wait=len(queue) > len(prompts))
        return Horizon(steps, later, lead, num_decodes, in_turn=True)
    return Horizon(_of_one_prompt(slices[-1], len(prompts)), (), lead, num_decodes)


def _trains(view: View) -> bool:
    """Whether a training job has work, so that the next plan may be another one."""
    found = [job.training for job in (*view.training, *view.waiting)]
    return any([training is not None and training.has_work for training in found])


def _decodes_before_prompts(slices: Sequence[Slice], known: int) -> int:
    """How many slices precede the prompts at the end; the first `known` ones are decodes."""
    count = len(slices)
    while count > known and slices[count - 1].job.is_prefilling:
        count -= 1
    return count


def _of_one_prompt(last: Slice, num_prompts: int) -> int:
    """Steps of decodes with a prompt behind them that is cut alike; 1 of several prompts."""
    if last.record or num_prompts > 1:
        return 1
    return max(1, (last.job.remaining_tokens - 1) // last.tokens)  # they leave a rest


def _through(slices: Sequence[Slice], num_decodes: int, others_wait: bool) -> tuple[int, Later]:
    """How prompts become decodes: all but the last end now, the last may take more steps.

    Where jobs wait, the plan holds only while the last prompt takes all that the budget leaves.
    """
    *ended, last = slices[num_decodes:]
    ones: tuple[Slice, ...] = ()
    tokens = last.tokens  # of the last one beside decodes
    for piece in ended:
        if piece.record or piece.tokens < piece.job.remaining_tokens:
            return 1, ()
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
            return step, tuple(later)
        later.append((step, (*ones, Slice(job, left - full * tokens))))
        step += 1
    if others_wait:
        return 1, ()
    return FOREVER, (*later, (step, (*ones, one_token(job))))


def stretched(
    plan: Plan, view: View, found: Horizon, traits: Traits, cycle: GrowCycle | None
) -> StretchedPlan | None:
    """A plan for as many steps as it holds and its KV has room; None where that is one.

    `cycle` is the growth of the running decodes. With paged KV a plan ends when pages run out; with
    prompts it may end before that, never after. `traits.spare_pages` stay free, without which a
    decode does not run. With reservations nothing grows until a job outgrows its own.
    """
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    if traits.kv_growth == "reserved":
        longest = max([piece.job.known_tokens for piece in launch.slices])
        steps = min(found.steps, traits.reserved_tokens - longest + 1)
        grows = [TimedGrow(op.place, op.nbytes) for op in plan.ops if isinstance(op, Grow)]
        return StretchedPlan(plan, launch, tuple(grows), None, steps, found.later)
    page = view.page
    grown: dict[int, int] = {}
    timed = list[TimedGrow]()
    if cycle is not None and view.running is not None and 0 < found.lead == found.num_decodes:
        due = view.running.full
        _add(grown, plan.ops[len(due) : -1] if plan.ops[: len(due)] == due else plan.ops)
    else:
        _add(grown, plan.ops)
        cycle, timed = _of_decodes(launch, found.num_decodes, view, grown)
    num_decodes = found.num_decodes
    for i in range(num_decodes, len(launch.slices)):
        timed += _of_prompt(launch, i, view, found, grown)
    free = view.room((Tier.GPU, view.device)) // page.nbytes - traits.spare_pages
    steps = min(found.steps, _steps(cycle, timed, free, page))
    if steps < 2:
        return None
    return StretchedPlan(plan, launch, tuple(timed), cycle, steps, found.later)


def _add(grown: dict[int, int], ops: Sequence[object]) -> None:
    """Adds the bytes that operations take to `grown`, by owner."""
    for op in ops:
        if isinstance(op, Grow):
            owner = op.place.region.owner
            grown[owner] = grown.get(owner, 0) + op.nbytes


def _steps(cycle: GrowCycle | None, grows: Sequence[TimedGrow], free: int, page: PageSize) -> int:
    """For how many steps `free` pages suffice. Growth that comes once counts from the start."""
    again: list[int] = []
    once = 0
    for _, nbytes, first, every in grows:
        if every:
            again.append(first)
        else:
            once += nbytes
    free -= once // page.nbytes
    each = len(again) + (0 if cycle is None else cycle.pages)  # in as many steps as fill a page
    if free < 0 or not each:
        return 0 if free < 0 else FOREVER
    rounds, left = divmod(free, each)
    if rounds >= MANY_ROUNDS:
        return page.tokens * rounds
    turns = [0] * page.tokens if cycle is None else list(map(len, cycle.by_step))
    for first in again:
        turns[first % page.tokens] += 1
    return page.tokens * rounds + bisect_right([*accumulate(turns)], left)


def has_prompt(plan: Plan) -> bool:
    """Whether a plan of one launch computes tokens of a prompt."""
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    for piece in reversed(launch.slices):  # prompts are behind the decodes
        job = piece.job
        if job.computed_tokens < job.prompt_tokens:
            return True
    return False


def _of_decodes(
    launch: Compute, num_decodes: int, view: View, grown: Collection[int]
) -> tuple[GrowCycle | None, list[TimedGrow]]:
    """The growth of decodes, a page each in turn; one by one if a job holds pages to spare."""
    page, held = view.page, view.held_bytes
    grows: list[TimedGrow] = []
    for piece, place in zip(launch.slices[:num_decodes], launch.writes, strict=False):
        job, first = piece.job, 0
        if job.job_id not in grown:
            first = held[place] // page.nbytes * page.tokens - job.computed_tokens
        grows.append(TimedGrow(place, page.nbytes, first, page.tokens))
    if any([op.first >= page.tokens for op in grows]):
        return None, grows
    turns: list[list[Grow]] = [[] for _ in range(page.tokens)]
    for op in grows:
        turns[op.first].append(Grow(op.place, op.nbytes))
    return GrowCycle(tuple(map(tuple, turns)), num_decodes), []


def _of_prompt(
    launch: Compute,
    i: int,
    view: View,
    found: Horizon,
    grown: Mapping[int, int],
) -> list[TimedGrow]:
    """The growth of one prompt's slices and of the decode behind them.

    It is found step by step: slices need not end where pages end.
    """
    page, count, later = view.page, found.steps, found.later
    piece, place = launch.slices[i], launch.writes[i]
    job, known = piece.job, piece.job.known_tokens
    first = grown.get(job.job_id, 0)
    grows, held = [TimedGrow(place, first)] if first else [], view.held_bytes.get(place, 0) + first
    done, step = job.computed_tokens + piece.tokens, 1
    if later and done < known and held >= page.bytes_for(known):
        if count < FOREVER:  # its prompt grows no more, and does not end in this plan
            return grows
        done, step = known, later[-1][0]
    if done < known and step < count:
        parts = parts_of(launch.slices[found.num_decodes :], later, count)
    while done < known and step < count:
        done = min(known, done + part_at(parts, step)[0][i - found.num_decodes].tokens)
        need = page.bytes_for(done) - held
        if need > 0:
            grows.append(TimedGrow(place, need, step))
            held += need
        step += 1
    if done == known and (later or step < count):  # a prompt of one token looks like a decode
        reach = held // page.nbytes * page.tokens - known
        grows.append(TimedGrow(place, page.nbytes, step + reach, page.tokens))
    return grows


def cut_anew(repeat: RepeatedPlan, held_pages: int, free: int, others_wait: bool) -> bool:
    """The last prompt of a plan takes what jobs that have ended leave of the budget.

    Args:
        repeat: the plan, without these jobs; until now its steps took the whole budget.
        held_pages: KV pages of the prompt.
        free: pages that the plan may take.
        others_wait: whether jobs wait: then it holds while the prompt takes all that is left.

    Returns:
        Whether the plan goes on.
    """
    job, place, page, now = repeat.tail[-1], repeat.places[-1], repeat.decodes.page, repeat.done
    cycle = repeat.decodes.cycle()
    if not (repeat.has_cycle and job.is_prefilling) or cycle is None:
        return False
    ones = tuple(map(one_token, repeat.tail[:-1]))
    tokens, left = repeat.budget - len(repeat.decodes.ids) - len(ones), job.remaining_tokens
    full = (left - 1) // tokens
    end = now + full  # the step with which the prompt is complete
    grows, done, known, held = list[TimedGrow](), job.computed_tokens, job.known_tokens, held_pages
    for step in range(now, end + 1):
        done = min(known, done + tokens)
        if (need := page.count(done) - held) > 0:
            grows.append(TimedGrow(place, need * page.nbytes, step))
            held += need
    grows.append(TimedGrow(place, page.nbytes, end + 1 + held * page.tokens - known, page.tokens))
    growth = repeat.growth.with_last(job.job_id, grows)
    steps = now + _steps(cycle, growth.behind(now), free, page)
    if others_wait:
        steps = min(steps, end)
    if steps <= now:
        return False
    rest = Slice(job, left - full * tokens)
    parts: list[Part] = [((*ones, rest), end + 1), ((*ones, one_token(job)), steps)]
    if full:
        parts.insert(0, ((*ones, Slice(job, tokens)), end))
    repeat.go_on(parts, steps, end, growth)
    return True
