"""What the schedulings share: limits on jobs in service, ranks, and a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from engine.contract.job import Job
from engine.contract.plan import Slice, one_token
from engine.contract.regions import Kind, Tier, kv_place
from engine.contract.view import KeptPages, View

Rank = Callable[[Job], tuple[float, ...]]  # lowest first


def check_limits(name: str, **limits: int) -> None:
    """Checks the limits of a scheduling.

    Args:
        name: of the scheduling, for the message.
        limits: each by its name.

    Raises:
        ValueError: a limit is below 1, which leaves nothing to schedule.
    """
    for limit, value in limits.items():
        if value < 1:
            raise ValueError(f"{name}: {limit} is {value}, must be at least 1")


def fill(
    jobs: Iterable[Job], token_budget: int, view: View, decodes: tuple[Slice, ...] = ()
) -> tuple[Slice, ...]:
    """The batch of a step: decodes, then slices of jobs, as far as the token budget reaches.

    Args:
        jobs: in the order in which they are served; each has as long a slice as the budget allows.
        token_budget: tokens of the batch.
        view: says whether jobs may start on kept pages (prefix caching).
        decodes: one token each, before the slices of jobs.

    Returns:
        Slices of at most `token_budget` tokens together.
    """
    if view.waiting and view.kept_pages is not None:  # a read of kept pages is noted
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
    """`fill` with prefix caching: an admitted job starts behind the kept pages that it finds.

    A job earlier in the batch may take pages that a later job would have found. So the pages that
    each job takes are counted along.
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
        if tokens > 1 or not done % page.tokens:  # else the last page has room for the token
            here = kv_place(job.job_id, Tier.GPU, device)
            pages.take(here, page.count(done + tokens) - page.count(done))
        slices.append(one_token(job) if tokens == 1 else Slice(job, tokens))
        token_budget -= tokens
    return tuple(slices)


def arrivals(view: View, max_jobs: int) -> Sequence[Job]:
    """The first waiting jobs, as many as may enter service beside those that are in it.

    Args:
        view: its waiting jobs, in the order of arrival.
        max_jobs: jobs in service, those that enter included.

    Returns:
        Waiting jobs in the order of arrival.
    """
    return view.waiting[: max(0, max_jobs - len(view.serving))]


def num_holders(view: View) -> int:
    """The number of jobs that hold KV on the device.

    Args:
        view: the view of the device.

    Returns:
        The number of KV places in the device's memory.
    """
    device = view.device
    places = [r.kind is Kind.KV and t is Tier.GPU and d == device for r, t, d in view.held_bytes]
    return sum(places)


def by_rank(view: View, rank: Rank, max_jobs: int) -> Iterable[Job]:
    """Jobs in the order in which they are served: decodes by rank, then all prompts by rank.

    Equal ranks keep the order of admission or arrival.

    Args:
        view: its jobs in service and waiting.
        rank: of a job; the lowest is first.
        max_jobs: jobs in service. Waiting jobs enter by rank as far as this leaves room.

    Returns:
        Jobs in service and admitted jobs, each once.
    """
    room = max(0, max_jobs - len(view.serving))
    admitted = sorted(view.waiting, key=rank)[:room]
    begun = [job for job in view.serving if job.is_prefilling]
    yield from sorted((job for job in view.serving if not job.is_prefilling), key=rank)
    yield from sorted([*begun, *admitted], key=rank)
