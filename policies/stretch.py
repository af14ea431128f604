"""How the pages of a repeated plan grow, and for how many steps they are sure to be there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.plan import Compute, Grow, Plan, Tier
from engine.view import View


def stretched(plan: Plan, view: View, count: int, spare_pages: int) -> Plan:
    """A plan of decodes, perhaps with prompts behind them, for up to `count` steps.

    In as many steps as a page has tokens, each decode takes one page at most: the bound may end a
    run early, never late. `spare_pages` stay free, as a decode wants to find them.
    """
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    page_tokens, page_nbytes = view.page
    grown = {op.place.region.owner: op.nbytes for op in plan.ops if isinstance(op, Grow)}
    free = view.room((Tier.GPU, view.device)) // page_nbytes - spare_pages
    num_decodes = len(launch.slices)
    while num_decodes and launch.slices[num_decodes - 1].job.is_prefilling:
        num_decodes -= 1
    prompts = list[Grow]()
    for i in range(num_decodes, len(launch.slices)):
        prompts += _of_prompt(plan, i, view, count, grown)
    free -= sum(op.nbytes for op in prompts if not op.every) // page_nbytes
    growing = len(launch.slices) if plan.later else num_decodes
    count = min(count, page_tokens * (free // growing) if growing else count)
    if count < 2 or free < 0:
        return replace(plan, later=())
    grows, held = [], view.held_bytes
    for piece, place in zip(launch.slices[:num_decodes], launch.writes, strict=False):
        job, first = piece.job, 0
        if job.job_id not in grown:
            first = held[place] // page_nbytes * page_tokens - job.computed_tokens
        if first < count:
            grows.append(Grow(place, page_nbytes, first, page_tokens))
    later = tuple(entry for entry in plan.later if entry[0] < count)
    grows += [op for op in prompts if op.first < count]
    return Plan((*grows, launch), repeats=count, later=later)


def has_prompt(plan: Plan) -> bool:
    """Whether a plan of one launch computes tokens of a prompt."""
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    jobs = (piece.job for piece in launch.slices)
    return any(job.computed_tokens < job.prompt_tokens for job in jobs)


def _of_prompt(plan: Plan, i: int, view: View, count: int, grown: Mapping[int, int]) -> list[Grow]:
    """The growth of one prompt's slices, step by step, since slices need not end where pages end;
    and of the decodes behind them."""
    launch, page = plan.ops[-1], view.page
    assert isinstance(launch, Compute)
    (job, tokens, *_), place = launch.slices[i], launch.writes[i]
    first = grown.get(job.job_id, 0)
    grows, held = [Grow(place, first)] if first else [], view.held_bytes.get(place, 0) + first
    done, step = job.computed_tokens + tokens, 1
    while done < job.known_tokens and step < count:
        done = min(job.known_tokens, done + plan.launch(step).slices[i].tokens)
        need = page.bytes_for(done) - held
        if need > 0:
            grows.append(Grow(place, need, step))
            held += need
        step += 1
    if plan.later:
        reach = held // page.nbytes * page.tokens - job.known_tokens
        grows.append(Grow(place, page.nbytes, step + reach, page.tokens))
    return grows
