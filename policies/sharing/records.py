"""What becomes of records: kept on the device, offloaded to the host, brought back, or dropped.

Recording, offloading in the order of the forward and reloading in the order of the backward are
Alchemist's (arXiv 2503.01066); which record gives way first, and the hedge, are ours: the paper's
text says neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.plan import Grow, Slice
from engine.contract.policy import PlanBuilder
from engine.contract.records import is_stale, learner_of, record_places, record_sizes
from engine.contract.regions import Place, Pool, Tier, kv_place
from engine.contract.training_progress import NO_RECORDS, Record, TrainingProgress
from engine.contract.view import View
from engine.contract.windows import on_host

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class RecordRules:
    """Settings of records.

    Args:
        offload: whether a record goes to the host behind the launch that makes it, lowest layer
            first; where it makes room, the keys and values of an answered request follow.
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


def feedback_rate(view: View, tenant: str) -> float:
    """The share of a tenant's answers that get feedback, as far as is known (Laplace's rule).

    Args:
        view: what the policy was shown.
        tenant: the tenant.

    Returns:
        A number in (0, 1); a half where it has no answer yet.
    """
    answers, samples = (view.feedback or {}).get(tenant, (0, 0))
    return (samples + 1) / (answers + 2)


Value = tuple[bool, float, int, int]  # whether feedback has come, its rate, begin, and number


class RecordedSlice(NamedTuple):
    """What a launch records of a prompt: the request, its places with bytes, and its value."""

    request: int
    sizes: tuple[tuple[Place, int], ...]
    value: Value


