"""The check of a plan's training before it is booked: order, places, contents, frees, exchanges.

The check changes no books: the changes of the plan lie over them while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NoReturn, Protocol

from engine.contract.adapter_check import is_publication
from engine.contract.footprint import Exchange, gather
from engine.contract.job import Job
from engine.contract.layout import Layout, TrainingLayout
from engine.contract.plan import (
    COMPUTE_LANE,
    COMPUTE_LANES,
    HOST_LANE,
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Pattern,
    Plan,
    Slice,
)
from engine.contract.progress import advance_training, check_device, check_order, check_stages
from engine.contract.records import is_adoption
from engine.contract.regions import (
    NAMES,
    SHARED_OWNER,
    STATES,
    Kind,
    PageSize,
    Place,
    Pool,
    Tier,
    Work,
    gradient,
    is_workspace,
    told,
)
from engine.contract.rules import ContractError, Rule
from engine.contract.training_needs import (
    Key,
    Needs,
    counted_from,
    is_gathered,
    last_use,
    needs_of,
    reuses_weights,
    task_name,
)
from engine.contract.training_progress import TrainingProgress
from engine.contract.windows import window_footprint

EMPTY = -1  # the stamp of a place that the plan begins, and has not written
GONE = -2  # the stamp of a place that is not held
ISSUED = 1 << 62  # a stamp above all that were issued


class Stamp(Protocol):
    """The books' mark of a place, as far as its contents go."""

    written: int  # equal stamps mean equal contents


class TrainingContract:
    """Checks plans against the rules of training. Jobs come with `admit` and end with `leave`.

    Args:
        layout: what the planner has decided.
        marks: gives the stamps of all places that are held.
        held_bytes: bytes of each place that is held.
        pools: the pools of the machine, in any of which a region may have a copy.
        page: the page size of KV.
    """

    def __init__(
        self,
        layout: Layout,
        marks: Callable[[], Mapping[Place, Stamp]],
        held_bytes: Mapping[Place, int],
        pools: Iterable[Pool],
        page: PageSize,
    ) -> None:
        self.layout, self.marks, self.held_bytes = layout, marks, held_bytes
        self.page = page
        self.pools = tuple(pools)
        self.resident = {place.region for place in layout.places}
        self.jobs: dict[int, Job] = {}  # jobs that have arrived, and have not ended
        self.ended: set[int] = set()  # jobs whose memory a plan may free
        self._trains = bool(layout.training)
        self._needs: dict[Key, Needs] = {}
        self.elsewhere = lru_cache(maxsize=NAMES)(self._elsewhere)

    def _elsewhere(self, place: Place) -> tuple[Place, ...]:
        """The places of a region in all other pools."""
        region, own = place.region, place.pool
        return tuple([Place(region, *pool) for pool in self.pools if pool != own])

    def admit(self, job: Job) -> None:
        """A training job has arrived.

        Args:
            job: its job.
        """
        if job.training is not None:
            check_stages(job.training, self.layout.alternatives.get(job.job_id, ()))
        self.jobs[job.job_id] = job
        self._trains = True

    def leave(self, job_id: int) -> None:
        """A job has ended: its memory may be freed.

        Args:
            job_id: the number of the job.
        """
        self.jobs.pop(job_id, None)
        self.ended.add(job_id)
        self._forget(job_id)

    def _forget(self, job_id: int) -> None:
        self._needs = {key: found for key, found in self._needs.items() if key[0] != job_id}

    def concerns(self, plan: Plan) -> bool:
        """Whether a plan trains, exchanges, or moves or gives back anything but KV.

        Args:
            plan: the plan of a policy.

        Returns:
            False where no rule of training can be broken.
        """
        kv, trains = Kind.KV, self._trains
        for op in plan.ops:
            kind = type(op)
            if kind is Grow or (kind is Compute and not trains):
                continue
            if isinstance(op, Compute):
                if op.reads or len(op.writes) > len(op.slices) or _trains_any(op.slices):
                    return True
            elif isinstance(op, Free):
                if op.place.region.kind is not kv:
                    return True
            elif isinstance(op, Copy):
                if op.src.region.kind is not kv or op.dst.region.kind is not kv:
                    return True
            elif isinstance(op, Collective):
                return True
        return trains and any([job.training is not None for job in plan.restart])

    def check(self, plan: Plan, device: int = 0) -> None:
        """Checks a plan.

        Args:
            plan: the plan of a policy.
            device: the device that it is for.

        Raises:
            ContractError: the plan breaks a rule; nothing is changed.
        """
        if self.concerns(plan):
            _Reading(self, plan, device).run()

    def relay(self, job: Job, number: int) -> None:
        """A job goes on by another of its layouts, given by its number among the alternatives."""
        job._train_by(self.layout.alternatives[job.job_id][number])
        self._forget(job.job_id)

    def needs(self, piece: Slice, training: TrainingProgress, op: Compute, reuses: bool) -> Needs:
        """The needs of a task's launch in this step, cached for every microbatch of it.

        Args:
            piece: the task.
            training: the progress of its job, when the launch is issued.
            op: the launch that holds the task.
            reuses: whether gradients lie over weights.

        Returns:
            The places of the launch, for its microbatch counted from the first of the step.

        Raises:
            ValueError: the job's recipe does not allow `reuses`.
        """
        first = counted_from(training)
        assert piece.layers is not None, "a task has one part"
        k, part = piece.microbatch - first, piece.layers.start
        key = (piece.job.job_id, piece.work, part, k, op.again, op.on, op.device, reuses)
        found = self._needs.get(key)
        if found is None:
            found = needs_of(piece._replace(microbatch=k), training, op, reuses)
            self._needs[key] = found
        return found


