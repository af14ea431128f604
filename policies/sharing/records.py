"""What becomes of records, and of what samples hold: kept, offloaded, brought back, or dropped.

Recording, offloading in the order of the forward and reloading in the order of the backward are
Alchemist's (arXiv 2503.01066); which record gives way first, and the hedge, are ours: the paper's
text says neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from engine.contract.adapters import AdapterVersion
from engine.contract.job import Job
from engine.contract.plan import Grow, Slice
from engine.contract.policy import PlanBuilder
from engine.contract.records import (
    is_stale,
    learner_of,
    record_places,
    record_sizes,
    window_places,
)
from engine.contract.regions import Kind, Place, Pool, Tier, kv_place
from engine.contract.training_progress import NO_RECORDS, Record
from engine.contract.view import KeptPages, View
from engine.contract.windows import on_host, sample_places
from policies.sharing.adapters import Without
from policies.sharing.time_shared import side_of
from policies.training.cycle import training_jobs

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
        host_headroom: share of the host that records leave free.
        hedge: share of the device that records make room for, before serving needs it.
        hedge_tokens: above 0, records make room for the prompts that wait as well, and for so many
            tokens of each request that waits or runs: more in a burst, little in a calm.
        max_age_s: a record without feedback is dropped so long after it was made; None: never.

    Raises:
        ValueError: a share is not in [0, 1), or a count below 0.
    """

    offload: bool = True
    keep_tail: int = 0
    ahead: int = 1
    headroom: float = 0.05
    host_headroom: float = 0.0
    hedge: float = 0.05
    hedge_tokens: int = 0
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("headroom", "host_headroom", "hedge"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"records: {name} is {getattr(self, name)}, must be in [0, 1)")
        for name in ("keep_tail", "ahead", "hedge_tokens"):
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
        A number in (0, 1); a half where no answer is old enough to tell.
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

    There may be hundreds, with several places each, and every plan asks for what they hold: so the
    places of a record are looked up once, and records are put in order only where one gives way.

    Args:
        view: what the policy was shown.
        plan: the plan that is written.
        rules: the settings.

    Attributes:
        left: by request, those that the plan has not dropped.
        freed: bytes by place of what the plan has given back.
    """

    def __init__(self, view: View, plan: PlanBuilder, rules: RecordRules) -> None:
        self._view, self._plan, self._rules = view, plan, rules
        self._learning = [j for j in (*view.training, *view.waiting) if j.training is not None]
        self._dropped, self._moving = set[int](), set[int]()  # by the plan
        self._past = 0  # records before this one in the order have nothing on the device
        self._records = view.records or NO_RECORDS
        self.left, self.freed = dict(self._records), dict[Place, int]()
        jobs = (*view.serving, *view.waiting) if self.left else ()
        self._serving = {job.job_id for job in jobs}

    @cached_property
    def _due(self) -> set[int]:
        """Requests with feedback."""
        learning = [job.training for job in self._learning if job.training is not None]
        samples = [sample for one in learning if one.spec.learns for sample in one.spec.samples]
        return {sample.request for sample in samples if sample.request is not None}

    @cached_property
    def _order(self) -> list[Record]:
        return sorted(self._records.values(), key=self._value)

    def _value(self, record: Record) -> Value:
        rate = feedback_rate(self._view, record.tenant)
        return (record.request in self._due, rate, record.made_ns, record.request)

    def on_device(self, record: Record) -> list[Place]:
        """What a record holds on the device, but for keys and values of a request in service."""
        return [place for place in self._places(record)[0] if self._plan.holds(place)]

    def on_host(self, record: Record) -> list[Place]:
        """What a record holds on the host, but for keys and values of a request in service."""
        return [place for place in self._places(record)[1] if self._plan.holds(place)]

    def held(self) -> dict[Place, int]:
        """Bytes by place of what would give way."""
        found, booked = dict[Place, int](), self._view.held_bytes
        for request, record in self.left.items():
            # What the plan has not moved is as the books have it.
            held = booked.get if request not in self._moving else self._held
            for places in self._places(record):
                for place in places:
                    if nbytes := held(place, 0):
                        found[place] = nbytes
        return found

    def _held(self, place: Place, default: int) -> int:
        return self._plan.held(place) if self._plan.holds(place) else default

    def _places(self, record: Record) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """The places that a record alone needs, on the device and on the host; held or not."""
        is_over = self._is_over(record)
        return _places_of(record.request, record.firsts, record.units, self._view.device, is_over)

    def _is_over(self, record: Record) -> bool:
        """Whether a request has its answer: its keys and values are the record's."""
        return record.request not in self._serving

    def give_way(self, pool: Pool, below: Value | None = None, at_once: bool = False) -> bool:
        """Has the next record leave a pool, or end.

        Args:
            pool: the device, or its host.
            below: of a record for which others make room; None: any gives way.
            at_once: whether its bytes are needed now. Then it ends: those of a record that goes to
                the host come once its copy has ended, and what takes them waits for that.

        Returns:
            Whether there was one in the pool.
        """
        is_device = pool[0] is Tier.GPU
        for at in range(self._past if is_device else 0, len(self._order)):
            record = self._order[at]
            if self.left.get(record.request) is not record:
                continue
            if below is not None and self._value(record) >= below:
                return False
            places = self.on_device(record) if is_device else self.on_host(record)
            if not places:
                continue
            if is_device:
                self._past = at
            may_move = is_device and self._rules.offload and not at_once
            if not (may_move and self._moved(record, places)):
                self.drop(record)
            return True
        return False

    def has(self, piece: Slice) -> bool:
        """Whether the record is there that the sample of a slice starts behind.

        One that the plan moves is there with the next plan.
        """
        record = self._behind(piece)
        if record is None or self.left.get(record.request) is not record:
            return False
        return record.request not in self._moving

    def keep_for(self, piece: Slice) -> None:
        """The record that the sample of a slice starts behind does not give way to it."""
        if (record := self._behind(piece)) is not None:
            self.left.pop(record.request, None)

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
        if nbytes > self._host_room():
            return False
        for place in places:
            self._plan.move(place, on_host(place))
        self._moving.add(record.request)
        return True

    def _host_room(self) -> int:
        """Bytes of the host that records may take."""
        pool: Pool = (Tier.HOST, self._view.device)
        kept = int(self._rules.host_headroom * self._view.capacity_bytes.get(pool, 0))
        return self._plan.room(pool) - kept

    def drop(self, record: Record) -> None:
        """Gives a record back, with keys and values that are its own."""
        self.left.pop(record.request, None)
        self._dropped.add(record.request)
        self._free(*self._places(record))

    def _free(self, here: Iterable[Place], away: Iterable[Place]) -> None:
        """Gives places back, on the device and on the host."""
        for there in (*here, *away):
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
        places = record_places(rest, self._view.device)
        self._free(places, map(on_host, places))

    def drop_old(self) -> None:
        """Gives records back whose weights are old, or that have waited for too long."""
        since_ns, age_s = 0, self._rules.max_age_s
        if age_s is not None:
            since_ns = self._view.now_ns - round(age_s * NS_PER_S)
        old = dict[tuple[int, AdapterVersion], bool]()  # by the job that would learn, and version
        for record in [*self.left.values()]:
            key = record.job_id, record.adapter
            if (is_old := old.get(key)) is None:
                is_old = old[key] = self._is_old(*key)
            if not is_old and record.made_ns < since_ns and self._is_over(record):
                is_old = record.request not in self._due
            if is_old:
                self.drop(record)

    def _is_old(self, job_id: int, version: AdapterVersion) -> bool:
        """Whether a job may not learn from a version; not so once the job is complete."""
        found = [job.training for job in self._learning if job.job_id == job_id]
        return any([is_stale(version, training) for training in found if training is not None])

    def drop_restarted(self) -> None:
        """Gives records back of requests that the plan preempts: their tokens come again."""
        for request in sorted(self._serving & self.left.keys()):
            kv = kv_place(request, device=self._view.device)
            if not self._plan.holds(kv) and not self._plan.holds(on_host(kv)):
                self.drop(self.left[request])

    def hedge(self) -> None:
        """Has records leave the device until the room is there that is kept for serving."""
        pool: Pool = (Tier.GPU, self._view.device)
        share = int(self._rules.hedge * self._view.capacity_bytes[pool])
        wanted = max(share, self._foreseen_bytes())
        while wanted and self._plan.room(pool) < wanted and self.give_way(pool):
            pass

    def _foreseen_bytes(self) -> int:
        """Keys and values of prompts that wait, and of the next tokens of all requests."""
        view, ahead = self._view, self._rules.hedge_tokens
        if not ahead:
            return 0
        prompts = [job.prompt_tokens for job in view.waiting if job.training is None]
        waiting = sum([view.page.bytes_for(tokens + ahead) for tokens in prompts])
        return waiting + len(view.serving) * view.page.bytes_for(ahead)

    def record(self, batch: Sequence[Slice]) -> list[RecordedSlice]:
        """Has the launch that serves record those of its slices that the scheduling has marked.

        A record takes bytes that are free now: a launch that took others would wait, for the copy
        of an earlier record perhaps. Records of less value make room for those that come later. A
        slice for which there is no room is served, and its record ends before it.

        Args:
            batch: the slices of the scheduling.

        Returns:
            What is recorded, which `offload` moves once the plan is complete.
        """
        view, plan, made = self._view, self._plan, list[RecordedSlice]()
        wanted = {s.job.job_id for s in batch if s.record and s.job.training is None}
        pool: Pool = (Tier.GPU, view.device)
        spare, coming = int(self._rules.headroom * view.capacity_bytes[pool]), 0
        for piece in plan.served() if wanted else ():
            job, learner = piece.job, learner_of(piece.job, self._learning)
            if job.job_id not in wanted or job.job_id in self._dropped or not job.may_record:
                continue
            if learner is None or learner.training is None:
                continue
            first = plan.start_of(job)
            given = (job.job_id, learner.training, first, piece.tokens, view.device)
            sizes, value = record_sizes(*given), self._value_of(job)
            need = spare + sum([nbytes for _, nbytes in sizes])
            free = plan.room(pool) - view.coming_bytes[pool] - coming
            if need > free:
                before = plan.room(pool)
                while need > plan.room(pool) and self.give_way(pool, value):
                    pass
                coming += plan.room(pool) - before
            else:
                plan.grow_all([Grow(place, nbytes) for place, nbytes in sizes])
                made.append(RecordedSlice(job.job_id, sizes, value))
                self.left.pop(job.job_id, None)
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
            for place, nbytes in one.sizes[: max(0, len(one.sizes) - self._rules.keep_tail)]:
                while nbytes > self._host_room() and self.give_way(host, one.value):
                    pass
                if nbytes > self._host_room():
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


