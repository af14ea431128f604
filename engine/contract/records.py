"""Records: what serving has kept of a prompt, for the job that learns from its request.

While a prompt is computed, its launches may keep what a backward through these tokens needs, window
by window: per unit and window a region that the request owns. The record and the keys and values of
the request outlive it. Once feedback on the request has come, the sample of the job may start
behind the record: its tokens need no forward then. Reuse of serving's activations is Alchemist's
(arXiv 2503.01066); a record may begin at any token up to which keys and values are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from engine.contract.adapters import AdapterVersion
from engine.contract.job import Job
from engine.contract.plan import Copy, Free, Grow, Op, Share
from engine.contract.regions import Kind, Place, Tier, kept, kv_place
from engine.contract.training_progress import TrainingProgress, layout_of


class Record(NamedTuple):
    """What is kept of a request.

    Attributes:
        request: the number of the request.
        job_id: the job that may learn from it.
        tenant: the request's tenant.
        adapter: the version that its tokens ran through.
        prompt_tokens: of the request.
        firsts: the first tokens of its windows.
        stop: the token behind the last one.
        made_ns: when its first window was issued.
        stash: of what a sample uses: the version through which the sample runs, where that is
            behind the weights of the job; else None.
    """

    request: int
    job_id: int
    tenant: str
    adapter: AdapterVersion
    prompt_tokens: int
    firsts: tuple[int, ...]
    stop: int
    made_ns: int
    stash: AdapterVersion | None = None

    @property
    def start(self) -> int:
        """The first token that is recorded."""
        return self.firsts[0]

    @property
    def tokens(self) -> int:
        """Tokens that are recorded."""
        return self.stop - self.firsts[0]

    def for_sample(self, prompt_tokens: int, is_behind: bool = False) -> Record | None:
        """The part of a record that a sample may use.

        The last token of a prompt is computed again: its label is the first one of the answer, and
        the head makes its loss from hidden states, which are not kept.

        Args:
            prompt_tokens: of the sample, which has those of the request or fewer.
            is_behind: whether the weights of the job have had updates since.

        Returns:
            None where no token is left.
        """
        stop = min(self.stop, prompt_tokens - 1)
        firsts = tuple([first for first in self.firsts if first < stop])
        stash = self.adapter if is_behind else None
        return self._replace(firsts=firsts, stop=stop, stash=stash) if firsts else None


class FeedbackCount(NamedTuple):
    """How much feedback a tenant's answers have got.

    Attributes:
        answers: requests that were answered.
        samples: of these, those on which feedback has come so far.
    """

    answers: int
    samples: int


def learner_of(job: Job, training: Iterable[Job]) -> Job | None:
    """The job that may learn from a request: it trains the adapter that the request runs through.

    Args:
        job: the job of a request.
        training: jobs that train.

    Returns:
        None where there is none.
    """
    if job.adapter is None:
        return None
    for other in training:
        progress = other.training
        if progress is None or not progress.spec.finetunes or progress.layout is None:
            continue
        if progress.spec.publish == job.adapter.name:
            return other
    return None


def record_sizes(
    request: int, training: TrainingProgress, first: int, tokens: int, device: int
) -> tuple[tuple[Place, int], ...]:
    """What a window of a prompt keeps.

    Args:
        request: the number of the request.
        training: the progress of the job that may learn from it.
        first: the first token of the window.
        tokens: tokens of the window.
        device: where it is computed.

    Returns:
        Bytes by place, in the order of the units.
    """
    layout = layout_of(training)
    assert layout.windows is not None, "a layout in windows"
    pairs = enumerate(layout.windows.kept)
    return tuple(
        [
            (kept(request, unit, device=device, first=first), tokens * nbytes)
            for unit, nbytes in pairs
            if nbytes and unit >= layout.first
        ]
    )


def record_places(record: Record, training: TrainingProgress, device: int) -> tuple[Place, ...]:
    """The places of a record on a device, but for its keys and values.

    Args:
        record: of a request.
        training: the progress of its job.
        device: the device.

    Returns:
        Places in the order of the units, of each window by window; held there or not.
    """
    layout = layout_of(training)
    assert layout.windows is not None, "a layout in windows"
    units = tuple([u for u, n in enumerate(layout.windows.kept) if n and u >= layout.first])
    return _places_of(record.request, record.firsts, units, device)


@lru_cache(maxsize=1 << 10)
def _places_of(
    request: int, firsts: tuple[int, ...], units: tuple[int, ...], device: int
) -> tuple[Place, ...]:
    return tuple(
        [kept(request, unit, device=device, first=first) for unit in units for first in firsts]
    )


def is_stale(version: AdapterVersion, training: TrainingProgress) -> bool:
    """Whether what was served through a version is too old for a job to learn from its record.

    Args:
        version: of the adapter that the job trains.
        training: the progress of the job.

    Returns:
        True beyond the staleness of the job.
    """
    return training.updates_behind(version) > training.spec.staleness


class ForwardAhead(NamedTuple):
    """What is ahead of a sample's forward.

    Attributes:
        tokens: that a window may take; 0: it is through.
        is_behind: whether the window is the first, and its sample uses the record of its request
            (`Slice.record`).
    """

    tokens: int
    is_behind: bool


def forward_ahead(training: TrainingProgress, microbatch: int) -> ForwardAhead:
    """What is ahead of a sample's forward, where its record is used unless that is too old.

    Args:
        training: the progress of a finetuning job.
        microbatch: whose sample has been released.

    Returns:
        The most tokens of its next window.
    """
    total, done = training.spec.tokens_of(microbatch), training.frontier(microbatch)[0][-1]
    record, is_behind = training.adopted(microbatch), False
    if record is None and not done:
        record = training.adoptable(microbatch)
        is_behind = record is not None and not is_stale(record.adapter, training)
        record = record if is_behind else None
    if record is not None and done < record.start:
        return ForwardAhead(record.start - done, is_behind)
    if is_behind and record is not None:
        done = record.stop
    return ForwardAhead(total - done, is_behind)


def is_adoption(op: Op | Grow | Share | Free) -> bool:
    """Whether an operation gives the keys and values of a recorded request to a sample.

    Args:
        op: any operation of a plan.

    Returns:
        True for a copy of keys and values from one owner to another.
    """
    if not isinstance(op, Copy):
        return False
    (src, kind, _, _), (dst, other, _, _) = op.src.region, op.dst.region
    return kind is Kind.KV and other is Kind.KV and src != dst


def kv_of(record: Record, held_bytes: Mapping[Place, int], device: int) -> Place | None:
    """Where the keys and values of a record are.

    Args:
        record: of a request.
        held_bytes: bytes by place.
        device: the device, whose host may have them.

    Returns:
        On the device if they are there; None where they are gone.
    """
    for tier in (Tier.GPU, Tier.HOST):
        place = kv_place(record.request, tier, device)
        if place in held_bytes:
            return place
    return None
