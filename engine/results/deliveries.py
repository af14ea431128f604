"""What happened to each request, when its tokens reached the client, and that none is lost."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from typing import TypeAlias

from engine.contract.job import Job
from engine.contract.regions import SHARED_OWNER, Place
from engine.contract.rules import BrokenLaw
from traces.serving.request import Request, TrainingJob

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length


class Stretch:
    """Tokens that a request got without a gap: a part of the delivery times of a device."""

    __slots__ = ("_times", "end", "first")

    def __init__(self, times: Times) -> None:
        self._times, self.first = times, len(times)
        self.end: int | None = None  # None while it goes on

    def __len__(self) -> int:
        return (len(self._times) if self.end is None else self.end) - self.first

    @property
    def first_ns(self) -> int:
        return self._times[self.first]

    @property
    def last_ns(self) -> int:
        return self._times[self.first + len(self) - 1]

    @property
    def times_ns(self) -> list[int]:
        return self._times[self.first : self.first + len(self)].tolist()


class Deliveries:
    """Times at which a device delivered tokens; requests are looked at only when they change."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._times: Times = array("q")
        self._ids: Sequence[int] = ()
        self._open: dict[int, Stretch] = {}  # by request

    def add(self, ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        """Each of these requests got a token at each of these times."""
        if ids != self._ids:
            self._change(ids)
        self._times.extend(times_ns)

    def _change(self, ids: tuple[int, ...]) -> None:
        going_on = self._open
        new = [*filterfalse(going_on.__contains__, ids)]
        if len(going_on) + len(new) > len(ids):
            for i in going_on.keys() - ids:
                going_on.pop(i).end = len(self._times)
        for i in new:
            going_on[i] = stretch = Stretch(self._times)
            self._outcomes[i].stretches.append(stretch)
        self._ids = ids


@dataclass(slots=True)
class Outcome:
    """What happened to one request."""

    request: Request
    arrival_ns: int
    device: int | None = None  # the replica it was routed to
    scheduled_ns: int | None = None
    finish_ns: int | None = None
    restarts: int = 0
    swaps: int = 0
    cached_tokens: int = 0
    status: str = "unfinished"
    stretches: list[Stretch] = field(default_factory=list)  # never empty ones

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        return sum([len(s) if s.end is None else s.end - s.first for s in self.stretches])

    @property
    def first_token_ns(self) -> int | None:
        """When the first output token was delivered."""
        return self.stretches[0].first_ns if self.stretches else None

    @property
    def last_token_ns(self) -> int | None:
        """When the newest output token was delivered."""
        return self.stretches[-1].last_ns if self.stretches else None

    @property
    def token_ns(self) -> list[int]:
        """When each output token was delivered."""
        return list(chain.from_iterable([stretch.times_ns for stretch in self.stretches]))


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
