"""Whether the pages of a job suffice for all steps of a repeated plan, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.contract import Rule
from engine.job import Job
from engine.plan import Compute, Grow, PageSize, Plan


class Part(NamedTuple):
    """Steps up to `until` (exclusive) in which a job's slice has so many tokens."""

    until: int
    tokens: int


def parts_of(plan: Plan, i: int) -> list[Part]:
    """The parts of the slice at a place of a repeated plan's launch."""
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    behind, tokens = len(launch.slices) - i, launch.slices[i].tokens
    found: list[Part] = []
    for step, last in plan.later:
        found.append(Part(min(step, plan.repeats), tokens))
        now = last[-behind] if behind <= len(last) else launch.slices[i]
        tokens = now.tokens
    found.append(Part(plan.repeats, tokens))
    return found


def first_lack(
    job: Job,
    pages: int,
    parts: Sequence[Part],
    grows: Sequence[Grow],
    page: PageSize,
    tokens_left: int,
) -> tuple[Rule, str] | None:
    """What breaks first: more tokens than the prompt has left, or fewer pages than tokens.

    `grows` are those of the job's place; a plan's Grow with `every` comes again. A step behind the
    job's last token (`tokens_left` are still to be sampled) will never be issued: it needs nothing.
    """
    size, done, known, step = page.tokens, job.computed_tokens, job.known_tokens, 0
    once = sorted([(op.first, op.nbytes // page.nbytes) for op in grows if not op.every])
    again = [(op.first, op.every, op.nbytes // page.nbytes) for op in grows if op.every]
    for until, tokens in parts:
        if tokens > 1 and done + tokens * (until - step) > known:
            return Rule.TOKENS, f"{tokens} tokens a step up to step {until}, {known - done} remain"
        while step < until:
            have = pages + sum([n for first, n in once if first <= step])
            have += sum([((step - f) // e + 1) * n for f, e, n in again if f <= step])
            fits = (have * size - done) // tokens  # steps for which these pages do
            if fits > 0:
                end = step + fits
                if end >= until or (tokens == 1 and _goes_on(again, step, end, size)):
                    fits = until - step
                step, done = step + fits, done + tokens * fits
                continue
            # A token was sampled when all that was known was computed, and at each step since.
            if done < known or done - known + 1 < tokens_left:
                at = f"at step {step} {have} pages of {size} for {done} + {tokens} tokens"
                return Rule.KV_PAGES, at
            return None
    return None


def _goes_on(again: Sequence[tuple[int, int, int]], step: int, end: int, size: int) -> bool:
    """Whether a page comes behind `step` and up to `end`, and then one a page of tokens."""
    for first, every, n in again:
        following = first if first > step else first + ((step - first) // every + 1) * every
        if following <= end and every <= size and n > 0:
            return True
    return False
