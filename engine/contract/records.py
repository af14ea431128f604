"""Records: what serving has kept of a prompt, for the job that learns from its request.

While a prompt is computed, its launches may keep what a backward through these tokens needs, window
by window: per unit and window a region that the request owns. The record and the keys and values of
the request outlive it. Once feedback on the request has come, the sample of the job may start
behind the record: its tokens need no forward then. Reuse of serving's activations is Alchemist's
(arXiv 2503.01066); a record may begin at any token up to which keys and values are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, NoReturn

from engine.contract.adapters import AdapterVersion
from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Free, Grow, Op, Plan, Share, Slice
from engine.contract.regions import Kind, Place, Region, Tier, kept, told
from engine.contract.rules import ContractError, Rule
from engine.contract.training_progress import Record, TrainingProgress, layout_of


class FeedbackCount(NamedTuple):
    """How much feedback a tenant's answers have got, of those whose feedback would have come.

    An answer counts once it is as old as the longest wait for feedback so far, of any tenant: of a
    younger one it is not known whether feedback will come.

    Attributes:
        answers: requests that were answered so long ago.
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


def record_places(record: Record, device: int) -> tuple[Place, ...]:
    """The places of a record on a device, but for its keys and values.

    Args:
        record: of a request.
        device: the device.

    Returns:
        Places in the order of the units, of each window by window; held there or not.
    """
    return window_places(record.request, record.firsts, record.units, device)


@lru_cache(maxsize=1 << 10)
def window_places(
    request: int, firsts: tuple[int, ...], units: tuple[int, ...], device: int
) -> tuple[Place, ...]:
    """Where windows of a request are kept.

    Args:
        request: the request.
        firsts: the first tokens of the windows.
        units: that keep them.
        device: the device.

    Returns:
        Places in the order of the units, of each window by window.
    """
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


