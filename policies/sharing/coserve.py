"""Co-serving by tokens: each step serves first, and finetunes with the tokens that are left.

Both sides take their memory from one pool. Serving is planned as if a sample held nothing, and what
a sample holds gives way to keys and values. Pages that prefix caching keeps give way to samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from engine.contract.job import Job
from engine.contract.layout import Mode
from engine.contract.plan import COMPUTE_LANE, SECOND_LANE, Compute, Grow, Slice
from engine.contract.policy import Memory, PlanBuilder, Scheduling, Traits, traits_of
from engine.contract.records import forward_ahead
from engine.contract.regions import Kind, Place, Pool, Tier, Work, kv_place, weight
from engine.contract.rules import Remedy
from engine.contract.training_progress import TrainingProgress, layout_of
from engine.contract.view import View
from engine.contract.windows import (
    WindowFootprint,
    on_host,
    sample_bytes,
    window_footprint,
)
from policies.sharing.adapters import idle_adapters
from policies.sharing.records import HeldRecords, HeldSamples, RecordedSlice, RecordRules
from policies.sharing.time_shared import side_of
from policies.training.cycle import training_jobs
from policies.training.out_of_memory import OutOfMemory, patient


@dataclass(frozen=True)
class CoServe:
    """The rule that FlexLLM released: a fixed token budget, and so many layers back.

    A step serves first. The tokens that its requests leave of the budget go to a window forward of
    the sample under way. Once the sample is through, each step takes its backward some layers down,
    beside what it serves, until the next sample begins. One job finetunes at a time, first come
    first served; a job whose next sample is not there yet lets the next job on (FlexLLM, arXiv
    2402.18789; flexflow-serve, `prepare_next_fwd_batch`). Where the scheduling of requests counts
    service by tenant, the next sample is one of the tenant with the smallest counter.

    Args:
        serving: scheduling of the requests.
        token_budget: tokens of a step, of requests and the window together.
        backward_layers: layers that a step takes a backward down.
        backward_tokens: tokens of a window back, then of one layer in a step; None: the whole
            sample.
        min_window: fewer tokens that are left start no window, unless they end the sample.
        multiple: windows are multiples of so many tokens, but for the last of a sample.

    Raises:
        ValueError: a number is below 1.
    """

    serving: Scheduling
    token_budget: int = 256
    backward_layers: int = 1
    backward_tokens: int | None = None
    min_window: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        names = ("token_budget", "backward_layers", "backward_tokens", "min_window", "multiple")
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"co-serving: {name} is {value}, must be at least 1")
        if self.backward_tokens is not None and self.backward_layers > 1:
            raise ValueError(
                f"co-serving: backward_tokens={self.backward_tokens} takes one layer in a step, "
                f"and backward_layers is {self.backward_layers}; give one of them alone"
            )

    @property
    def traits(self) -> Traits:
        """What is told of serving, and the bounds of a step with its window."""
        return beside_windows(traits_of(self.serving), self.token_budget)

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        job = first_with_work(view)
        if job is None:
            return serves
        left = self.token_budget - sum([piece.tokens for piece in serves])
        return (*serves, *self._trains(job, view, left))

    def _trains(self, job: Job, view: View, left: int) -> tuple[Slice, ...]:
        """The update that is due, and a window forward or back."""
        training = job.training
        assert training is not None
        update, microbatch = due_update(job, view)
        if microbatch is None or not training.is_released(microbatch):
            return update
        total, units = training.spec.tokens_of(microbatch), training.spec.num_units
        _, backward = training.frontier(microbatch)
        ahead, is_behind = forward_ahead(training, microbatch)
        if ahead:
            tokens = self._window(left, ahead)
            window = Slice(job, tokens, Work.FORWARD, range(units), microbatch, record=is_behind)
            return (*update, window) if tokens else update
        back = units_back(training, microbatch, self.backward_layers)
        top = back.stop - 1
        tokens = min(total - backward[top], self.backward_tokens or total)
        return (*update, Slice(job, tokens, Work.BACKWARD, back, microbatch))

    def _window(self, left: int, ahead: int) -> int:
        """Tokens of a window, with so many left of the budget and so many ahead in the sample."""
        if left >= ahead:
            return ahead
        tokens = left - left % self.multiple
        return tokens if tokens >= self.min_window else 0


def beside_windows(serving: Traits, step_tokens: int) -> Traits:
    """Traits of a scheduling whose batches are those of serving, with a window behind.

    While no job that finetunes has work, serving is planned as if it were alone.

    Args:
        serving: what is told of serving alone.
        step_tokens: the most tokens of a step, of requests and the window together.

    Returns:
        The bounds of both. What serving promises of its next batch holds, but that a prompt takes
        all that is left of `step_tokens` only where that is its own budget.
    """
    most = serving.step_tokens and max(step_tokens, serving.step_tokens)
    return Traits(
        repeats=serving.repeats,
        appends=serving.appends and most == serving.step_tokens,
        step_tokens=most,
        prompt_tokens=serving.prompt_tokens,
        max_jobs=serving.max_jobs,
        service=serving.service,
    )


def first_with_work(view: View) -> Job | None:
    """The finetuning job that goes on.

    Args:
        view: what the policy was shown; its `service` has the counters of tenants, if any are kept.

    Returns:
        Of the jobs whose update is due, or whose next sample is there, the one that is at a sample,
        or has its update due: so one sample holds memory at a time. Else the first of the tenant
        with the smallest counter, without counters the first one. None without a job.
    """

    def order(job: Job) -> tuple[bool, float]:
        return not _has_begun(job), _service(job, view)

    return min(_with_work(view), key=order, default=None)


def _with_work(view: View) -> list[Job]:
    return [job for job in training_jobs(view) if _has_work(job)]


def _service(job: Job, view: View) -> float:
    return (view.service or {}).get(job.tenant, 0.0)


def _has_work(job: Job) -> bool:
    """Whether the update of a finetuning job is due, or its next sample is there."""
    training = job.training
    return training is not None and training.spec.finetunes and training.has_work


def _has_begun(job: Job) -> bool:
    """Whether a finetuning job is at a sample, or has its update due."""
    training = job.training
    assert training is not None
    microbatch = training.sample
    return microbatch is None or training.frontier(microbatch)[0][0] > 0


def units_back(training: TrainingProgress, microbatch: int, most: int) -> range:
    """The units that a sample goes back through next.

    Args:
        training: the progress of a finetuning job.
        microbatch: of a sample that went forward whole, and has not gone back.
        most: the most units of a launch.

    Returns:
        The highest unit that is not through, and those below it that train, or lie above what does.
    """
    total, (_, backward) = training.spec.tokens_of(microbatch), training.frontier(microbatch)
    units = range(training.first, training.spec.num_units - 1)
    top = max([unit for unit in units if backward[unit] < total])
    return range(max(training.first, top + 1 - most), top + 1)


def due_update(job: Job, view: View) -> tuple[tuple[Slice, ...], int | None]:
    """The update that ends a step, and the sample behind it.

    Args:
        job: the finetuning job that goes on.
        view: what the policy was shown.

    Returns:
        () or the slice of the update; and the microbatch of the sample that is next. None behind
        the last step; where it is another job's turn; and where the next sample may start behind a
        record: how old that is, is told behind the update.
    """
    training = job.training
    assert training is not None, "a job that finetunes"
    if (microbatch := training.sample) is not None:
        return (), microbatch
    last, chunks = training.microbatches[-1], range(len(training.trained_by))
    is_over = training.step + 1 >= training.spec.num_steps
    if not is_over and training.is_released(last + 1):
        is_over = training.adoptable(last + 1) is not None
    is_over = is_over or min(_with_work(view), key=lambda one: _service(one, view)) is not job
    return (Slice(job, 1, Work.UPDATE, chunks, last),), None if is_over else last + 1


@dataclass(frozen=True)
class CoMemory:
    """Serving has a memory policy of its own; finetuning takes pages and bytes of the same pools.

    Serving is planned as if a sample held nothing. Where it needs bytes that a sample holds, the
    sample gives all of them back and begins anew, the job that came last first. So finetuning never
    preempts a request, and never keeps one out.

    A window forward joins the launch that serves, or follows it as a launch of its own. A backward
    and an update have launches of their own, and so have windows of a job that trains all
    parameters: its weights are others than those that are served. Launches of their own may run on
    a second compute lane, beside what is served (spatial sharing).

    What a unit that offloads keeps of a window goes to the host behind the launch, and comes back
    with the plan of the unit's backward.

    Behind an update of a job that publishes, what it has trained is copied to the host as the next
    version of an adapter. Adapters that no running request needs give way to what finetunes.

    A batch whose first slice trains is a turn of training: it serves only where training finds no
    room.

    With `records`, launches that serve record the slices that the scheduling has marked, and a
    sample starts behind the record of its request. Records give way to serving before samples do.

    Args:
        serving: memory policy of the requests.
        buffers: `grown`: a sample takes bytes window by window, and gives each place back behind
            its last use. `static`: a job takes what its longest sample can hold when it begins, and
            keeps it to its end, as FlexLLM does; it never gives way.
        fused: whether a window joins the launch that serves, and weights are read once.
        headroom: share of the device that windows leave free, so that serving can grow.
        lanes: compute lanes. 2: what finetunes runs on a lane of its own.
        records: what becomes of records; None: nothing is recorded.

    Raises:
        ValueError: `headroom` is not in [0, 1), or windows are to join launches of another lane.
    """

    serving: Memory
    buffers: Literal["grown", "static"] = "grown"
    fused: bool = True
    headroom: float = 0.02
    lanes: Literal[1, 2] = 1
    records: RecordRules | None = None

    def __post_init__(self) -> None:
        if self.records is not None and self.buffers == "static":
            raise ValueError("co-serving: records need buffers=grown, and buffers is static")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"co-serving: headroom is {self.headroom}, must be in [0, 1)")
        if self.lanes not in (1, 2):
            raise ValueError(f"co-serving: lanes is {self.lanes}, must be 1 or 2")
        if self.lanes == 2 and self.fused:
            raise ValueError("co-serving: fused windows have no lane of their own: set fused=false")

    @property
    def traits(self) -> Traits:
        """What is told of KV as serving has it; states of training stay on the device."""
        serving = traits_of(self.serving)
        return Traits(
            kv_growth=serving.kv_growth if self.lanes == 1 else "asked",
            swaps=serving.swaps,
            spare_pages=serving.spare_pages,
            reserved_tokens=serving.reserved_tokens,
            prefix_caching=serving.prefix_caching,
            adapters=serving.adapters,
            states_in=(Tier.GPU,),
            two_lanes=self.lanes == 2,
        )

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        served = tuple([s._replace(record=False) for s in batch if s.job.training is None])
        trained = [piece for piece in batch if piece.job.training is not None]
        records = None if self.records is None else HeldRecords(view, plan, self.records)
        if records is not None:
            records.drop_old()
        samples = HeldSamples(view, plan, gives_way=self.buffers == "grown", records=records)
        if served and batch[0].job.training is not None:
            for piece in trained:
                self._place(piece, (), view, plan, records)
            if plan:
                return
            trained = []
        for piece in trained:  # updates come first: a window behind one finds its weights
            if piece.work is Work.UPDATE:
                self._place(piece, served, view, plan, records)
        if served:
            self.serving.fit(served, *samples.beside(view, plan))
        made = list[RecordedSlice]()
        if records is not None:
            records.drop_restarted()
            made = records.record(batch)
        for piece in trained:
            if piece.work is not Work.UPDATE and piece.job.job_id not in samples.restarted:
                self._place(piece, served, view, plan, records)
        if records is not None:
            records.hedge()
            records.offload(made)
        if not plan and trained and not view.serving and not view.in_flight:
            samples.give_way_to(trained[-1].job)
            if not plan and records is not None and trained[-1].record:
                records.drop_of(trained[-1])  # its sample goes forward whole
            if not plan:
                self._refuse_endless(trained[-1], view, plan)

    def _place(
        self,
        piece: Slice,
        served: tuple[Slice, ...],
        view: View,
        plan: PlanBuilder,
        records: HeldRecords | None,
    ) -> None:
        """Writes a launch that finetunes, if there is room for it beside what is served."""
        if piece.record and (records is None or not records.has(piece)):
            return  # the record that it would start behind has given way
        lasting, given = self._lasting(piece, view), _given_kv(piece, view, plan)
        footprint, grows = _growth(piece, lasting, view, plan, given)
        needs = dict(_needs(footprint, grows, plan, view.device))
        stash, pool = _absent_adapters(footprint, plan), (Tier.GPU, view.device)
        needs[pool] += 0 if given is None else given[1]
        needs[pool] += sum([plan.held(on_host(place)) for place in stash])
        nbytes = needs.pop(pool)
        if any([count > plan.room(other) for other, count in needs.items()]):
            return
        spare = 0 if piece.work is Work.UPDATE else self._headroom_bytes(view)
        need_bytes = nbytes and nbytes + spare
        if records is not None and need_bytes > plan.room(pool):
            records.keep_for(piece)
            while need_bytes > plan.room(pool) and records.give_way(pool):
                pass
        idle = idle_adapters(view, plan, served) if need_bytes > plan.room(pool) else []
        idle = [place for place in idle if place not in footprint.reads]
        if need_bytes > plan.room(pool) + sum(map(plan.held, idle)):
            return
        for place in idle:
            if need_bytes > plan.room(pool):
                plan.free(place)
        if given is not None and records is not None:
            records.give_kv(piece, given[0])
        for place in stash:
            plan.copy(on_host(place), place)
        for place in _absent(footprint.comes, plan):
            plan.move(on_host(place), place)
        plan.grow_all(grows)
        lane = SECOND_LANE if self.lanes == 2 else COMPUTE_LANE
        op = Compute((piece,), footprint.reads, footprint.writes, view.device, lane)
        if self.fused and joins(piece):
            plan.join(op)
        else:
            plan.launch(op)
        if piece.work is Work.UPDATE:
            _publish(piece, view, plan, records)
        for place in footprint.goes:
            plan.move(place, on_host(place))
        for place in footprint.frees:
            if place not in lasting:
                plan.free(place)
        if records is not None and piece.work is Work.BACKWARD:
            records.bring_ahead(piece, spare)

    def _lasting(self, piece: Slice, view: View) -> Mapping[Place, int]:
        """Bytes of the places that a job keeps to its end."""
        if self.buffers == "grown":
            return {}
        assert piece.job.training is not None
        return sample_bytes(piece.job.training, view.page, view.device)

    def _headroom_bytes(self, view: View) -> int:
        """Bytes that windows leave free."""
        if self.buffers == "static":
            return 0
        return int(self.headroom * view.capacity_bytes[Tier.GPU, view.device])

    def _refuse_endless(self, piece: Slice, view: View, plan: PlanBuilder) -> None:
        """OutOfMemory where a launch finds no room although nothing else holds any."""
        training = piece.job.training
        assert training is not None
        footprint, grows = _growth(piece, self._lasting(piece, view), view, plan)
        modes = {unit.mode for unit in layout_of(training).units[1:-1]}
        found = {
            Remedy.SHORTER_SEQUENCES: True,
            Remedy.RECOMPUTE: Mode.KEEP in modes,
            Remedy.TRAIN_ADAPTERS: training.spec.recipe.lora_rank is None,
        }
        remedies = [remedy for remedy, helps in found.items() if helps]
        what = f"a window of training job {piece.job.job_id}"
        if spare := self._headroom_bytes(view):
            what += f" beside a headroom of {spare:,}"
        idle_bytes = sum(map(plan.held, idle_adapters(view, plan, ())))
        for pool, nbytes in _needs(footprint, grows, plan, view.device).items():
            is_device = pool[0] is Tier.GPU
            need = nbytes + (self._headroom_bytes(view) - idle_bytes if is_device else 0)
            if (deficit_bytes := need - plan.room(pool)) > 0:
                raise OutOfMemory(pool, deficit_bytes, what, remedies)


def _absent(places: Iterable[Place], plan: PlanBuilder) -> list[Place]:
    """Places that a plan does not hold: their contents are on the host."""
    return [place for place in places if not plan.holds(place)]


def _absent_adapters(footprint: WindowFootprint, plan: PlanBuilder) -> list[Place]:
    """Versions of adapters that a launch reads, and that are at their homes alone."""
    return _absent([place for place in footprint.reads if place.region.kind is Kind.ADAPTER], plan)


def _needs(
    footprint: WindowFootprint, grows: Iterable[Grow], plan: PlanBuilder, device: int
) -> Mapping[Pool, int]:
    """Bytes that a launch takes of the device, and of the host where it offloads."""
    needs = {(Tier.GPU, device): sum([op.nbytes for op in grows])}
    for place in _absent(footprint.comes, plan):
        needs[place.pool] += plan.held(on_host(place))
    if footprint.goes:
        sizes = dict(footprint.sizes)
        needs[Tier.HOST, device] = sum([sizes[place] for place in footprint.goes])
    return needs


def _publish(piece: Slice, view: View, plan: PlanBuilder, records: HeldRecords | None) -> None:
    """Copies what an update has made to the host, as the next version of an adapter.

    Records make room for it. A version that finds none on the host is left out, with its number.
    """
    training = piece.job.training
    assert training is not None and piece.layers is not None, "an update names its chunks"
    spec = training.spec
    if not spec.publish or (training.step + 1) % spec.publish_every or not view.adapters:
        return
    newest, version = view.adapters[spec.publish], (training.step + 1) // spec.publish_every
    made = newest._replace(version=version).home(view.device)
    while records is not None and newest.nbytes > plan.room(made.pool):
        if not records.give_way(made.pool):
            break
    if newest.nbytes <= plan.room(made.pool):
        plan.copy(weight(spec.job_id, piece.layers.start, device=view.device), made)


def joins(piece: Slice) -> bool:
    """Whether a launch that finetunes may join one that serves, whose weights it then shares.

    Args:
        piece: a slice of a finetuning job.

    Returns:
        True for a window forward of a job that trains adapters.
    """
    training = piece.job.training
    assert training is not None
    return piece.work is Work.FORWARD and training.spec.recipe.lora_rank is not None


def _given_kv(piece: Slice, view: View, plan: PlanBuilder) -> tuple[Place, int] | None:
    """Where keys and values of a record lie that a sample starts behind, and their bytes."""
    training = piece.job.training
    assert training is not None
    record = training.adoptable(piece.microbatch) if piece.record else None
    if record is None:
        return None
    here = kv_place(record.request, device=view.device)
    src = here if plan.holds(here) else on_host(here)
    return src, plan.held(src)


def _growth(
    piece: Slice,
    lasting: Mapping[Place, int],
    view: View,
    plan: PlanBuilder,
    given: tuple[Place, int] | None = None,
) -> tuple[WindowFootprint, list[Grow]]:
    """The footprint of a launch, and what grows for it.

    `lasting`: bytes that a job keeps; `given`: keys and values that its sample gets beforehand.
    """
    training = piece.job.training
    assert training is not None
    footprint = window_footprint(piece, training, view.page, view.device)
    sizes: Iterable[tuple[Place, int]] = footprint.sizes
    if lasting:
        largest = dict(sizes)
        for place, nbytes in lasting.items():
            largest[place] = max(nbytes, largest.get(place, 0))
        sizes = largest.items()
    lacks = [(place, nbytes - plan.held(place)) for place, nbytes in sizes]
    if given is not None:
        kv = kv_place(piece.job.job_id, device=view.device)
        lacks = [(place, n - given[1] * (place == kv)) for place, n in lacks]
    return footprint, [Grow(place, nbytes) for place, nbytes in lacks if nbytes > 0]
