"""How the pages of a repeated plan grow, and for how many steps they are sure to be there."""

from __future__ import annotations

from engine.plan import Compute, Grow, Place, Plan, Slice, Tier
from engine.view import View


def stretched(plan: Plan, view: View, count: int, spare_pages: int) -> Plan:
    """A plan of decodes, perhaps with one prompt slice behind them, for up to `count` steps.

    In as many steps as a page has tokens, each decode takes one page at most: the bound may end a
    run early, never late. `spare_pages` stay free, as a decode wants to find them.
    """
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    page, pool = view.page, (Tier.GPU, view.device)
    grown = {op.place: op.nbytes for op in plan.ops if isinstance(op, Grow)}
    held = [view.held_bytes.get(p, 0) + grown.get(p, 0) for p in launch.writes]
    free = view.room(pool) // page.nbytes - spare_pages
    *decodes, last = launch.slices
    if last.tokens < last.job.remaining_tokens:
        prompt = _cut(last, launch, held[-1], view, count, grown)
        free -= sum(op.nbytes for op in prompt) // page.nbytes
    else:
        decodes, prompt = [*decodes, last], []
    count = min(count, page.tokens * (free // len(decodes)) if decodes else count)
    if count < 2 or free < 0:
        return plan
    grows = []
    for piece, place, nbytes in zip(decodes, launch.writes, held, strict=False):
        reach = nbytes // page.nbytes * page.tokens - piece.job.computed_tokens
        first = 0 if place in grown else reach
        if first < count:
            grows.append(Grow(place, page.nbytes, first, page.tokens))
    return Plan((*grows, *(op for op in prompt if op.first < count), launch), repeats=count)


def has_prompt(plan: Plan) -> bool:
    """Whether a plan of one launch computes tokens of a prompt."""
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    jobs = (piece.job for piece in launch.slices)
    return any(job.computed_tokens < job.prompt_tokens for job in jobs)


def _cut(
    last: Slice, launch: Compute, held: int, view: View, count: int, grown: dict[Place, int]
) -> list[Grow]:
    """The growth of a prompt's slices, step by step: slices need not end where pages end."""
    place, done = launch.writes[-1], last.job.computed_tokens
    grows = [Grow(place, grown[place])] if place in grown else []
    for step in range(1, count):
        need = view.page.bytes_for(done + (step + 1) * last.tokens) - held
        if need > 0:
            grows.append(Grow(place, need, step))
            held += need
    return grows
