"""Windows of a sample: their order, the places they need, and plans that lie about either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.contract.job import Job
from engine.contract.layout import Mode
from engine.contract.plan import HOST_LANE, Compute, Free, Grow, Plan, Slice
from engine.contract.policy import Policy
from engine.contract.progress import advance_training, check_order, start_of
from engine.contract.regions import (
    KV_GRADIENT,
    SAMPLE_GRADIENT,
    Kind,
    Place,
    Tier,
    Work,
    gradient,
    hidden_gradient,
    kept,
    kv_place,
    weight,
)
from engine.contract.rules import ContractError, Rule
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from engine.contract.windows import on_host, sample_bytes, sample_places, window_footprint
from models.training.kept import kept_token_bytes
from policies.kv.paged_restart import PagedRestart
from policies.sharing.coserve import CoMemory
from tests.policies.finetuning_jobs import PAGE, SPEC, coserving, finetuning_job, layout_of_jobs
from tests.support.replays import Replay, replay
from traces.serving.request import Request, Sample, TrainingJob
from traces.training.recipe import Recipe

F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE
UNITS = SPEC.num_layers + 2
PAGES = 900
PLENTY = CoMemory(PagedRestart())


def begun(samples: list[Sample], modes: Mode = Mode.KEEP, **given: object) -> Job:
    spec = finetuning_job(7, samples, **given)
    layout = layout_of_jobs([spec], PAGES, modes).training[7]
    return Job.trains(TrainingProgress(spec, layout), 0)


def windows(job: Job, *slices: tuple[int, Work, range, int]) -> None:
    """Moves a job on by slices that are in order."""
    for tokens, work, units, microbatch in slices:
        piece = Slice(job, tokens, work, units, microbatch)
        assert job.training is not None
        check_order(piece, job.training)
        advance_training(piece)


# ---- order
def test_a_sample_goes_forward_in_windows_and_back_whole_or_by_reverse_windows() -> None:
    job = begun([Sample(10), Sample(6)], num_steps=1, microbatches=2)
    training = job.training
    assert training is not None and training.first == 1
    every = range(UNITS)
    windows(job, (4, F, every, 0), (6, F, every, 0))
    assert training.frontier(0) == ([10] * UNITS, [0, 0, 0, 0, 0, 10])
    piece = Slice(job, 7, B, range(4, 5), 0)
    assert start_of(piece, training) == 3
    windows(job, (7, B, range(4, 5), 0), (3, B, range(4, 5), 0), (10, B, range(2, 4), 0))
    assert training.sample == 0 and not training.is_trained(0)
    windows(job, (10, B, range(1, 2), 0))
    assert training.sample == 1
    windows(job, (6, F, every, 1), (6, B, range(1, 5), 1))
    assert training.sample is None and training.step == 0
    windows(job, (1, U, range(1), 1))
    assert training.step == 1 and training.is_complete


EVERY = range(UNITS)
DISORDER: dict[str, tuple[list[tuple[int, Work, range, int]], tuple[int, Work, range, int], str]]
DISORDER = {
    "more than the sample": ([], (11, F, EVERY, 0), "forward of unit 0 out of order"),
    "layers before those below": ([], (4, F, range(1, UNITS), 0), "forward through all units at"),
    "layers without those above": ([], (4, F, range(0, 3), 0), "forward through all units at once"),
    "another sample": ([(4, F, EVERY, 0)], (4, F, EVERY, 1), "one at a time, and it is at 0"),
    "a sample that is not there": (
        [(10, F, EVERY, 0), (10, B, range(1, 5), 0)],
        (4, F, EVERY, 1),
        "the sample of microbatch 1 is not there yet",
    ),
    "back before the forward is through": (
        [(4, F, EVERY, 0)],
        (4, B, range(4, 5), 0),
        "backward before the forward is complete",
    ),
    "back through the head": ([(10, F, EVERY, 0)], (10, B, range(4, 6), 0), "backward of the head"),
    "back below what trains": (
        [(10, F, EVERY, 0)],
        (10, B, range(0, 5), 0),
        "nothing below unit 1",
    ),
    "a window of several units": (
        [(10, F, EVERY, 0)],
        (4, B, range(3, 5), 0),
        "backward of 2 units in a window: one, or the whole sample",
    ),
    "a unit before that above": (
        [(10, F, EVERY, 0), (4, B, range(4, 5), 0)],
        (6, B, range(3, 4), 0),
        "backward of unit 3 out of order",
    ),
    "an update before all samples": ([(10, F, EVERY, 0)], (1, U, range(1), 0), "updated too early"),
    "no tokens": ([], (0, F, EVERY, 0), "a slice of 0 tokens"),
}


@pytest.mark.parametrize("name", DISORDER)
def test_slices_out_of_order_are_refused(name: str) -> None:
    before, wrong, told = DISORDER[name]
    job = begun([Sample(10), Sample(6, release_ns=5)], num_steps=1, microbatches=2)
    windows(job, *before)
    tokens, work, units, microbatch = wrong
    assert job.training is not None
    with pytest.raises(ContractError, match=told):
        check_order(Slice(job, tokens, work, units, microbatch), job.training)


def test_a_forward_is_never_repeated_by_itself() -> None:
    job = begun([Sample(10)])
    assert job.training is not None
    with pytest.raises(ContractError, match="a backward of windows repeats it"):
        check_order(Slice(job, 4, F, EVERY, 0), job.training, again=True)


def test_an_update_takes_all_chunks() -> None:
    job = begun([Sample(10)], recipe=Recipe())
    training = job.training
    assert training is not None and training.first == 0
    chunks = len(training.trained_by)
    windows(job, (10, F, EVERY, 0), (10, B, range(UNITS - 1), 0))
    with pytest.raises(ContractError, match="all in one launch, so that none is old"):
        check_order(Slice(job, 1, U, range(chunks - 1), 0), training)
    windows(job, (1, U, range(chunks), 0))
    assert training.is_complete


def test_a_restart_forgets_the_sample_and_keeps_those_before() -> None:
    job = begun([Sample(10), Sample(6)], num_steps=1, microbatches=2)
    windows(job, (10, F, EVERY, 0), (10, B, range(1, 5), 0), (6, F, EVERY, 1))
    windows(job, (6, B, range(3, 5), 1))
    training = job.training
    assert training is not None
    training._forget()
    assert training.is_trained(0) and training.sample == 1
    assert training.frontier(1) == ([0] * UNITS, [0] * UNITS)


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([Sample(1)], "sample 0 has 1 tokens; 2 to sequence_tokens=8 are possible"),
        ([Sample(9)], "sample 0 has 9 tokens"),
        ([Sample(8, 8)], "sample 0 has 8 prompt tokens of 8; at least one must carry a loss"),
        ([Sample(8, 3, read=((2, 5),))], r"reads \[\(2, 5\)\] behind 3 of its prompt"),
        ([Sample(8, 3, read=((4, 9),))], r"spans \[start, stop\) come in order"),
        ([Sample(8, 3, read=((6, 7), (4, 5)))], r"come in order"),
        ([Sample(8, 3, read=((3, 8),))], "leave a token with a loss"),
        ([Sample(8, 0, 5), Sample(8, 0, 4)], "put samples in the order of their release"),
    ],
)
def test_samples_that_cannot_be_are_refused(samples: list[Sample], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainingJob(0, 0, UNITS, 8, samples=tuple(samples))


def test_a_job_of_samples_has_one_sequence_and_updates() -> None:
    for given in ({"sequences": 2}, {"has_update": False}, {"ranks": 2}):
        with pytest.raises(ValueError, match="samples are trained one by one on one device"):
            TrainingJob(0, 0, UNITS, 8, samples=(Sample(8),), **given)  # type: ignore[arg-type]


def test_labels_cross_the_borders_of_windows_and_leave_the_prompt_out() -> None:
    """Row i is judged by token i + 1, which must be behind the prompt."""
    sample = Sample(10, prompt_tokens=4)
    rows = [i for i in range(10) if 4 <= i + 1 < 10]
    for start in range(10):
        for stop in range(start, 11):
            own = [i for i in rows if start <= i < stop]
            assert sample.labels(start, stop) == len(own)
            assert sample.loss_rows(start, stop) == (stop - own[0] if own else 0)
    assert Sample(10).labels(0, 10) == 9


@pytest.mark.parametrize(
    "read", [((5, 7),), ((4, 6), (8, 9)), ((4, 5), (5, 7)), ((6, 12),), ((9, 12),), ((5, 5),)]
)
def test_turns_that_are_read_have_no_label(read: tuple[tuple[int, int], ...]) -> None:
    sample = Sample(12, prompt_tokens=4, read=read)
    read_tokens = {token for start, stop in read for token in range(start, stop)}
    rows = [i for i in range(12) if 4 <= i + 1 < 12 and i + 1 not in read_tokens]
    for start in range(12):
        for stop in range(start, 13):
            own = [i for i in rows if start <= i < stop]
            assert sample.labels(start, stop) == len(own)
            assert sample.loss_rows(start, stop) == (stop - own[0] if own else 0)


# ---- places
def test_what_is_kept_grows_by_its_formula() -> None:
    job = begun([Sample(10)])
    training, per_token = (
        job.training,
        kept_token_bytes(SPEC, finetuning_job(7, [Sample(10)]).recipe),
    )
    assert training is not None
    first = window_footprint(Slice(job, 4, F, EVERY, 0), training, PAGE, 0)
    sizes = dict(first.sizes)
    assert [sizes[kept(7, unit)] for unit in range(1, 5)] == [4 * per_token] * 4
    assert sizes[kv_place(7)] == PAGE.nbytes and kept(7, 0) not in sizes
    assert sizes[hidden_gradient(7)] == 4 * SPEC.hidden_size * 4
    windows(job, (4, F, EVERY, 0))
    second = dict(window_footprint(Slice(job, 3, F, EVERY, 0), training, PAGE, 0).sizes)
    assert second[kept(7, 1)] == 7 * per_token and second[kv_place(7)] == 2 * PAGE.nbytes


def test_a_backward_frees_what_it_used_last() -> None:
    job = begun([Sample(10)])
    windows(job, (10, F, EVERY, 0))
    training = job.training
    assert training is not None
    upper = window_footprint(Slice(job, 10, B, range(3, 5), 0), training, PAGE, 0)
    assert {kept(7, 3), kept(7, 4)} < {*upper.frees} and kv_place(7) not in upper.frees
    windows(job, (10, B, range(3, 5), 0))
    lower = window_footprint(Slice(job, 10, B, range(1, 3), 0), training, PAGE, 0)
    assert {kept(7, 1), kept(7, 2), kv_place(7), hidden_gradient(7)} < {*lower.frees}
    assert gradient(7, 0) in lower.writes


def test_a_sample_of_several_in_a_step_is_summed_apart() -> None:
    """So that it can begin anew: only its last launch adds it to the step."""
    job = begun([Sample(10), Sample(6)], num_steps=1, microbatches=2)
    windows(job, (10, F, EVERY, 0))
    training = job.training
    assert training is not None
    upper = window_footprint(Slice(job, 10, B, range(2, 5), 0), training, PAGE, 0)
    assert gradient(7, 0) not in upper.writes
    assert any(place.region.slot == SAMPLE_GRADIENT for place in upper.writes)
    windows(job, (10, B, range(2, 5), 0))
    last = window_footprint(Slice(job, 10, B, range(1, 2), 0), training, PAGE, 0)
    assert gradient(7, 0) in last.writes
    assert any(place.region.slot == SAMPLE_GRADIENT for place in last.frees)


def test_footprints_are_made_once_and_belong_to_a_layout() -> None:
    """The policy asks for the footprint that the check asks for again."""
    samples = [Sample(10), Sample(6)]
    jobs = [begun(samples), begun(samples, recipe=Recipe(lora_rank=8)), begun([Sample(7)])]

    def footprint(job: Job, tokens: int) -> object:
        assert job.training is not None
        return window_footprint(Slice(job, tokens, F, EVERY, 0), job.training, PAGE, 0)

    one, other, shorter = jobs
    assert footprint(one, 4) is footprint(one, 4) != footprint(one, 3)
    layouts = [job.training.layout for job in jobs if job.training is not None]
    assert hash(layouts[0]) == hash(layouts[1]) and layouts[0] != layouts[1]
    assert footprint(one, 4) != footprint(other, 4), "adapters of another rank"
    assert footprint(one, 4) == footprint(shorter, 4), "a forward depends on no later token"
    assert one.training is not None and other.training is not None
    assert sample_places(one.training, 0) == sample_places(other.training, 0)
    assert sample_bytes(one.training, PAGE, 0) == sample_bytes(one.training, PAGE, 0)


def test_a_copy_of_progress_moves_alone() -> None:
    """Lists of samples that are through are shared: they move no more."""
    job = begun([Sample(10), Sample(6)], num_steps=1, microbatches=2)
    training = job.training
    assert training is not None
    windows(job, (10, F, EVERY, 0), (10, B, range(1, 5), 0), (2, F, EVERY, 1))
    other = training.copy()
    assert other.is_trained(0) and not other.is_trained(1) and other.sample == 1
    advance_training(Slice(job, 4, F, EVERY, 1), other)
    assert [own.frontier(1)[0][0] for own in (training, other)] == [2, 6]
    other._forget()
    assert other.frontier(1)[0][0] == 0 and other.is_trained(0)
    assert training.frontier(1)[0][0] == 2 and training.frontier(0)[1][1] == 10


def test_a_sample_that_gives_way_names_all_that_it_may_hold() -> None:
    """Places that launches write and that are no states are among those it gives back."""
    job = begun([Sample(10), Sample(6)], num_steps=1, microbatches=2)
    training = job.training
    assert training is not None
    given, seen = {*sample_places(training, 0)}, set[Place]()
    for tokens, work, units in ((10, F, EVERY), (4, B, range(4, 5)), (6, B, range(4, 5))):
        piece = Slice(job, tokens, work, units, 0)
        footprint = window_footprint(piece, training, PAGE, 0)
        seen |= {place for place in footprint.writes if place.region.slot != 0 or _is_kept(place)}
        windows(job, (tokens, work, units, 0))
    assert seen <= given and any(place.region.slot == KV_GRADIENT for place in seen)
    assert {*sample_bytes(training, PAGE, 0)} <= given


def _is_kept(place: Place) -> bool:
    return place.region.kind in (Kind.KV, Kind.ACTIVATION)


def test_a_unit_that_offloads_keeps_each_window_in_a_place_of_its_own() -> None:
    job = begun([Sample(10), Sample(6)], Mode.OFFLOAD, num_steps=1, microbatches=2)
    training, each = job.training, kept_token_bytes(SPEC, finetuning_job(7, [Sample(10)]).recipe)
    assert training is not None
    for first, tokens in ((0, 4), (4, 6)):
        piece = Slice(job, tokens, F, EVERY, 0)
        footprint = window_footprint(piece, training, PAGE, 0)
        places = [kept(7, unit, first=first) for unit in range(1, 5)]
        assert footprint.goes == tuple(places) and not footprint.comes
        assert [dict(footprint.sizes)[place] for place in places] == [tokens * each] * 4
        windows(job, (tokens, F, EVERY, 0))
    assert training.windows(0, 1) == (0, 4) and training.copy().windows(0, 4) == (0, 4)
    back = window_footprint(Slice(job, 10, B, range(3, 5), 0), training, PAGE, 0)
    own = [kept(7, unit, first=first) for unit in (3, 4) for first in (0, 4)]
    assert back.comes == tuple(own) and {*own} <= {*back.reads} & {*back.frees}
    held = {kept(7, unit, first=first) for unit in range(1, 5) for first in (0, 4)}
    assert held | {*map(on_host, held)} <= {*sample_places(training, 0)}
    assert not held & {*sample_bytes(training, PAGE, 0)}
    training._forget()
    assert training.windows(0, 1) == () and not held & {*sample_places(training, 0)}
    windows(job, (10, F, EVERY, 0), (10, B, range(1, 5), 0))
    assert training.sample == 1 and training.windows(1, 1) == ()


@pytest.mark.parametrize("modes", [Mode.KEEP, Mode.RECOMPUTE])
def test_units_that_stay_on_the_device_have_one_place(modes: Mode) -> None:
    job = begun([Sample(10)], modes)
    training = job.training
    assert training is not None
    windows(job, (4, F, EVERY, 0), (6, F, EVERY, 0))
    back = window_footprint(Slice(job, 10, B, range(4, 5), 0), training, PAGE, 0)
    assert kept(7, 4) in back.reads and not (back.comes or back.goes)
    assert not any([place.tier is Tier.HOST for place in sample_places(training, 0)])


# ---- plans that lie
class Liar:
    """Plans as another policy does, until a change fits; from then on it is told by its error."""

    def __init__(self, policy: Policy, lie: Callable[[Plan], Plan | None]) -> None:
        self._policy, self._lie, self.lies = policy, lie, 0

    def plan(self, view: View) -> Plan:
        plan = self._policy.plan(view)
        if not self.lies and (changed := self._lie(plan)) is not None:
            self.lies = 1
            return changed
        return plan


def of_work(plan: Plan, work: Work) -> Compute | None:
    """The launch of a plan that finetunes so."""
    for op in plan.ops:
        if isinstance(op, Compute) and op.slices[-1].job.training is not None:
            piece = op.slices[-1]
            if piece.work is work:
                return op
    return None


def changed(plan: Plan, old: Compute, **fields: object) -> Plan:
    """The plan with another launch in the place of one."""
    new = replace(old, **fields)  # type: ignore[arg-type]
    return replace(plan, ops=tuple([new if op is old else op for op in plan.ops]))


def without(work: Work, side: str, told: Callable[[Place], bool]) -> Callable[[Plan], Plan | None]:
    """Leaves a place out of what a launch reads or writes."""

    def lie(plan: Plan) -> Plan | None:
        op = of_work(plan, work)
        if op is None or not any(map(told, getattr(op, side))):
            return None
        rest = {s: tuple([p for p in getattr(op, s) if not told(p)]) for s in ("reads", "writes")}
        return changed(plan, op, **rest)

    return lie


def smaller(told: Callable[[Place], bool], by: int) -> Callable[[Plan], Plan | None]:
    """Takes fewer bytes for a place."""

    def lie(plan: Plan) -> Plan | None:
        if of_work(plan, F) is None:
            return None
        ops, found = list(plan.ops), False
        for i, op in enumerate(ops):
            if isinstance(op, Grow) and told(op.place) and op.nbytes > by:
                ops[i], found = Grow(op.place, op.nbytes - by), True
        return replace(plan, ops=tuple(ops)) if found else None

    return lie


def freed(place: Place) -> Callable[[Plan], Plan | None]:
    """Frees a place behind a window forward, too early."""

    def lie(plan: Plan) -> Plan | None:
        return None if of_work(plan, F) is None else replace(plan, ops=(*plan.ops, Free(place)))

    return lie


def on_another_lane(plan: Plan) -> Plan | None:
    op = of_work(plan, B)
    return None if op is None else changed(plan, op, on=HOST_LANE)


def beside_requests(plan: Plan) -> Plan | None:
    """A backward joins the launch that serves."""
    back = of_work(plan, B)
    served = [
        op for op in plan.ops if isinstance(op, Compute) and op.slices[0].job.training is None
    ]
    if back is None or not served:
        return None
    joined = Compute(
        (*served[0].slices, *back.slices), back.reads, (*served[0].writes, *back.writes)
    )
    ops = [joined if op is back else op for op in plan.ops if op is not served[0]]
    return replace(plan, ops=tuple(ops))


def longer(plan: Plan) -> Plan | None:
    op = of_work(plan, F)
    if op is None:
        return None
    piece = op.slices[-1]
    grown = (*op.slices[:-1], piece._replace(tokens=piece.tokens + 1000))
    return changed(plan, op, slices=grown)


LIES: dict[str, tuple[Callable[[Plan], Plan | None], Rule]] = {
    "weights unread": (
        without(F, "reads", lambda p: p.region.kind is Kind.WEIGHT),
        Rule.TRAINING_PLACES,
    ),
    "kept not written": (without(F, "writes", lambda p: p == kept(1000, 2)), Rule.TRAINING_PLACES),
    "keys and values not written": (
        without(F, "writes", lambda p: p == kv_place(1000)),
        Rule.TRAINING_PLACES,
    ),
    "gradient of hidden states not written": (
        without(F, "writes", lambda p: p == hidden_gradient(1000)),
        Rule.TRAINING_PLACES,
    ),
    "kept not read": (without(B, "reads", lambda p: p == kept(1000, 4)), Rule.TRAINING_PLACES),
    "pages not read": (without(B, "reads", lambda p: p == kv_place(1000)), Rule.TRAINING_PLACES),
    "gradients not written": (
        without(B, "writes", lambda p: p.region.slot == SAMPLE_GRADIENT),
        Rule.TRAINING_PLACES,
    ),
    "weights not updated": (
        without(U, "writes", lambda p: p == weight(1000, 0)),
        Rule.TRAINING_PLACES,
    ),
    "too few pages": (smaller(lambda p: p == kv_place(1000), PAGE.nbytes), Rule.TRAINING_PLACES),
    "too few bytes kept": (smaller(lambda p: p == kept(1000, 3), 1), Rule.TRAINING_PLACES),
    "kept freed early": (freed(kept(1000, 1)), Rule.TRAINING_FREED),
    "pages freed early": (freed(kv_place(1000)), Rule.TRAINING_FREED),
    "hidden gradient freed early": (freed(hidden_gradient(1000)), Rule.TRAINING_FREED),
    "weights freed": (freed(weight(1000, 0)), Rule.TRAINING_FREED),
    "a backward on the host": (on_another_lane, Rule.LANE),
    "a backward beside requests": (beside_requests, Rule.TRAINING_PLACES),
    "more tokens than the sample has": (longer, Rule.TRAINING_ORDER),
}


def told_of(lie: Callable[[Plan], Plan | None]) -> tuple[Liar, ContractError]:
    spec = finetuning_job(1000, [Sample(90), Sample(80)], num_steps=2, microbatches=2)
    liar = Liar(coserving(PLENTY), lie)
    work = [*[Request(i, 0, 3, 60) for i in range(3)], spec]
    with pytest.raises((ContractError,)) as caught:
        replay(liar, work, pages=PAGES, page=PAGE, layout=layout_of_jobs([spec], PAGES), depth=1)
    return liar, caught.value


@pytest.mark.parametrize("name", LIES)
def test_no_lie_is_believed(name: str) -> None:
    lie, rule = LIES[name]
    liar, error = told_of(lie)
    assert liar.lies == 1 and error.rule is rule, str(error)
    assert "\n" not in str(error) and error.job_id == 1000


class GivesUp(Liar):
    """Lets a sample begin anew at two moments, which is no lie."""

    def __init__(self) -> None:
        super().__init__(coserving(PLENTY), lambda plan: None)
        self.moments = [3, 6]

    def plan(self, view: View) -> Plan:
        job = view.training[0] if view.training else None
        is_due = bool(self.moments) and view.issued >= self.moments[0]
        if job is None or job.training is None or not is_due or job.training.sample is None:
            return self._policy.plan(view)
        del self.moments[0]
        held = [place for place in sample_places(job.training, 0) if place in view.held_bytes]
        return Plan(tuple(map(Free, held)), restart=(job,))


def test_a_sample_may_free_all_with_a_restart() -> None:
    """What a lie may not free, a sample that begins anew gives back."""
    spec = finetuning_job(1000, [Sample(90)], num_steps=1)
    layout, work = layout_of_jobs([spec], PAGES), [Request(0, 0, 3, 60), spec]
    found: Replay = replay(GivesUp(), work, pages=PAGES, page=PAGE, layout=layout).check()
    assert sum([len(plan.restart) for plan in found.plans]) == 2
    assert len(found.rows("training")) == 1