class RecordCheck:
    """Checks what a plan does with records; it changes nothing.

    Args:
        records: those that are kept, by request.
        jobs: the jobs that wait or are in service.
        held_bytes: bytes of each place that is held.
        places_of: by owner, the places that are held.
        page_tokens: tokens of a page of KV.
    """

    def __init__(
        self,
        records: Mapping[int, Record],
        jobs: Mapping[int, Job],
        held_bytes: Mapping[Place, int],
        places_of: Mapping[int, Iterable[Place]],
        page_tokens: int,
    ) -> None:
        self._records, self._jobs = records, jobs
        self._held_bytes, self._places_of = held_bytes, places_of
        self._page_tokens = page_tokens

    def check(self, plan: Plan, device: int) -> None:
        """Checks a plan whose operations have the form of the contract.

        Args:
            plan: the plan of a policy.
            device: the device that it is for.

        Raises:
            ContractError: the plan breaks a rule; nothing is changed.
        """
        grown, computed = Counter[Place](), dict[int, int]()
        made = dict[int, set[Region]]()  # by request, what the plan records of it
        touched = {job.job_id for job in plan.restart}
        adopted = dict[int, tuple[int, ...]]()  # by request, the windows that a sample uses
        for op in plan.ops:
            if isinstance(op, Grow):
                grown[op.place] += op.nbytes
            elif isinstance(op, Share):
                computed[op.place.region.owner] = len(op.pages) * self._page_tokens
            elif isinstance(op, Free | Copy):
                place = op.place if isinstance(op, Free) else op.src
                if place.region.kind in (Kind.ACTIVATION, Kind.KV):
                    touched.add(place.region.owner)
            elif isinstance(op, Compute):
                self._compute(op, grown, computed, made, device)
                adopted |= self._adopted_by(op)
        restarted = {job.job_id for job in plan.restart}
        for request in (touched & self._records.keys()) - adopted.keys():
            self._check_whole(request, plan, made.get(request, set()), request in restarted)
        freed = {op.place for op in plan.ops if isinstance(op, Free)}
        for request, firsts in adopted.items():
            held = {*self._places_of.get(request, ())} - freed
            if any([place.region.kind is Kind.KV for place in held]):
                _refuse("a sample got its keys and values, and they stay as well", request)
            if any([place.region.slot not in firsts for place in held]):
                _refuse("a sample starts behind a part of it, and the rest stays", request)

    def _adopted_by(self, op: Compute) -> dict[int, tuple[int, ...]]:
        """The requests behind whose records samples start with a launch, and what these use."""
        found = dict[int, tuple[int, ...]]()
        for piece in op.slices:
            training = piece.job.training
            if not piece.record or training is None:
                continue
            if (record := training.adoptable(piece.microbatch)) is not None:
                found[record.request] = record.firsts
        return found

    def _compute(
        self,
        op: Compute,
        grown: Mapping[Place, int],
        computed: dict[int, int],
        made: dict[int, set[Region]],
        device: int,
    ) -> None:
        expected, served = set[Place](), set[int]()
        for piece in op.slices:
            job = piece.job
            if job.training is not None:
                continue
            served.add(job.job_id)
            first = computed.get(job.job_id, job.computed_tokens)
            computed[job.job_id] = first + piece.tokens
            if piece.record:
                places = self._window(piece, first, grown, op, device)
                made.setdefault(job.job_id, set()).update([place.region for place in places])
                expected.update(places)
        for place in op.writes:
            owner, kind, _, _ = place.region
            if kind is Kind.ACTIVATION and owner in served and place not in expected:
                _refuse(f"a launch writes {told(place)}, and no slice records it", owner)

    def _window(
        self, piece: Slice, first: int, grown: Mapping[Place, int], op: Compute, device: int
    ) -> list[Place]:
        """The places of a window that a launch records: new ones, of exactly its bytes."""
        job = piece.job
        learner = learner_of(job, self._jobs.values())
        if learner is None or learner.training is None:
            _refuse("a slice is recorded, and no job learns from the request", job.job_id)
        writes, found = {*op.writes}, list[Place]()
        for place, nbytes in record_sizes(
            job.job_id, learner.training, first, piece.tokens, device
        ):
            if place not in writes:
                _refuse(f"a recorded slice in a launch that does not write {told(place)}")
            if grown.get(place, 0) != nbytes or place in self._held_bytes:
                what = f"{grown.get(place, 0)} new bytes of {nbytes} at {told(place)}"
                _refuse(f"a recorded slice finds {what}", job.job_id)
            found.append(place)
        return found

    def _check_whole(self, request: int, plan: Plan, made: set[Region], is_restarted: bool) -> None:
        """A plan that touches a record leaves all of it, or none."""
        there = {place for place in self._places_of.get(request, ())}
        for op in plan.ops:
            if isinstance(op, Free) and op.place.region.owner == request:
                there.discard(op.place)
            elif isinstance(op, Copy) and op.dst.region.owner == request:
                there.add(op.dst)
            elif isinstance(op, Grow) and op.place.region.owner == request:
                there.add(op.place)
        own = {place.region for place in there if place.region.kind is Kind.ACTIVATION}
        before = {
            place.region
            for place in self._places_of.get(request, ())
            if place.region.kind is Kind.ACTIVATION
        }
        if is_restarted and own:
            _refuse("a restart: what is recorded of it is to be freed", request)
        if own and own != before | made:
            lost = next(iter((before | made) - own))
            _refuse(
                f"{told(Place(lost, Tier.GPU))} is freed, and the rest of its record stays", request
            )
        has_kv = any([place.region.kind is Kind.KV for place in there])
        if request not in self._jobs and bool(own) is not has_kv:
            what = "keys and values" if own else "the record"
            _refuse(f"{what} of request {request} are freed alone: both go, or both stay", request)


def _refuse(what: str, job_id: int | None = None) -> NoReturn:
    raise ContractError(Rule.RECORD, what, job_id)
