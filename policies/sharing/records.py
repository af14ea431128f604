"""What becomes of records: kept on the device, offloaded to the host, brought back, or dropped.

Recording, offloading in the order of the forward and reloading in the order of the backward are
Alchemist's (arXiv 2503.01066); which record gives way first, and the hedge, are ours: the paper's
text says neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Grow, Slice
from engine.contract.policy import PlanBuilder
from engine.contract.records import (
    FeedbackCount,
    Record,
    learner_of,
    record_places,
    record_sizes,
    is_stale,
)
from engine.contract.regions import Place, Pool, Tier, kv_place
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from engine.contract.windows import on_host

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class RecordRules:
    """Settings of records.

    Args:
        offload: whether a record goes to the host behind the launch that makes it, lowest layer
            first; its keys and values follow once its request has its answer.
        keep_tail: so many of the last layers stay on the device: a backward reads them first.
        ahead: units whose records come back ahead of the backward that reads them.
        headroom: share of the device that recording leaves free.
        hedge: share of the device that records make room for, before serving needs it.
        max_age_s: a record without feedback is dropped so long after it was made; None: never.

    Raises:
        ValueError: a share is not in [0, 1), or a count below 0.
    """

    offload: bool = True
    keep_tail: int = 0
    ahead: int = 1
    headroom: float = 0.05
    hedge: float = 0.0
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("headroom", "hedge"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"records: {name} is {getattr(self, name)}, must be in [0, 1)")
        for name in ("keep_tail", "ahead"):
            if getattr(self, name) < 0:
                raise ValueError(f"records: {name} is {getattr(self, name)}, must be at least 0")
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ValueError(f"records: max_age_s is {self.max_age_s}, must be above 0, or null")


def feedback_rate(count: FeedbackCount | None) -> float:
    """The share of a tenant's answers that get feedback, as far as is known (Laplace's rule).

    Args:
        count: of the tenant; None where it has no answer yet.

    Returns:
        A number in (0, 1).
    """
    answers, samples = count or (0, 0)
    return (samples + 1) / (answers + 2)


def _training_of(record: Record, view: View) -> TrainingProgress | None:
    """The progress of the job that may learn from a record."""
    for job in (*view.training, *view.waiting):
        if job.job_id == record.job_id:
            return job.training
    return None


class HeldRecords:
    """The records that no sample uses yet, in the order in which they give way.

    Those without feedback come first, of tenants whose answers get little of it, and the oldest
    first: their feedback is the least likely to come still.

    Args:
        view: what the policy was shown.
        plan: the plan that is written.
        rules: the settings.
    """

    def __init__(self, view: View, plan: PlanBuilder, rules: RecordRules) -> None:
        self._view, self._plan, self._rules = view, plan, rules
        self._due = set[int]()  # requests on which feedback has come
        for job in view.training:
            if (training := job.training) is not None and training.spec.learns:
                self._due.update(
                    [s.request for s in training.spec.samples if s.request is not None]
                )
        self.left = sorted(view.records.values(), key=self._value)

    def _value(self, record: Record) -> tuple[bool, float, int, int]:
        rate = feedback_rate(self._view.feedback.get(record.tenant))
        return (record.request in self._due, rate, record.made_ns, record.request)

    def on_device(self, record: Record) -> list[Place]:
        """What a record holds on the device, but for keys and values of a request in service."""
        training = _training_of(record, self._view)
        if training is None:
            return []
        places = [*record_places(record, training, self._view.device)]
        if self._is_over(record):
            places.append(kv_place(record.request, device=self._view.device))
        return [place for place in places if self._plan.holds(place)]

    def _is_over(self, record: Record) -> bool:
        """Whether a request has its answer: its keys and values are the record's."""
        return record.request not in self._serving

    @property
    def _serving(self) -> set[int]:
        return {job.job_id for job in (*self._view.serving, *self._view.waiting)}

    def give_way(self, pool: Pool) -> bool:
        """Has the next record leave a pool, or end.

        Args:
            pool: the device, or its host.

        Returns:
            Whether there was one in the pool.
        """
        for record in [*self.left]:
            places = self.on_device(record)
            if pool[0] is not Tier.GPU:
                places = [] if places else self._on_host(record)
            if not places:
                continue
            if not (pool[0] is Tier.GPU and self._rules.offload and self._moved(places)):
                self.left.remove(record)
                self.drop(record)
            return True
        return False

    def _on_host(self, record: Record) -> list[Place]:
        training = _training_of(record, self._view)
        places = () if training is None else record_places(record, training, self._view.device)
        return [place for place in map(on_host, places) if self._plan.holds(place)]

    def keep_for(self, piece: Slice) -> None:
        """The record that the sample of a slice starts behind does not give way to it."""
        self.left = [record for record in self.left if record is not self._behind(piece)]

    def drop_of(self, piece: Slice) -> None:
        """Gives the record back that the sample of a slice would start behind."""
        if (record := self._behind(piece)) is not None:
            self.drop(record)

    def _behind(self, piece: Slice) -> Record | None:
        training = piece.job.training
        if training is None or not piece.record:
            return None
        request = training.spec.sample(piece.microbatch).request
        return None if request is None else self._view.records.get(request)

    def _moved(self, places: Sequence[Place]) -> bool:
        """Moves places to the host, if it has room for all of them."""
        nbytes = sum(map(self._plan.held, places))
        if nbytes > self._plan.room((Tier.HOST, self._view.device)):
            return False
        for place in places:
            self._plan.move(place, on_host(place))
        return True

    def drop(self, record: Record) -> None:
        """Gives a record back, with keys and values that are its own."""
        training = _training_of(record, self._view)
        assert training is not None, "a record is of a job that learns"
        places = [*record_places(record, training, self._view.device)]
        if self._is_over(record):
            places.append(kv_place(record.request, device=self._view.device))
        for place in places:
            for there in (place, on_host(place)):
                if self._plan.holds(there):
                    self._plan.free(there)

    def drop_old(self) -> None:
        """Gives records back whose weights are old, or that have waited for too long."""
        since_ns, age_s = 0, self._rules.max_age_s
        if age_s is not None:
            since_ns = self._view.now_ns - round(age_s * NS_PER_S)
        for record in [*self.left]:
            training = _training_of(record, self._view)
            is_old = training is not None and is_stale(record.adapter, training)
            is_due = record.request in self._due
            if is_old or (record.made_ns < since_ns and not is_due and self._is_over(record)):
                self.left.remove(record)
                self.drop(record)

    def hedge(self) -> None:
        """Has records leave the device until the room is there that is kept for serving."""
        pool: Pool = (Tier.GPU, self._view.device)
        wanted = int(self._rules.hedge * self._view.capacity_bytes[pool])
        while wanted and self._plan.room(pool) < wanted and self.give_way(pool):
            pass


