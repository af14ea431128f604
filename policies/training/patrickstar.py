"""PatrickStar: chunks move with the tide of everything else, farthest next use first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from engine.contract.footprint import LaunchFootprint
from engine.contract.job import Job, layout_of
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Place, Tier, Work, weight
from engine.contract.view import Profile, View
from policies.training.cycle import training_jobs
from policies.training.eviction import FarthestUse, Future
from policies.training.out_of_memory import patient
from policies.training.residency import Residency

WARMUP_SHARE = 0.1  # of the device, for chunks, while nothing is known of the rest: the original's


class Tide(NamedTuple):
    """What the last complete step has shown, per launch: its statistics of warm-up."""

    other_bytes: tuple[int, ...]  # on the device beside chunks
    uses: Mapping[Place, Sequence[int]]  # launches that used a place


def tide_of(profile: Profile, job_id: int) -> Tide | None:
    """The tide of a job; None in its warm-up."""
    moments = profile.moments(job_id)
    if not moments:
        return None
    return Tide(tuple([moment.other_bytes for moment in moments]), profile.uses(job_id))


@dataclass(frozen=True)
class MemoryBudget:
    """How many bytes of a device chunks may take.

    device_bytes   all that may be used
    buffer_bytes   set aside in forward and backward (the original's for collectives)
    staging_bytes  set aside in updates (the original's, to cast gradients and weights)
    warmup_share   of the device, for chunks, while nothing is known of the rest
    is_static      as in warm-up for ever
    """

    device_bytes: int
    buffer_bytes: int = 0
    staging_bytes: int = 0
    warmup_share: float = WARMUP_SHARE
    is_static: bool = False

    def available(self, work: Work, moment: int, other_bytes: Sequence[int]) -> int:
        """At a launch: what is left at this and at the next moment. No `other_bytes`: warm-up."""
        if work is Work.UPDATE:
            return self.device_bytes - self.staging_bytes
        if self.is_static or not other_bytes:
            return int(self.device_bytes * self.warmup_share)
        now, then = other_bytes[moment], other_bytes[(moment + 1) % len(other_bytes)]
        return self.device_bytes - max(now, then) - self.buffer_bytes

    def ahead(self, moment: int, other_bytes: Sequence[int]) -> int:
        """Behind a launch: what the next one leaves, so that it finds its room made."""
        if self.is_static or not other_bytes:
            return self.device_bytes
        return self.device_bytes - other_bytes[(moment + 1) % len(other_bytes)]

    def margin(self, other_bytes: Sequence[int], chunk_bytes: int) -> int:
        """What is left beside all weights and gradients when everything else is at its peak; may
        be negative. There is none in warm-up."""
        if not other_bytes:
            return 0
        return self.device_bytes - max(other_bytes) - chunk_bytes - self.buffer_bytes


def device_updates(margin_bytes: int, share: float, optimizer_bytes: Iterable[int]) -> int:
    """How many chunks, from the first, are updated on the device: as many as have room for their
    optimizer states in this share of the margin."""
    left, count = int(margin_bytes * share), 0
    for nbytes in optimizer_bytes:
        left -= nbytes
        if left < 0:
            break
        count += 1
    return count


@dataclass(frozen=True)
class PatrickStar:
    """Exclusive tiers, statistics of a warm-up step, budgets by launch, room made ahead for the
    next launch, and updates on the device as far as there is a margin (Fang et al., TPDS'23).

    device_share      of the device's memory that may be used at all
    warmup_share      of that, for chunks, in the first step; with `static_partition` for ever
    margin_share      of the margin that device updates may fill; `updates` may also say where
    reuses_gradients  gradients take the place of their weights (bfloat16, one microbatch a step)
    buffer_chunks     chunks' worth of memory set aside in forward and backward; original: 1
    staging_chunks    the same in updates; original: 8 (16 bytes per number of a chunk)
    overlaps_updates  the next forward may begin before the host has updated the last chunk; in the
                      original it waits
    strict            a budget that cannot be kept since the host is full is an error, as in the
                      original; else only what cannot run is one

    Budgets give way where a launch could not run otherwise. Where the host has no room for what an
    update needs, it runs on the device. Slips that are mended: an exact number of device updates
    lost one, the update was a single moment, buffers in backward were counted squared. Rests on
    coming bytes.
    """

    traits: ClassVar[Traits] = Traits(recurs=True)
    device_share: float = 1.0
    warmup_share: float = WARMUP_SHARE
    margin_share: float = 0.8
    updates: Literal["margin", "host", "device"] = "margin"
    reuses_gradients: bool = False
    static_partition: bool = False
    buffer_chunks: int = 0
    staging_chunks: int = 0
    overlaps_updates: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("device_share", "warmup_share", "margin_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"patrickstar: {name} is {getattr(self, name)}, not in [0, 1]")
        for name in ("buffer_chunks", "staging_chunks"):
            if getattr(self, name) < 0:
                raise ValueError(f"patrickstar: {name} is {getattr(self, name)}, not at least 0")

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        tides = {job.job_id: tide_of(view.profile, job.job_id) for job in training_jobs(view)}
        device = Residency(view, plan, _order(view, tides), is_exclusive=True)
        jobs = {piece.job.job_id: piece.job for piece in batch}
        updates = any([piece.work is Work.UPDATE for piece in batch])
        courses = {i: self._course(job, view, tides[i], updates) for i, job in jobs.items()}
        for piece in batch:
            self._carry_out(piece, device, courses[piece.job.job_id])

    def _carry_out(self, piece: Slice, device: Residency, course: _Course) -> None:
        first, budget, others, updated_here = course
        assert piece.layers is not None, "a task has one part"
        is_away = piece.work is Work.UPDATE and piece.layers.start not in updated_here
        on = HOST_LANE if is_away else COMPUTE_LANE
        for launch in device.launches(piece, on, self.reuses_gradients):
            moment = first + device.clock
            available = budget.available(piece.work, moment, others)
            device.seat_within(launch, available, self.strict)
            device.run(launch, self._barrier(launch, device))
            device.shrink(budget.ahead(moment, others))

    def _course(self, job: Job, view: View, tide: Tide | None, updates: bool) -> _Course:
        budget, others = self._budget(job, view), () if tide is None else tide.other_bytes
        here = self._updated_here(job, budget, others) if updates else ()
        return _Course(view.profile.moment(job.job_id), budget, others, here)

    def _barrier(self, launch: LaunchFootprint, device: Residency) -> tuple[Place, ...]:
        """The last update on the host writes all weights there: whoever fetches waits for it."""
        piece, training = launch.piece, launch.piece.job.training
        if self.overlaps_updates or launch.on != HOST_LANE or training is None:
            return ()
        *others, last = [*training.trained_by]
        if piece.layers is None or piece.layers.start != last:
            return ()
        places = [weight(piece.job.job_id, c, Tier.HOST) for c in others]
        return tuple([place for place in places if device.holds(place)])

    def _budget(self, job: Job, view: View) -> MemoryBudget:
        assert job.training is not None
        capacity = view.capacity_bytes[Tier.GPU, view.device]
        largest = max([chunk.whole_bytes for chunk in layout_of(job.training).chunks])
        return MemoryBudget(
            int(capacity * self.device_share),
            self.buffer_chunks * largest,
            self.staging_chunks * largest,
            self.warmup_share,
            self.static_partition,
        )

    def _updated_here(
        self, job: Job, budget: MemoryBudget, other_bytes: tuple[int, ...]
    ) -> Collection[int]:
        """Chunks that are updated on the device: the first ones, as many as the margin holds."""
        training = job.training
        assert training is not None
        chunks = layout_of(training).chunks
        if self.updates != "margin":
            return range(len(chunks)) if self.updates == "device" else ()
        nbytes = sum([chunk.weight_bytes for chunk in chunks])
        if not self.reuses_gradients:
            nbytes += sum([chunk.gradient_bytes for chunk in chunks])
        trained = [*training.trained_by]
        states = [chunks[c].optimizer_bytes for c in trained]
        count = device_updates(budget.margin(other_bytes, nbytes), self.margin_share, states)
        return frozenset(trained[:count])


class _Course(NamedTuple):
    """What a plan knows of a job: number of its next launch, budget, tide, chunks that are updated
    on the device (where it has updates)."""

    first: int
    budget: MemoryBudget
    other_bytes: tuple[int, ...]
    updated_here: Collection[int]


def _order(view: View, tides: dict[int, Tide | None]) -> FarthestUse:
    """In warm-up nothing is known of next uses: the lowest chunk goes first."""
    futures = dict[int, Future]()
    for job_id, tide in tides.items():
        uses, length = ({}, 1) if tide is None else (tide.uses, len(tide.other_bytes))
        futures[job_id] = Future(uses, length, view.profile.moment(job_id))
    return FarthestUse(futures)