@lru_cache(maxsize=1 << 12)
def _places_of(
    request: int, firsts: tuple[int, ...], units: tuple[int, ...], device: int, is_over: bool
) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Where a record may lie, on the device and on the host.

    Args:
        request: its request.
        firsts: the first tokens of its windows.
        units: whose places it has.
        device: the device.
        is_over: whether the request's keys and values are the record's.

    Returns:
        Its places on the device, and in the same order those on the host.
    """
    places = window_places(request, firsts, units, device)
    if is_over:
        places = (*places, kv_place(request, device=device))
    return places, tuple(map(on_host, places))


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


class HeldSamples:
    """What samples under way hold, which is room for serving.

    Where serving needs bytes of it, the sample of the last job gives all of its bytes back and
    begins anew, then that of the job before it.

    Records give way before samples do.

    Args:
        view: what the policy was shown.
        plan: the plan that is written.
        gives_way: whether samples give way at all.
        records: those that no sample uses; None: there are none.

    Attributes:
        restarted: numbers of the jobs whose samples begin anew.
    """

    def __init__(
        self, view: View, plan: PlanBuilder, gives_way: bool, records: HeldRecords | None = None
    ) -> None:
        self._plan, self._records = plan, records
        jobs = [job for job in training_jobs(view) if _finetunes(job)] if gives_way else []
        found = [(job, _held_places(job, plan, view.device)) for job in jobs]
        self._jobs = [(job, places) for job, places in found if places]
        self.restarted: set[int] = set()

    def beside(self, view: View, plan: PlanBuilder) -> tuple[View, PlanBuilder]:
        """What serving is shown and writes to: as if samples held nothing.

        Args:
            view: what the policy was shown.
            plan: the plan that is written.

        Returns:
            A view without samples, and a builder that has room made where a pool lacks it.
        """
        own = {place: plan.held(place) for _, places in self._jobs for place in places}
        own |= {} if self._records is None else self._records.held()
        freed = {} if self._records is None else dict(self._records.freed)
        if not own and not freed:
            return side_of(view, trains=False), plan
        if view.kept_pages is not None:
            pages = view.kept_pages()
            freed, own = (_unshared(nbytes, pages, view.page.nbytes) for nbytes in (freed, own))
        nbytes, free = by_pool(own), Counter(view.free_bytes)
        free.update(nbytes)
        free.update(by_pool(freed))
        held = Without(view.held_bytes, own.keys() | freed.keys())
        shown = side_of(view, trains=False, held_bytes=held, free_bytes=free)
        share = {pool: plan.room(pool) + count for pool, count in nbytes.items()}
        return shown, plan.within(share, self._make_room, own.keys())

    def give_way_to(self, job: Job) -> None:
        """Has the sample of the last job begin anew, if that came behind another.

        Args:
            job: a job whose sample finds no room.
        """
        if self._jobs and self._jobs[-1][0] is not job:
            self._restart_last()

    def _make_room(self, pool: Pool, nbytes: int) -> None:
        while self._plan.room(pool) < nbytes:
            if self._records is not None and self._records.give_way(pool, at_once=True):
                continue
            if not self._jobs:
                return
            self._restart_last()

    def _restart_last(self) -> None:
        job, places = self._jobs.pop()
        for place in places:
            self._plan.free(place)
        self._plan.restart(job)
        self.restarted.add(job.job_id)


def _unshared(nbytes: Mapping[Place, int], pages: KeptPages, page_nbytes: int) -> dict[Place, int]:
    """Bytes by place that come back: of keys and values only pages that no other place holds."""

    def back(place: Place, size: int) -> int:
        may_share = place.region.kind is Kind.KV and place.tier is Tier.GPU
        return pages.free(place) * page_nbytes if may_share else size

    return {place: back(place, size) for place, size in nbytes.items()}


def by_pool(nbytes: Mapping[Place, int]) -> Counter[Pool]:
    """Bytes of places, by the pools in which they lie.

    Args:
        nbytes: by place.

    Returns:
        Sums; 0 of a pool without a place.
    """
    found = Counter[Pool]()
    for (_, tier, device), size in nbytes.items():
        found[tier, device] += size
    return found


def _held_places(job: Job, plan: PlanBuilder, device: int) -> list[Place]:
    """What the sample under way of a job holds; nothing where its updates are due."""
    training = job.training
    if training is None or training.sample is None:
        return []
    return [place for place in sample_places(training, device) if plan.holds(place)]


def _finetunes(job: Job) -> bool:
    return job.training is not None and job.training.spec.finetunes