def record(batch: Sequence[Slice], view: View, plan: PlanBuilder, rules: RecordRules) -> None:
    """Has the launch that serves record those of its slices that the scheduling has marked.

    A slice for which there is no room is served, and its record ends before it.

    Args:
        batch: the slices of the scheduling.
        view: what the policy was shown.
        plan: the plan that is written, which ends with the launch.
        rules: the settings.
    """
    wanted = {piece.job.job_id for piece in batch if piece.record and piece.job.training is None}
    pool: Pool = (Tier.GPU, view.device)
    spare = int(rules.headroom * view.capacity_bytes[pool])
    places, made = dict[int, list[Place]](), list[tuple[Job, tuple[tuple[Place, int], ...]]]()
    for piece in plan.served() if wanted else ():
        job = piece.job
        learner = learner_of(job, (*view.training, *view.waiting))
        if job.job_id not in wanted or not job.may_record or learner is None:
            continue
        assert learner.training is not None, "a job that learns"
        given = (job.job_id, learner.training, job.computed_tokens, piece.tokens, view.device)
        sizes = record_sizes(*given)
        if sum([nbytes for _, nbytes in sizes]) + spare > plan.room(pool):
            continue
        plan.grow_all([Grow(place, nbytes) for place, nbytes in sizes])
        places[job.job_id] = [place for place, _ in sizes]
        made.append((job, sizes))
    if not places:
        return
    plan.record(places)
    if rules.offload:
        for _, sizes in made:
            _offload(sizes[: len(sizes) - rules.keep_tail], view, plan)


def _offload(sizes: Sequence[tuple[Place, int]], view: View, plan: PlanBuilder) -> None:
    """Moves a window's places to the host in the order of the forward, as far as there is room."""
    for place, nbytes in sizes:
        if nbytes > plan.room((Tier.HOST, view.device)):
            return
        plan.move(place, on_host(place))


def ahead_of(piece: Slice, device: int, count: int) -> Iterator[Place]:
    """What the backwards behind a slice will read of a record, unit by unit.

    Args:
        piece: a window back.
        device: where the job trains.
        count: units below those of the slice.

    Yields:
        Places on the device, held there or not.
    """
    training = piece.job.training
    assert training is not None and piece.layers is not None, "a window of a finetuning job"
    used = training.adopted(piece.microbatch)
    if used is None:
        return
    low = piece.layers.start
    wanted = range(max(training.first, low - count), low)
    for place in reversed(record_places(used, training, device)):
        if place.region.part in wanted:
            yield place
