"""Laws 1 and 2: no request is lost, each ends with its tokens, and no memory is left behind."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from engine.contract.job import Job
from engine.contract.regions import SHARED_OWNER, Place
from engine.contract.rules import BrokenLaw
from engine.results.recorder import Outcome
from traces.serving.request import TrainingJob


def check_requests(outcomes: Collection[Outcome], inside: Iterable[Job]) -> None:
    """Law 1: a request that has arrived is in the engine or has ended.

    Args:
        outcomes: of all requests that have arrived.
        inside: jobs that wait, are in service, train, or end with an operation in flight.

    Raises:
        BrokenLaw: the numbers differ.
    """
    serving = sum(job.training is None for job in inside)
    ended = sum(outcome.status != "unfinished" for outcome in outcomes)
    if len(outcomes) != serving + ended:
        raise BrokenLaw("law 1: requests do not add up")


def check_end(
    outcomes: Iterable[Outcome],
    training: Iterable[tuple[TrainingJob, int]],
    held: Iterable[Place],
    resident: Container[Place],
    ended: Container[int],
    is_forced: bool,
) -> None:
    """Laws 1 and 2 at the end of a replay: no request is unfinished, each has exactly its output
    tokens, and nothing is held but what was `resident` at the start and belongs to no job.

    Args:
        outcomes: of all requests.
        training: training jobs, each with the number of its steps that have ended.
        held: places that are held.
        resident: places that were held at the start.
        ended: numbers of jobs whose memory the policy gives back.
        is_forced: whether the trace gives the length of an answer; else sampling may end it early.

    Raises:
        BrokenLaw: one of these does not hold.
    """
    unfinished, lengths = list[int](), list[str]()
    for outcome in outcomes:
        request, tokens = outcome.request, outcome.tokens
        if outcome.status == "unfinished":
            unfinished.append(request.request_id)
        elif outcome.status == "finished" and (
            tokens != request.output_tokens
            if is_forced
            else not 0 < tokens <= request.output_tokens
        ):
            lengths.append(f"{request.request_id} ({tokens} of {request.output_tokens})")
    if unfinished:
        raise BrokenLaw(f"law 1: the replay ends with requests {_some(unfinished)} unfinished")
    if lengths:
        raise BrokenLaw(f"law 1: requests end with other lengths than theirs: {_some(lengths)}")
    for job, steps in training:
        if steps != job.num_steps:
            raise BrokenLaw(
                f"law 1: training job {job.job_id} ends after {steps} of {job.num_steps} steps"
            )
    rest = [p for p in held if not _may_stay(p, resident) and p.region.owner not in ended]
    if rest:
        raise BrokenLaw(f"law 2: the replay ends and {_some(rest)} is held")


def _may_stay(place: Place, resident: Container[Place]) -> bool:
    """Whether a place belongs to no job, and was there from the start."""
    return place.region.owner == SHARED_OWNER and place in resident


def _some(items: Sequence[object]) -> str:
    """The first items, for messages."""
    more = len(items) - 3
    return ", ".join(map(str, items[:3])) + (f" and {more} more" if more > 0 else "")