class HeldRecords:
    """The records that no sample uses yet, in the order in which they give way.

    Those without feedback come first, of tenants whose answers get little of it, and the oldest
    first: their feedback is the least likely to come still.

    Args:
        view: what the policy was shown.
        plan: the plan that is written.
        rules: the settings.

    Attributes:
        left: those that the plan has not dropped.
        freed: bytes by place of what the plan has given back.
    """

    def __init__(self, view: View, plan: PlanBuilder, rules: RecordRules) -> None:
        self._view, self._plan, self._rules = view, plan, rules
        self._learning = [j for j in (*view.training, *view.waiting) if j.training is not None]
        self._due, self._serving = set[int](), set[int]()  # requests with feedback; in service
        self._dropped, self._moving = set[int](), set[int]()  # by the plan
        self.left, self.freed = list[Record](), dict[Place, int]()
        self._records = view.records or NO_RECORDS
        if self._records:
            self._serving = {job.job_id for job in (*view.serving, *view.waiting)}
            for job in self._learning:
                if job.training is not None and job.training.spec.learns:
                    on = [sample.request for sample in job.training.spec.samples]
                    self._due.update([request for request in on if request is not None])
            self.left = sorted(self._records.values(), key=self._value)

    def _value(self, record: Record) -> Value:
        rate = feedback_rate(self._view, record.tenant)
        return (record.request in self._due, rate, record.made_ns, record.request)

    def on_device(self, record: Record) -> list[Place]:
        """What a record holds on the device, but for keys and values of a request in service."""
        return [place for place in self._places(record) if self._plan.holds(place)]

    def on_host(self, record: Record) -> list[Place]:
        """What a record holds on the host, but for keys and values of a request in service."""
        return [place for place in map(on_host, self._places(record)) if self._plan.holds(place)]

    def held(self) -> dict[Place, int]:
        """Bytes by place of what would give way."""
        places = [p for r in self.left for p in (*self.on_device(r), *self.on_host(r))]
        return {place: self._plan.held(place) for place in places}

    def _places(self, record: Record) -> tuple[Place, ...]:
        """The places on the device that a record alone needs, held there or not."""
        places = record_places(record, self._view.device)
        if self._is_over(record):
            places = (*places, kv_place(record.request, device=self._view.device))
        return places

    def _is_over(self, record: Record) -> bool:
        """Whether a request has its answer: its keys and values are the record's."""
        return record.request not in self._serving

    def give_way(self, pool: Pool, below: Value | None = None) -> bool:
        """Has the next record leave a pool, or end.

        Args:
            pool: the device, or its host.
            below: of a record for which others make room; None: any gives way.

        Returns:
            Whether there was one in the pool.
        """
        for record in self.left:
            if below is not None and self._value(record) >= below:
                return False
            is_device = pool[0] is Tier.GPU
            places = self.on_device(record) if is_device else self.on_host(record)
            if not places:
                continue
            if not (is_device and self._rules.offload and self._moved(record, places)):
                self.drop(record)
            return True
        return False

    def has(self, piece: Slice) -> bool:
        """Whether the record is there that the sample of a slice starts behind.

        One that the plan moves is there with the next plan.
        """
        record = self._behind(piece)
        is_there = any([record is other for other in self.left])
        return is_there and record is not None and record.request not in self._moving

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
        return None if request is None else self._records.get(request)

    def _moved(self, record: Record, places: Sequence[Place]) -> bool:
        """Moves places of a record to the host, if it has room for all of them."""
        nbytes = sum(map(self._plan.held, places))
        if nbytes > self._plan.room((Tier.HOST, self._view.device)):
            return False
        for place in places:
            self._plan.move(place, on_host(place))
        self._moving.add(record.request)
        return True

    def drop(self, record: Record) -> None:
        """Gives a record back, with keys and values that are its own."""
        self.left = [other for other in self.left if other is not record]
        self._dropped.add(record.request)
        self._free(self._places(record))

    def _free(self, places: Iterable[Place]) -> None:
        """Gives places back, here or on the host."""
        for place in places:
            for there in (place, on_host(place)):
                if self._plan.holds(there):
                    self.freed[there] = self._plan.held(there)
                    self._plan.free(there)

    def give_kv(self, piece: Slice, source: Place) -> None:
        """Has the sample of a slice start behind its record: it gets the keys and values.

        The windows that it cannot use are given back.
        """
        record, training = self._behind(piece), piece.job.training
        assert record is not None and training is not None, "a slice behind a record"
        self._plan.move(source, kv_place(piece.job.job_id, device=self._view.device))
        used = training.adoptable(piece.microbatch)
        assert used is not None, "a record of which the sample can use a part"
        rest = record._replace(firsts=record.firsts[len(used.firsts) :])
        self._free(record_places(rest, self._view.device))

    def drop_old(self) -> None:
        """Gives records back whose weights are old, or that have waited for too long."""
        since_ns, age_s = 0, self._rules.max_age_s
        if age_s is not None:
            since_ns = self._view.now_ns - round(age_s * NS_PER_S)
        for record in [*self.left]:
            is_old = any([is_stale(record.adapter, one) for one in self._learners_of(record)])
            is_due = record.request in self._due
            if is_old or (record.made_ns < since_ns and not is_due and self._is_over(record)):
                self.drop(record)

    def _learners_of(self, record: Record) -> list[TrainingProgress]:
        """The progress of the job that may learn from a record; none once that is complete."""
        found = [job.training for job in self._learning if job.job_id == record.job_id]
        return [training for training in found if training is not None]

    def drop_restarted(self) -> None:
        """Gives records back of requests that the plan preempts: their tokens come again."""
        for record in [*self.left]:
            kv = kv_place(record.request, device=self._view.device)
            is_here = self._plan.holds(kv) or self._plan.holds(on_host(kv))
            if not self._is_over(record) and not is_here:
                self.drop(record)

    def hedge(self) -> None:
        """Has records leave the device until the room is there that is kept for serving."""
        pool: Pool = (Tier.GPU, self._view.device)
        wanted = int(self._rules.hedge * self._view.capacity_bytes[pool])
        while wanted and self._plan.room(pool) < wanted and self.give_way(pool):
            pass

    def record(self, batch: Sequence[Slice]) -> list[RecordedSlice]:
        """Has the launch that serves record those of its slices that the scheduling has marked.

        Records of less value make room. A slice for which there is none is served, and its record
        ends before it.

        Args:
            batch: the slices of the scheduling.

        Returns:
            What is recorded, which `offload` moves once the plan is complete.
        """
        view, plan, made = self._view, self._plan, list[RecordedSlice]()
        wanted = {s.job.job_id for s in batch if s.record and s.job.training is None}
        pool: Pool = (Tier.GPU, view.device)
        spare = int(self._rules.headroom * view.capacity_bytes[pool])
        for piece in plan.served() if wanted else ():
            job, learner = piece.job, learner_of(piece.job, self._learning)
            if job.job_id not in wanted or job.job_id in self._dropped or not job.may_record:
                continue
            if learner is None or learner.training is None:
                continue
            given = (job.job_id, learner.training, job.computed_tokens, piece.tokens, view.device)
            sizes, value = record_sizes(*given), self._value_of(job)
            need = spare + sum([nbytes for _, nbytes in sizes])
            while need > plan.room(pool) and self.give_way(pool, value):
                pass
            if need <= plan.room(pool):
                plan.grow_all([Grow(place, nbytes) for place, nbytes in sizes])
                made.append(RecordedSlice(job.job_id, sizes, value))
                self.left = [other for other in self.left if other.request != job.job_id]
        if made:
            plan.record({one.request: [place for place, _ in one.sizes] for one in made})
        return made

    def _value_of(self, job: Job) -> Value:
        """The value of the record of a request in prefill."""
        if (known := self._records.get(job.job_id)) is not None:
            return self._value(known)
        rate = feedback_rate(self._view, job.tenant)
        return (False, rate, self._view.now_ns, job.job_id)

    def offload(self, made: Iterable[RecordedSlice]) -> None:
        """Moves what a plan records to the host, the lowest layers first, if there is room."""
        host: Pool = (Tier.HOST, self._view.device)
        for one in made if self._rules.offload else ():
            for place, nbytes in one.sizes[: len(one.sizes) - self._rules.keep_tail]:
                while nbytes > self._plan.room(host) and self.give_way(host, one.value):
                    pass
                if nbytes > self._plan.room(host):
                    return
                self._plan.move(place, on_host(place))

    def bring_ahead(self, piece: Slice, spare: int) -> None:
        """Brings what the backwards behind a slice read of its record, where so much stays free."""
        for place in _ahead_of(piece, self._view.device, self._rules.ahead):
            away = on_host(place)
            if not self._plan.holds(away) or self._plan.holds(place):
                continue
            if self._plan.held(away) + spare <= self._plan.room(place.pool):
                self._plan.move(away, place)


def _ahead_of(piece: Slice, device: int, count: int) -> Iterator[Place]:
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
    for place in reversed(record_places(used, device)):
        if place.region.part in wanted:
            yield place
