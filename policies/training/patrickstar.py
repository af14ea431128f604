"""PatrickStar: chunks use what all else leaves of a device, evicted by farthest next use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.contract.footprint import LaunchFootprint
from engine.contract.job import Job
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Place, Tier, Work, weight
from engine.contract.training_progress import layout_of
from engine.contract.view import Profile, View
from policies.training.cycle import last_update, training_jobs
from policies.training.eviction import FarthestUse, Future
from policies.training.out_of_memory import patient
from policies.training.residency import Residency

WARMUP_SHARE = 0.1  # of the device, for chunks, in the warm-up step: the original's


class StepStatistics(NamedTuple):
    """What the last complete step has shown, per launch: PatrickStar's statistics of warm-up.

    Bytes on the device beside chunks are the paper's non-model data, which rises and falls in a
    step like a tide.
    """

    other_bytes: tuple[int, ...]  # per launch, on the device beside chunks
    uses: Mapping[Place, Sequence[int]]  # launches that used a place


def statistics_of(profile: Profile, job_id: int) -> StepStatistics | None:
    """The statistics of a job's last complete step.

    Args:
        profile: of the view.
        job_id: the training job.

    Returns:
        None in warm-up, before a step is complete.
    """
    moments = profile.moments(job_id)
    if not moments:
        return None
    return StepStatistics(tuple([moment.other_bytes for moment in moments]), profile.uses(job_id))


@dataclass(frozen=True)
class MemoryBudget:
    """How many bytes of a device chunks may take (Fang et al., TPDS'23).

    A step may have launches that the step of the statistics had not: a forward that was repeated
    once more. For these the peak of that step counts.

    Args:
        device_bytes: of the device that may be used at all.
        buffer_bytes: set aside in forward and backward; the original's are for collectives.
        staging_bytes: set aside in updates; the original casts gradients and weights there.
        warmup_share: of `device_bytes`, for chunks, in the warm-up step.
        is_static: every step has the share of the warm-up step.
    """

    device_bytes: int
    buffer_bytes: int = 0
    staging_bytes: int = 0
    warmup_share: float = WARMUP_SHARE
    is_static: bool = False

    def available(self, work: Work, moment: int, other_bytes: Sequence[int]) -> int:
        """Bytes for chunks at a launch: what all else leaves at this and at the next launch.

        Args:
            work: of the launch.
            moment: its number in the step.
            other_bytes: per launch of a step, bytes beside chunks; empty in warm-up.

        Returns:
            Bytes of the device.
        """
        if work is Work.UPDATE:
            return self.device_bytes - self.staging_bytes
        if self.is_static or not other_bytes:
            return int(self.device_bytes * self.warmup_share)
        if moment >= len(other_bytes):
            return self.device_bytes - max(other_bytes) - self.buffer_bytes
        now, then = other_bytes[moment], other_bytes[(moment + 1) % len(other_bytes)]
        return self.device_bytes - max(now, then) - self.buffer_bytes

    def ahead(self, moment: int, other_bytes: Sequence[int]) -> int:
        """Bytes for chunks behind a launch, so that the next launch needs no eviction.

        Args:
            moment: the number of the launch in the step.
            other_bytes: per launch of a step, bytes beside chunks; empty in warm-up.

        Returns:
            What all else leaves of the device at the next launch.
        """
        if self.is_static or not other_bytes:
            return self.device_bytes
        if moment >= len(other_bytes):
            return self.device_bytes - max(other_bytes)
        return self.device_bytes - other_bytes[(moment + 1) % len(other_bytes)]

    def margin(self, other_bytes: Sequence[int], chunk_bytes: int) -> int:
        """Bytes left beside all weights and gradients when all else is at its peak.

        Args:
            other_bytes: per launch of a step, bytes beside chunks; empty in warm-up.
            chunk_bytes: of all weights and gradients.

        Returns:
            Bytes, which may be negative; 0 in warm-up.
        """
        if not other_bytes:
            return 0
        return self.device_bytes - max(other_bytes) - chunk_bytes - self.buffer_bytes


def device_updates(margin_bytes: int, share: float, optimizer_bytes: Iterable[int]) -> int:
    """How many chunks, from the first, are updated on the device.

    Args:
        margin_bytes: see MemoryBudget.margin.
        share: of the margin, which their optimizer states may fill.
        optimizer_bytes: per chunk, in order.

    Returns:
        The number of chunks.
    """
    left, count = int(margin_bytes * share), 0
    for nbytes in optimizer_bytes:
        left -= nbytes
        if left < 0:
            break
        count += 1
    return count


@dataclass(frozen=True)
class PatrickStar:
    """Chunks in exclusive tiers, with a budget per launch (Fang et al., PatrickStar, TPDS'23).

    A warm-up step measures the tide: what lies on the device beside chunks, launch by launch. Later
    steps give chunks what the tide leaves, make room ahead for the next launch, evict the chunk
    whose next use is farthest, and update chunks on the device as far as there is a margin.

    A budget is exceeded where a launch could not run otherwise. An update for which the host has no
    room runs on the device. Plans use coming bytes.

    The original differs in three places that are taken for slips: an exact number of device updates
    loses one, the update is a single moment, buffers in backward count squared.

    Args:
        device_share: of the device's memory that may be used at all.
        warmup_share: of that, for chunks, in the warm-up step; with `static_partition` in all.
        margin_share: of the margin, which updates on the device may fill.
        updates: by the `margin`, or all on the `host`, or all on the `device`.
        reuses_gradients: gradients take the place of their weights (bfloat16, one microbatch per
            step).
        static_partition: every step has the budget of the warm-up step.
        buffer_chunks: memory set aside in forward and backward, in chunks; in the original 1.
        staging_chunks: memory set aside in updates, in chunks; in the original 8, for 16 bytes per
            number of a chunk.
        overlaps_updates: the next forward may begin before the host has updated the last chunk; in
            the original it waits.
        strict: a budget that a full host keeps from being met is an error, as in the original; else
            only a launch that cannot run is one.

    Raises:
        ValueError: a share is not in [0, 1], or a number is below 0.
        OutOfMemory: from `fit`, a launch can never fit or, with `strict`, a budget is not met.
    """

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

    @property
    def traits(self) -> Traits:
        return Traits(reuses_gradients=self.reuses_gradients, recurs=True)

    def __post_init__(self) -> None:
        for name in ("device_share", "warmup_share", "margin_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"patrickstar: {name} is {getattr(self, name)}, not in [0, 1]")
        for name in ("buffer_chunks", "staging_chunks"):
            if getattr(self, name) < 0:
                raise ValueError(f"patrickstar: {name} is {getattr(self, name)}, not at least 0")

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        known = _known(view)
        device = _residency(view, plan, known)
        jobs = {piece.job.job_id: piece.job for piece in batch}
        updates = any([piece.work is Work.UPDATE for piece in batch])
        budgets = {i: self._job_budget(job, view, known[i], updates) for i, job in jobs.items()}
        for piece in batch:
            self._run_task(piece, device, budgets[piece.job.job_id])

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """See Resident."""
        return _residency(view, plan, _known(view))

    def _run_task(self, piece: Slice, device: Residency, job_budget: _JobBudget) -> None:
        first, budget, others, updated_here = job_budget
        assert piece.layers is not None, "a task has one part"
        is_away = piece.work is Work.UPDATE and piece.layers.start not in updated_here
        on = HOST_LANE if is_away else COMPUTE_LANE
        for launch in device.launches(piece, on, self.reuses_gradients):
            moment = first + device.clock
            available = budget.available(piece.work, moment, others)
            device.make_resident_within(launch, available, self.strict)
            device.run(launch, self._barrier(launch, device))
            device.shrink(budget.ahead(moment, others))

    def _job_budget(
        self, job: Job, view: View, known: StepStatistics | None, updates: bool
    ) -> _JobBudget:
        budget, others = self._budget(job, view), () if known is None else known.other_bytes
        here = self._updated_here(job, budget, others) if updates else ()
        return _JobBudget(view.profile.moment(job.job_id), budget, others, here)

    def _barrier(self, launch: LaunchFootprint, device: Residency) -> tuple[Place, ...]:
        """Places that an update also writes.

        The last update on the host writes all weights there, so that the next fetch waits for it.
        """
        piece, training = launch.piece, launch.piece.job.training
        if self.overlaps_updates or launch.on != HOST_LANE or training is None:
            return ()
        last = last_update(training)
        if piece.layers is None or piece.layers.start != last:
            return ()
        others = [c for c in training.trained_by if c != last]
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


class _JobBudget(NamedTuple):
    """The budget of a job in a plan, and what it is computed from."""

    first: int  # number of the job's next launch in its step
    budget: MemoryBudget
    other_bytes: tuple[int, ...]  # see StepStatistics; empty in warm-up
    updated_here: Collection[int]  # chunks updated on the device, if the plan has updates


def _known(view: View) -> dict[int, StepStatistics | None]:
    return {job.job_id: statistics_of(view.profile, job.job_id) for job in training_jobs(view)}


def _residency(
    view: View, plan: PlanBuilder, known: Mapping[int, StepStatistics | None]
) -> Residency:
    return Residency(view, plan, _order(view, known), is_exclusive=True)


def _order(view: View, known: Mapping[int, StepStatistics | None]) -> FarthestUse:
    """The order of eviction. In warm-up no next use is known: the lowest chunk goes first."""
    futures = dict[int, Future]()
    for job_id, step in known.items():
        uses, length = ({}, 1) if step is None else (step.uses, len(step.other_bytes))
        futures[job_id] = Future(uses, length, view.profile.moment(job_id))
    return FarthestUse(futures)