def _trains_any(slices: Iterable[Slice]) -> bool:
    try:
        return any([piece.job.training is not None for piece in slices])
    except AttributeError:
        return True  # `_Reading` names what is no slice


class _Stamps(dict[Place, int]):
    """Stamps of contents as a plan moves them; of other places as they are in the books."""

    def __init__(self, marks: Mapping[Place, Stamp]) -> None:
        self._marks = marks

    def __missing__(self, place: Place) -> int:
        mark = self._marks.get(place)
        found = self[place] = GONE if mark is None else mark.written
        return found


class _Reading:
    """One plan as it is read, operation by operation."""

    def __init__(self, contract: TrainingContract, plan: Plan, device: int) -> None:
        self._contract, self._plan, self._device = contract, plan, device
        self._elsewhere = contract.elsewhere
        self._stamps = _Stamps(contract.marks())
        self._bytes: dict[Place, int] = {}  # held, where the plan changes that
        self._ahead: dict[int, TrainingProgress] = {}  # progress of jobs, as the plan moves it
        self._begun: list[Place] = []  # model states with nothing in them
        self._due: dict[Place, Exchange] = {}  # by all that it touches: exchanges to follow at once
        self._given: dict[int, int] = {}  # by job that learns, the request whose KV it got
        self._now = ISSUED

    def run(self) -> None:
        """Raises ContractError at the first breach."""
        plan = self._plan
        for job in plan.restart:
            self._restart(job)
        for op in plan.ops:
            if isinstance(op, Free):
                if self._concerns(op.place):
                    self._free(op.place)
            elif isinstance(op, Grow):
                if self._concerns(op.place):
                    self._grow(op.place, op.nbytes)
            elif isinstance(op, Copy):
                if self._concerns(op.src) or self._concerns(op.dst):
                    self._copy(op)
            elif isinstance(op, Compute):
                self._compute(op)
            elif isinstance(op, Collective):
                self._collective(op)
        for exchange in self._due.values():
            place = exchange.writes[0]
            what = f"{exchange.pattern} of {told(place)} is missing behind the backward"
            raise ContractError(Rule.EXCHANGE, what, place.region.owner)
        for place in self._begun:
            if self._stamps[place] == EMPTY:
                what = f"{told(place)} begins, and nothing is written to it"
                raise ContractError(Rule.TRAINING_CONTENTS, what, place.region.owner)

    def _concerns(self, place: Place) -> bool:
        """Whether a place is not that of a request's KV: a finetuning job has pages, too."""
        region = place.region
        return region.kind is not Kind.KV or region.owner in self._contract.jobs

    def _restart(self, job: Job) -> None:
        """A finetuning job begins its sample anew; no other job can take back what it has added."""
        training = job.training
        if training is None or training.layout is None:
            return
        if not training.spec.finetunes:
            what = "a restart: what it has added up and kept cannot be taken back"
            raise ContractError(Rule.RESTART, what, job.job_id)
        ahead = self._ahead[job.job_id] = training.copy()
        ahead._forget()

    # ---- books
    def _newest_elsewhere(self, place: Place) -> int:
        """The stamp of the newest copy of a region in other pools."""
        stamps = self._stamps
        return max([stamps[other] for other in self._elsewhere(place)], default=GONE)

    def _newest(self, place: Place) -> int:
        return max(self._stamps[place], self._newest_elsewhere(place))

    def _held(self, place: Place) -> int:
        """Bytes of a place that is not written yet."""
        found = self._bytes.get(place)
        return self._contract.held_bytes.get(place, 0) if found is None else found

    def _training(self, job_id: int) -> TrainingProgress | None:
        """A job's progress as the plan has moved it; None for a job that has not arrived."""
        found = self._ahead.get(job_id)
        if found is None and (job := self._contract.jobs.get(job_id)) is not None:
            return job.training
        return found

    def _is_left(self, owner: int) -> bool:
        """Whether an owner's job has ended, or is refused by the plan."""
        refused = [job.job_id for job in self._plan.refuse]
        return owner in self._contract.ended or owner in refused

    def _write(self, places: Iterable[Place]) -> None:
        stamps, now = self._stamps, self._now
        for place in places:
            stamps[place] = now
        self._now = now + 1

    def _layout(self, owner: int) -> TrainingLayout | None:
        """The layout of an owner that trains, or will train."""
        return None if self._is_left(owner) else self._contract.layout.training.get(owner)

    # ---- memory
    def _grow(self, place: Place, nbytes: int) -> None:
        if self._stamps[place] != GONE:
            self._bytes[place] = self._held(place) + nbytes
            return
        self._bytes[place], self._stamps[place] = nbytes, EMPTY
        if place.region.kind in STATES and self._layout(place.region.owner) is not None:
            self._begun.append(place)

    def _copy(self, op: Copy) -> None:
        src, dst = op.src, op.dst
        is_same = src.tier is dst.tier and src.device == dst.device
        if is_adoption(op):
            self._adopt(src, dst)
        elif is_same or (src.region != dst.region and not is_publication(op)):
            what = f"copy of {told(src)} onto {told(dst)}: not the same in another pool"
            _refuse(Rule.COPY, what, src.region.owner)
        stamp = self._stamps[src]
        if stamp == GONE:
            what = f"copy of {told(src)}, which is not held"
            _refuse(Rule.HELD, what, src.region.owner)
        if self._stamps[dst] > stamp:
            what = f"copy of {told(src)} onto {told(dst)}, which is newer"
            _refuse(Rule.COPY, what, src.region.owner)
        if self._due:
            self._keep_due((src, dst))
        self._stamps[dst] = stamp
        if stamp <= 0 or src.region != dst.region:
            self._bytes[dst] = self._held(src)
            if stamp == EMPTY and src in self._begun:
                self._begun.append(dst)

    def _adopt(self, src: Place, dst: Place) -> None:
        """Keys and values of a recorded request become those of a sample that begins."""
        job_id, training = dst.region.owner, self._training(dst.region.owner)
        what = f"copy of {told(src)} onto {told(dst)}"
        if training is None or src.region.owner not in training.records:
            _refuse(Rule.COPY, f"{what}: there is no record that the job may use", job_id)
        if self._stamps[dst] != GONE or dst.pool != (Tier.GPU, self._device):
            _refuse(Rule.COPY, f"{what}: the sample begins on the device, with nothing", job_id)
        self._given[job_id] = src.region.owner

    def _free(self, place: Place) -> None:
        stamp = self._stamps[place]
        self._stamps[place] = GONE
        if is_workspace(place) and stamp != GONE:
            return
        if self._due:
            self._keep_due((place,))
        if stamp > 0 or (stamp == 0 and place.region.kind in STATES):
            if self._newest_elsewhere(place) < stamp and (use := self._use_of(place, stamp)):
                what = f"free of {told(place)}, the only copy as new, {use}"
                _refuse(Rule.TRAINING_FREED, what, place.region.owner)
        elif stamp == GONE:
            what = f"free of {told(place)}, which is not held"
            _refuse(Rule.HELD, what, place.region.owner)

    def _use_of(self, place: Place, stamp: int) -> str:
        """The last use of a place's contents, in words; "" where there is none."""
        owner, kind, part, _ = place.region
        if self._is_left(owner):
            return ""
        if kind in STATES:
            return "of states that are always wanted"
        layout, training = self._layout(owner), self._training(owner)
        if layout is None or training is None:
            return ""
        if is_gathered(place):  # gradients may lie there, beside those over the own weights
            own = Place(place.region._replace(kind=Kind.WEIGHT, slot=0), place.tier, place.device)
            return f"before gradients of chunk {part} are reduced" * (self._stamps[own] == stamp)
        return last_use(place, training)

    def _keep_due(self, places: Iterable[Place]) -> None:
        """No operation may come between gradients and the exchange that is due."""
        for place in places:
            if (exchange := self._due.get(place)) is not None:
                what = f"{told(place)} is touched before its {exchange.pattern}"
                _refuse(Rule.EXCHANGE, what, place.region.owner)

    # ---- launches
    def _compute(self, op: Compute) -> None:
        pieces = list[Slice]()
        for piece in op.slices:
            if not isinstance(piece, Slice) or not isinstance(piece.job, Job):
                _refuse(Rule.ANSWER, f"a launch of {type(piece).__name__}, not of slices of jobs")
            if piece.job.training is not None:
                pieces.append(piece)
        if not pieces:
            self._serves(op)
            return
        piece = pieces[0]
        job_id = piece.job.job_id
        if self._contract.jobs.get(job_id) is not piece.job:
            _refuse(Rule.JOB, "a slice of a training job that has ended, or never came", job_id)
        if len(pieces) > 1:
            what = f"{len(pieces)} tasks in one launch: each has its own"
            _refuse(Rule.TRAINING_PLACES, what, job_id)
        if op.device != self._device:
            _refuse(Rule.DEVICE, f"a launch on device {op.device}", job_id)
        training = self._ahead.get(job_id)
        if training is None:
            assert piece.job.training is not None
            training = self._ahead[job_id] = piece.job.training.copy()
        check_order(piece, training, op.again)
        if piece.record:
            used = training.adoptable(piece.microbatch)
            if used is None or self._given.get(job_id) != used.request:
                what = f"{task_name(piece)} behind a record, without its keys and values"
                _refuse(Rule.TRAINING_CONTENTS, what, job_id)
        if training.layout is not None:
            self._check_launch(op, piece, training)
        self._write(op.writes)
        if not op.again:
            advance_training(piece, training)

    def _serves(self, op: Compute) -> None:
        """A launch that only serves touches no memory of training."""
        for place in (*op.reads, *op.writes):
            owner, kind, _, _ = place.region
            if kind is not Kind.KV and self._layout(owner) is not None:
                what = f"a launch touches {told(place)}, and does not train it"
                _refuse(Rule.TRAINING_PLACES, what, owner)
        self._write(op.writes)

    def _check_window(self, op: Compute, piece: Slice, training: TrainingProgress) -> None:
        """A launch of a finetuning job names the places of its footprint, and finds them."""
        job_id, work = piece.job.job_id, piece.work
        if op.on not in COMPUTE_LANES:
            _refuse(Rule.LANE, f"{work} of a sample on lane {op.on}", job_id)
        if len(op.slices) > 1 and work is not Work.FORWARD:
            _refuse(Rule.TRAINING_PLACES, f"{task_name(piece)} beside served jobs: alone", job_id)
        footprint = window_footprint(piece, training, self._contract.page, self._device)
        self._check_named(op, piece, footprint.reads, footprint.writes)
        for place, nbytes in footprint.sizes:
            self._check_size(place, nbytes, piece)
        for place in footprint.reads:
            self._check_read(place, piece)

    def _check_launch(self, op: Compute, piece: Slice, training: TrainingProgress) -> None:
        job_id, work, stamps = piece.job.job_id, piece.work, self._stamps
        if training.spec.finetunes:
            self._check_window(op, piece, training)
            return
        if op.on != COMPUTE_LANE and not (work is Work.UPDATE and op.on == HOST_LANE):
            _refuse(Rule.LANE, f"{work} on lane {op.on}", job_id)
        reuses = self._reuses(op, piece, training)
        check_device(piece, op.device, training)
        needs, first = self._contract.needs(piece, training, op, reuses), counted_from(training)
        writes = needs.writes_later(first)
        reads = needs.reads_later(first)
        if op.reads != reads or op.writes != writes or len(op.slices) > 1:
            self._check_named(op, piece, reads, writes)
        for place, nbytes in needs.sizes:
            if stamps[place] <= 0:  # else the launch that wrote to it was checked
                self._check_size(place, nbytes, piece)
        for i, nbytes in needs.kept:
            self._check_size(writes[i], nbytes, piece)
        for place in (*op.reads, *needs.changes, *needs.sums):
            stamp = stamps[place]
            if stamp <= 0 or self._newest_elsewhere(place) > stamp:
                self._check_read(place, piece)
        for place in needs.begins:
            if self._newest(place) > 0:
                what = f"{task_name(piece)} begins {told(place)}, in which older gradients are"
                _refuse(Rule.TRAINING_CONTENTS, what, job_id)
        if needs.state is not None:
            self._check_state(needs.state, piece, training)
        for place, own in needs.gathered:
            if self._stamps[place] < self._newest(own):
                what = f"{task_name(piece)} reads {told(place)}, older than the own part"
                _refuse(Rule.TRAINING_CONTENTS, what, job_id)
        if self._due:
            self._keep_due((*op.reads, *op.writes))
        for exchange in needs.due:
            self._due.update(dict.fromkeys((*exchange.reads, *exchange.writes), exchange))

    def _reuses(self, op: Compute, piece: Slice, training: TrainingProgress) -> bool:
        """Whether gradients lie, or are to lie, over weights; where the recipe allows that."""
        spec, layers = training.spec, piece.layers
        if spec.recipe.dtype != "bfloat16" or spec.microbatches > 1 or layers is None:
            return False
        if piece.work is not Work.UPDATE:
            return reuses_weights(op, piece, training)
        return self._newest(gradient(piece.job.job_id, layers.start)) == GONE

    def _check_named(
        self, op: Compute, piece: Slice, reads: tuple[Place, ...], writes: tuple[Place, ...]
    ) -> None:
        """A launch names all places of its task; other places that it writes hold the newest."""
        job_id, written = piece.job.job_id, {*op.writes}
        for place in writes:
            if place not in written:
                what = f"{task_name(piece)} does not write {told(place)}"
                _refuse(Rule.TRAINING_PLACES, what, job_id)
        named = written.union(op.reads)
        for place in reads:
            if place not in named:
                what = f"{task_name(piece)} does not read {told(place)}"
                _refuse(Rule.TRAINING_PLACES, what, job_id)
        served = {other.job.job_id for other in op.slices if other is not piece}
        for place in op.writes:
            owner, kind, _, _ = place.region
            if kind in (Kind.KV, Kind.ACTIVATION) and owner in served:
                continue  # of activations RecordCheck sees to it
            if owner != job_id or (kind is Kind.KV and place not in writes):
                what = f"{task_name(piece)} writes {told(place)}, which is not its own"
                _refuse(Rule.TRAINING_PLACES, what, job_id)
            if place not in writes:
                self._check_read(place, piece)

    def _check_size(self, place: Place, nbytes: int, piece: Slice) -> None:
        held = 0 if self._stamps[place] == GONE else self._held(place)
        if held < nbytes:
            what = f"{task_name(piece)} finds {held} bytes of {nbytes} at {told(place)}"
            _refuse(Rule.TRAINING_PLACES, what, piece.job.job_id)

    def _check_read(self, place: Place, piece: Slice) -> None:
        stamp = self._stamps[place]
        is_own = place.region.owner == piece.job.job_id
        if not is_own and (place.region.kind is not Kind.ACTIVATION or stamp > 0):
            return  # it may read places of other owners
        if stamp <= 0 and not (stamp == 0 and place.region.kind in STATES):
            what = f"{task_name(piece)} reads {told(place)}, in which nothing is"
            _refuse(Rule.TRAINING_CONTENTS, what, piece.job.job_id)
        if self._newest_elsewhere(place) > stamp:
            what = f"{task_name(piece)} reads {told(place)}, which is newer in another tier"
            _refuse(Rule.TRAINING_CONTENTS, what, piece.job.job_id)

    def _check_state(self, place: Place, piece: Slice, training: TrainingProgress) -> None:
        """Optimizer states are the newest, or begin with the first update, empty."""
        is_first = training.updated[place.region.part] == training.spec.begun_steps
        is_new = is_first and place.region not in self._contract.resident
        if not (is_new and self._newest(place) <= 0):
            self._check_read(place, piece)

    # ---- groups
    def _collective(self, op: Collective) -> None:
        places = (*op.reads, *op.writes)
        owner = places[0].region.owner if places else SHARED_OWNER
        layout, training = self._layout(owner), self._training(owner)
        if layout is None or training is None or layout.ranks == 1:
            _refuse(Rule.EXCHANGE, f"{op.pattern} without a group of devices", owner)
        if op.device != self._device:
            _refuse(Rule.DEVICE, f"{op.pattern} on device {op.device}", owner)
        if op.pattern is Pattern.ALL_GATHER:
            exchange = self._gather(op, layout, owner)
        elif (found := self._due.get(places[0])) is None:
            what = f"{op.pattern} of {told(places[0])}, which is not due: directly behind the "
            _refuse(Rule.EXCHANGE, what + "backward that completes gradients, once", owner)
        else:
            exchange = found
        for name in ("pattern", "reads", "writes", "nbytes"):
            given, wanted = getattr(op, name), getattr(exchange, name)
            if given != wanted:
                if isinstance(wanted, tuple):
                    given, wanted = ", ".join(map(told, given)), ", ".join(map(told, wanted))
                what = f"{op.pattern}: {name} {given}, not {wanted}"
                _refuse(Rule.EXCHANGE, what, owner)
        if op.pattern is not Pattern.ALL_GATHER:
            for place in places:
                self._due.pop(place, None)
        self._write(op.writes)

    def _gather(self, op: Collective, layout: TrainingLayout, owner: int) -> Exchange:
        """The exchange that an all_gather of a chunk's weights must be, if it may come now."""
        if self._due:
            self._keep_due((*op.reads, *op.writes))
        place = op.writes[0] if op.writes else op.reads[0]
        chunk = place.region.part
        if not 0 <= chunk < len(layout.chunks) or not layout.chunks[chunk].remote_bytes:
            what = f"{op.pattern} of {told(place)}: all of it is here"
            _refuse(Rule.EXCHANGE, what, owner)
        exchange = gather(layout, owner, chunk, self._device)
        (own,), (away,) = exchange.reads, exchange.writes
        stamp = self._stamps[own]
        if stamp < max(0, self._newest(own)):
            _refuse(Rule.EXCHANGE, f"{op.pattern} reads {told(own)}, which is old", owner)
        if stamp > 0 and stamp == self._stamps[away]:
            what = f"{op.pattern} over gradients of {told(away)}"
            _refuse(Rule.EXCHANGE, what, owner)
        held, wanted = self._held(away), layout.chunks[chunk].remote_bytes
        if self._stamps[away] <= 0 and held < wanted:
            what = f"{op.pattern} finds {held} bytes of {wanted} at {told(away)}"
            _refuse(Rule.EXCHANGE, what, owner)
        return exchange


def _refuse(rule: Rule, what: str, job_id: int | None = None) -> NoReturn:
    raise ContractError(rule, what, job_id)
