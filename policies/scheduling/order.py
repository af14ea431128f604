"""What schedulings of the field share: seats, ranks and a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from engine.contract.job import Job
from engine.contract.plan import Slice, one_token
from engine.contract.regions import Kind, Tier, kv_place
from engine.contract.view import KeptPages, View

Rank = Callable[[Job], tuple[float, ...]]  # lowest first


def check_limits(name: str, **limits: int) -> None:
    """ValueError where a limit leaves nothing to schedule."""
    for limit, value in limits.items():
        if value < 1:
            raise ValueError(f"{name}: {limit} is {value}, must be at least 1")


def fill(
    jobs: Iterable[Job], token_budget: int, view: View, decodes: tuple[Slice, ...] = ()
) -> tuple[Slice, ...]:
    """Slices of jobs, most wanted first, each as long as the rest of the budget allows.

    Before them, as many `decodes` as it allows.
    """
    if view.kept_pages is not None and view.waiting:
        return _fill_behind(jobs, token_budget, view, view.kept_pages(), decodes)
    slices: list[Slice] = []
    token_budget -= len(decodes)
    for job in jobs if token_budget > 0 else ():
        left = job.remaining_tokens
        tokens = left if left <= token_budget else token_budget
        slices.append(one_token(job) if tokens == 1 else Slice(job, tokens))
        token_budget -= tokens
        if not token_budget:
            break
    return (*(decodes if token_budget >= 0 else decodes[:token_budget]), *slices)


def _fill_behind(
    jobs: Iterable[Job],
    token_budget: int,
    view: View,
    pages: KeptPages,
    decodes: tuple[Slice, ...],
) -> tuple[Slice, ...]:
    """`fill` with prefix caching: an admitted job starts behind the pages that it finds.

    Jobs before it may take the pages that it would have found, so they are counted along.
    """
    slices: list[Slice] = []
    page, device = view.page, view.device
    running = view.leading_decodes(decodes)
    if running is not None and len(running.slices) <= token_budget:
        for op in running.full:
            pages.take(op.place, op.nbytes // page.nbytes)
        slices += running.slices
        token_budget -= len(slices)
    for job in chain([piece.job for piece in decodes[len(slices) :]], jobs):
        if not token_budget:
            break
        done = job.computed_tokens
        if not done and (found := pages.found(job)):
            pages.share(kv_place(job.job_id, Tier.GPU, device), found)
            done = len(found) * page.tokens
        left = job.known_tokens - done
        tokens = left if left <= token_budget else token_budget
        if tokens > 1 or not done % page.tokens:  # else there is room in its last page
            here = kv_place(job.job_id, Tier.GPU, device)
            pages.take(here, page.count(done + tokens) - page.count(done))
        slices.append(one_token(job) if tokens == 1 else Slice(job, tokens))
        token_budget -= tokens
    return tuple(slices)


def arrivals(view: View, max_jobs: int) -> Sequence[Job]:
    """The head of those waiting that `max_jobs` seats leave room for."""
    return view.waiting[: max(0, max_jobs - len(view.serving))]


def num_holders(view: View) -> int:
    """How many jobs hold KV on the device."""
    device = view.device
    places = [r.kind is Kind.KV and t is Tier.GPU and d == device for r, t, d in view.held_bytes]
    return sum(places)


def by_rank(view: View, rank: Rank, max_jobs: int) -> Iterable[Job]:
    """Decodes first, then prompts begun and waiting alike, each by rank.

    Who waits takes free seats in the order of rank. Ties keep the order of admission or arrival.
    """
    seats = max(0, max_jobs - len(view.serving))
    seated = sorted(view.waiting, key=rank)[:seats]
    begun = [job for job in view.serving if job.is_prefilling]
    yield from sorted((job for job in view.serving if not job.is_prefilling), key=rank)
    yield from sorted([*begun, *seated], key=rank)
