"""Co-serving within an SLO, and temporal sharing: what a step finetunes, and how long it takes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

import pytest

from engine.contract.executor import Launch
from engine.contract.job import Job
from engine.contract.plan import Compute, Op, Plan, Slice
from engine.contract.policy import Policy
from engine.contract.regions import Tier, Work
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import Cost, View
from engine.laws.check_policy import WatchedPolicy
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.coserve import CoMemory, CoServe
from policies.sharing.coserve_slo import CoServeSlo, _Step
from policies.sharing.temporal import Temporal
from sim.cost.policy_cost import PolicyCost
from sim.cost.roofline import Roofline
from sim.devices.device import Device
from sim.executor import SimExecutor
from tests.policies.finetuning_jobs import (
    BUDGET,
    PAGE,
    SPEC,
    finetuning_job,
    layout_of_jobs,
    random_job,
)
from tests.support.replays import random_requests, replay
from tests.support.states import decoding, view
from tests.training.training_jobs import device
from traces.serving.request import Request, Sample, TrainingJob
from traces.training.recipe import Recipe

PAGES = 4000
DEVICE = replace(device("cpu"), kernel_ns=0, dispatch_ns=0)
MULTIPLE = 4


def run(
    scheduling: Any,
    work: list[Request | TrainingJob],
    pace: float = 1.0,
    watch: list[WatchedPolicy] | None = None,
    on: Device = DEVICE,
    depth: int = 1,
) -> tuple[Recorder, Roofline]:
    """A replay priced by a roofline, by which policies are quoted, too, times a pace.

    `watch` gets the policy as it was watched.
    """
    jobs = [item for item in work if isinstance(item, TrainingJob)]
    cost, clock, recorder = Roofline(on, SPEC, PAGE.tokens), VirtualClock(), Recorder()
    policy: Policy = Composed(scheduling, CoMemory(PagedRestart()))
    if watch is not None:
        watch.append(policy := WatchedPolicy(policy))
    engine = Engine(
        clock,
        policy,
        SimExecutor(clock, cost),
        {(Tier.GPU, 0): PAGES * PAGE.nbytes, (Tier.HOST, 0): 1 << 30},
        PAGE,
        depth=depth,
        layout=layout_of_jobs(jobs, PAGES),
        cost=PolicyCost(cost, lambda place: engine.ledger.held_bytes[place], pace),
        recorder=recorder,
    )
    engine.replay(work)
    return recorder, cost


def finetuned(plan: Plan) -> list[Slice]:
    return [
        piece
        for op in plan.ops
        if isinstance(op, Compute)
        for piece in op.slices
        if piece.job.training is not None
    ]


def windows_of(recorder: Recorder) -> list[Slice]:
    """Windows of all plans, forward and back, in order."""
    own = [piece for row in recorder.plans for piece in finetuned(row[-1])]
    return [piece for piece in own if piece.work is not Work.UPDATE]


def within(slo_s: float, **given: Any) -> CoServeSlo:
    given.setdefault("multiple", MULTIPLE)
    return CoServeSlo(ChunkedPrefill(64, 12), slo_s, **given)


def step_ns(recorder: Recorder) -> dict[int, tuple[int, bool, set[Work]]]:
    """Per plan: how long its launches run, whether it serves, and how it finetunes."""
    found: dict[int, tuple[int, bool, set[Work]]] = {}
    for number, _, _, span, launch in recorder.steps:
        op = launch.op
        assert isinstance(op, Compute)
        ns, serves, works = found.get(number, (0, False, set()))
        serves |= any([piece.job.training is None for piece in op.slices])
        own = {piece.work for piece in op.slices if piece.job.training is not None}
        found[number] = (ns + span.end_ns - span.start_ns, serves, works | own)
    return found


def of_sample(tokens: int, count: int = 20) -> list[Request | TrainingJob]:
    job = finetuning_job(1000, [Sample(tokens)] * 3, num_steps=1 << 20, until_served=True)
    return [*random_requests(5, count), job]


def fastest_ns(work: list[Request | TrainingJob]) -> int:
    """The longest step that serves alone."""
    alone = [item for item in work if isinstance(item, Request)]
    return max([ns for ns, *_ in step_ns(run(ChunkedPrefill(64, 12), alone)[0]).values()])


@pytest.mark.parametrize("more", [1.2, 1.6, 3.0])
def test_no_step_takes_longer_than_the_slo(more: float) -> None:
    """A simulation runs as it is quoted, so no step is late, and windows come as they fit."""
    work = of_sample(120)
    slo_s = more * fastest_ns(work) / 1e9
    recorder, _ = run(within(slo_s, margin=0.0), work)
    steps = step_ns(recorder)
    assert max([ns for ns, serves, _ in steps.values() if serves]) <= slo_s * 1e9
    beside = [works for _, serves, works in steps.values() if serves]
    assert {Work.FORWARD} in beside and {Work.BACKWARD} in beside


@pytest.mark.parametrize("pace", [0.8, 1.25])
def test_a_wrong_predictor_is_corrected_by_what_launches_took(pace: float) -> None:
    """Quotes are off by one factor: after some launches steps are as with right quotes."""
    work = of_sample(120, 120)
    slo_s = 1.6 * fastest_ns(work) / 1e9
    right, corrected, wrong = (
        run(within(slo_s, corrects=corrects), work, quoted)[0]
        for corrects, quoted in ((True, 1.0), (True, pace), (False, pace))
    )
    limit_ns = 0.9 * slo_s * 1e9  # less the margin

    def beyond(recorder: Recorder) -> list[bool]:
        steps = step_ns(recorder).values()
        return [ns > 1.001 * limit_ns for ns, serves, works in steps if serves and works]

    if pace < 1:  # quotes are too short: steps come late
        assert sum(beyond(wrong)) > len(beyond(wrong)) / 4
    assert not any(beyond(corrected)[30:]), "eight launches of each kind are enough"
    assert abs(rate(corrected) / rate(right) - 1) < 0.05 < abs(rate(wrong) / rate(right) - 1)


def rate(recorder: Recorder) -> float:
    """Tokens of samples that go forward, by ns of the run."""
    forward = [piece.tokens for piece in windows_of(recorder) if piece.work is Work.FORWARD]
    return sum(forward) / max(span.end_ns for span in recorder.spans)


def test_a_longer_window_would_be_late() -> None:
    """Of the multiples that are left of the sample, the longest in time is taken."""
    work = of_sample(400)
    slo_s = 1.3 * fastest_ns(work) / 1e9
    recorder, cost = run(within(slo_s, margin=0.0), work)
    looked = 0
    for *_, launch in recorder.steps:
        op, tail = launch.op, launch.op.slices[-1] if isinstance(launch.op, Compute) else None
        if tail is None or tail.job.training is None or tail.work is not Work.FORWARD:
            continue
        piece = launch.pieces[-1]
        if len(op.slices) == 1 or piece.context_tokens + piece.tokens == 400:  # type: ignore[union-attr]
            continue
        looked += 1
        longer = tail._replace(tokens=tail.tokens + MULTIPLE)
        slices = (*op.slices[:-1], longer)  # type: ignore[union-attr]
        pieces = (*list(launch.pieces)[:-1], piece._replace(tokens=longer.tokens))
        later = replace(launch, op=Compute(slices), pieces=pieces)
        assert cost.compute_ns(later) > slo_s * 1e9
    assert looked > 10


@pytest.mark.parametrize("bend", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("whole", "most"), [(512, 512), (500, 500), (500, 300), (90, 40), (7, 7)])
def test_the_longest_window_is_found_with_few_quotes(bend: float, whole: int, most: int) -> None:
    """As if each multiple had been tried, for quotes that bend either way."""
    serves, none = cast(Any, (object(),)), cast(Any, None)
    step = _Step(within(1.0, multiple=16), none, serves, none, none, 0)
    tried = [n for n in (*range(16, most + 1, 16), *([whole] if most == whole else []))]
    for limit in range(50, 60_000, 977):
        quoted = dict[int, int]()

        def quote(tokens: int, quoted: dict[int, int] = quoted) -> float:
            quoted[tokens] = quoted.get(tokens, 0) + 1
            return 100 + float(tokens**bend)

        found = step._longest(most, whole, quote, limit)
        assert found == max([n for n in tried if 100 + n**bend <= limit], default=0)
        assert len(quoted) <= 10 and {*quoted.values()} == {1}


class PerLayer:
    """A quote of so long for each layer: the top one takes four times as long as the others."""

    def op_ns(self, op: Op) -> int:
        slices = getattr(op, "slices", ())
        return sum([400 if layer == 9 else 100 for piece in slices for layer in piece.layers or ()])


@pytest.mark.parametrize(("limit_ns", "layers"), [(400, 1), (599, 2), (600, 3), (5000, 10)])
def test_as_many_layers_go_back_as_there_is_time_for(limit_ns: int, layers: int) -> None:
    """Also where those below take less than the first."""
    none = cast(Any, None)
    step = _Step(within(1.0, corrects=False), none, (), none, cast(Any, PerLayer()), limit_ns)
    job = Job.trains(TrainingProgress(finetuning_job(9, [Sample(16)])), 0)
    found = step._backward(Slice(job, 16, Work.BACKWARD, range(9, 10), 0), 9)
    assert found is not None and found.layers == range(10 - layers, 10)


def test_a_step_that_serves_nothing_is_bounded() -> None:
    """A request that comes meanwhile waits no longer, and the shortest window always runs."""
    job = finetuning_job(1000, [Sample(400)], num_steps=2)
    late = [Request(0, 10**9, 5, 5)]
    idle_s = 3e-4
    recorder, _ = run(within(1.0, idle_s=idle_s), [*late, job])
    idle = [ns for ns, serves, works in step_ns(recorder).values() if works and not serves]
    assert len(idle) > 5 and max(idle) <= idle_s * 1e9
    tiny, _ = run(within(1.0, idle_s=1e-9), [*late, job])
    sizes = {
        p.tokens for row in tiny.plans for p in finetuned(row[-1]) if p.work is not Work.UPDATE
    }
    assert sizes == {MULTIPLE}


def test_an_slo_that_serving_alone_breaks_leaves_no_finetuning() -> None:
    work = of_sample(60)
    recorder, _ = run(within(1e-9, idle_s=1e-3), work)
    assert not any(works for _, serves, works in step_ns(recorder).values() if serves)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"slo_s": 0.0}, "slo_s is 0.0, must be above 0"),
        ({"slo_s": 1.0, "margin": 1.0}, r"margin is 1.0, must be in \[0, 1\)"),
        ({"slo_s": 1.0, "multiple": 0}, "multiple is 0, must be above 0"),
        ({"slo_s": inf}, "slo_s is inf, must be above 0 and finite"),
    ],
)
def test_wrong_settings_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        within(**given)


# ---- tokens that are due
SLO_NS, NS = 100_000, 1_000  # between tokens, and of a token in a launch
NO_HOST = replace(DEVICE, host_plan_ns=0, host_slice_ns=0)  # its time is not quoted to policies


class PerToken:
    """A quote of so long for each token."""

    def op_ns(self, op: Op) -> int:
        return NS * sum([piece.tokens for piece in getattr(op, "slices", ())])

    def launch_ns(self, launch: Launch) -> int:
        return self.op_ns(launch.op)


def per_token(**given: Any) -> CoServeSlo:
    given = {"margin": 0.0, "multiple": 1, **given}
    return CoServeSlo(ChunkedPrefill(64, 12), SLO_NS / 1e9, kind="token", **given)


def window_of(
    scheduling: CoServeSlo,
    serving: list[Job],
    now_ns: int,
    first_ns: Mapping[int, int],
    waiting: Sequence[Job] = (),
    in_flight: Sequence[Op] = (),
) -> int:
    """Tokens that a step finetunes, of a sample of 400, where first tokens came at these times."""
    sample = Job.trains(TrainingProgress(finetuning_job(9, [Sample(400)])), 0)
    state = replace(
        view(serving, [*waiting], pages=1000),
        now_ns=now_ns,
        training=[sample],
        in_flight=in_flight,
        cost=PerToken(),
        first_token_ns=lambda job: first_ns.get(job.job_id),
        launch_of=Launch,
    )
    own = [piece.tokens for piece in scheduling.batch(state) if piece.job.training is not None]
    return sum(own)


def test_a_step_lasts_until_the_first_token_is_due() -> None:
    """Three tokens of request 0 are issued, so the next one is due three times the SLO after
    the first of them, counted from there; five of request 1."""
    jobs = [decoding(0, 10), decoding(1, 12)]
    assert [job.generated_tokens for job in jobs] == [3, 5]
    first_ns = {0: 0, 1: 0}
    assert window_of(per_token(), jobs, 200_000, first_ns) == 100 - 2
    assert window_of(per_token(margin=0.1), jobs, 200_000, first_ns) == 90 - 2
    assert window_of(per_token(), jobs, 50_000, first_ns) == 250 - 2
    assert window_of(per_token(), jobs, 200_000, {0: 190_000, 1: 0}) == 290 - 2
    assert window_of(per_token(), jobs, 230_000, {0: 220_000, 1: 0}) == 270 - 2, "request 1"


def test_a_token_that_is_late_leaves_nothing() -> None:
    jobs = [decoding(0, 10), decoding(1, 12)]
    assert window_of(per_token(), jobs, 310_000, {0: 0, 1: 0}) == 0


def test_a_first_token_in_flight_counts_from_now_at_the_earliest() -> None:
    jobs = [decoding(0, 10), decoding(1, 12)]
    assert window_of(per_token(), jobs, 100_000, {1: 0}) == 300 - 2


def test_a_first_token_is_due_if_it_has_a_limit() -> None:
    arrived = [Job(2, 20_000, 90, 90)]  # of which a step takes 63 beside a decode
    first_ns, jobs = {0: 0}, [decoding(0, 10)]
    plain, limited = per_token(), per_token(ttft_s=1e-4)
    assert window_of(plain, jobs, 40_000, first_ns, arrived) == 260 - 64
    assert window_of(limited, jobs, 40_000, first_ns, arrived) == 80 - 64
    assert window_of(plain, [], 40_000, {}, arrived) == 100 - 64, "no token is due: a step is"


def test_behind_a_first_token_the_second_is_due() -> None:
    arrived, jobs = [Job(2, 20_000, 30, 30)], [decoding(0, 10)]
    assert window_of(per_token(), jobs, 40_000, {0: 0}, arrived) == 100 - 31


def test_steps_in_flight_come_before_it() -> None:
    """By the quotes of what was issued, windows included; another lane's do not count."""
    jobs, first_ns = [decoding(0, 10)], {0: 0}
    before = Compute((Slice(jobs[0], 1),))
    assert window_of(per_token(), jobs, 150_000, first_ns, in_flight=[before]) == 150 - 2
    sample = Job.trains(TrainingProgress(finetuning_job(9, [Sample(400)])), 0)
    back = Compute((Slice(sample, 60, Work.BACKWARD, range(4, 5)),))
    assert window_of(per_token(), jobs, 150_000, first_ns, in_flight=[before, back]) == 90 - 2
    copied = Compute((Slice(jobs[0], 1),), on="cpu")
    assert window_of(per_token(), jobs, 150_000, first_ns, in_flight=[copied]) == 150 - 1


def test_a_window_in_flight_is_quoted_as_it_was_issued() -> None:
    """With its head: behind its issue its job is at another place, and the head costs most."""
    quoted, issued = list[int](), dict[Op, int]()

    class Watched(CoServeSlo):
        def _in_flight_ns(self, view: View, cost: Cost) -> float:
            for op in view.in_flight:
                if isinstance(op, Compute) and op.slices[-1].job.training is not None:
                    quoted.append(cost.launch_ns(view.launch_of(op)))
                    issued[op] = quoted[-1]
            return super()._in_flight_ns(view, cost)

    scheduling = Watched(ChunkedPrefill(64, 12), 2e-3, kind="token", multiple=MULTIPLE)
    work = [*random_requests(3, 12, 400.0), finetuning_job(1000, [Sample(60)] * 6)]
    recorder, cost = run(scheduling, work, depth=2)
    ran = {launch.op: cost.compute_ns(launch) for *_, launch in recorder.steps}
    assert len(issued) > 5
    assert {op: ran[op] for op in issued} == issued


def overdue_tokens(recorder: Recorder, slo_s: float) -> list[int]:
    """Of each request, the tokens that came behind their time, counted from the first one."""
    found = list[int]()
    for outcome in recorder.outcomes.values():
        first_ns, *others = outcome.token_ns
        due_ns = [first_ns + i * slo_s * 1e9 for i in range(1, 1 + len(others))]
        found.append(sum(ns > due for ns, due in zip(others, due_ns, strict=True)))
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("more", [1.1, 1.6, 3.0])
def test_every_token_is_in_time_where_serving_alone_is(more: float, depth: int) -> None:
    """A simulation runs as it is quoted; the time that a step leaves goes to a later one.

    The margin covers prompts of the next step, of which no request in service tells.
    """
    work = of_sample(120)
    slo_s = more * fastest_ns(work) / 1e9
    recorder, _ = run(within(slo_s, kind="token"), work, on=NO_HOST, depth=depth)
    assert not any(overdue_tokens(recorder, slo_s))
    assert max(ns for ns, serves, _ in step_ns(recorder).values() if serves) > 0.9 * slo_s * 1e9
    stepwise, _ = run(within(slo_s), work, on=NO_HOST, depth=depth)
    assert rate(recorder) > (1.0 if more < 2 else 0.99) * rate(stepwise), "little is to be gained"


def test_finetuning_without_limits_makes_tokens_late() -> None:
    """The control: a window of a whole sample beside each step."""
    work = of_sample(120)
    slo_s = 1.1 * fastest_ns(work) / 1e9
    recorder, _ = run(CoServe(ChunkedPrefill(64, 12), 512, backward_layers=4), work, on=NO_HOST)
    assert sum(overdue_tokens(recorder, slo_s)) > 20


def test_equal_views_get_equal_plans() -> None:
    work = of_sample(120)
    scheduling = within(1.5 * fastest_ns(work) / 1e9, kind="token", ttft_s=0.01)
    watched: list[WatchedPolicy] = []
    run(scheduling, work, watch=watched, on=NO_HOST)
    assert watched[0].asked > 40


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "step"}, "kind is step, must be iteration or token"),
        ({"ttft_s": 1.0}, "ttft_s is a limit of tokens: set kind=token"),
        ({"kind": "token", "ttft_s": 0.0}, "ttft_s is 0.0, must be above 0"),
    ],
)
def test_wrong_kinds_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        within(1.0, **given)


# ---- temporal sharing
def temporal(**given: Any) -> Temporal:
    return Temporal(ChunkedPrefill(64, 12), **given)


def kinds(recorder: Recorder) -> str:
    """A letter per plan: s serves, f forward, b back."""
    told = ""
    for _, serves, works in step_ns(recorder).values():
        own = works - {Work.UPDATE}
        assert not (serves and own), "a step serves or trains"
        told += "s" if serves else "f" if Work.FORWARD in own else "b" if own else "u"
    return told


def test_two_steps_train_behind_some_that_serve() -> None:
    """A sample forward, and back; where nothing is served, training goes on."""
    job = finetuning_job(1000, [Sample(50)], num_steps=1 << 20, until_served=True)
    recorder, _ = run(temporal(every=4), [Request(0, 0, 5, 41), job])
    assert kinds(recorder)[:24] == "ssssfb" * 4
    whole = [
        p.tokens for row in recorder.plans for p in finetuned(row[-1]) if p.work is not Work.UPDATE
    ]
    assert {*whole} == {50}


def test_training_comes_seldom_while_requests_wait() -> None:
    job = finetuning_job(1000, [Sample(50)], num_steps=1 << 20, until_served=True)
    many = [Request(i, 0, 5, 41) for i in range(24)]  # twelve wait while twelve are served
    busy, _ = run(temporal(every=4, busy_every=16, queue=3), [*many, job])
    assert kinds(busy).count("f") < kinds(run(temporal(every=4), [*many, job])[0]).count("f")


def test_a_limited_turn_is_a_window_or_some_layers() -> None:
    job = finetuning_job(1000, [Sample(50)], num_steps=1 << 20, until_served=True)
    limited = temporal(every=4, window_tokens=20, backward_layers=2)
    recorder, _ = run(limited, [Request(0, 0, 5, 61), job])
    own = windows_of(recorder)
    told = [(p.work, p.tokens, len(p.layers or ())) for p in own[:5]]
    forward = [(Work.FORWARD, n, 6) for n in (20, 20, 10)]
    assert told == [*forward, (Work.BACKWARD, 50, 2), (Work.BACKWARD, 50, 2)]


@pytest.mark.parametrize("seed", range(4))
def test_turns_of_training_without_room_serve(seed: int) -> None:
    """Requests fill the pool while a sample waits: serving goes on, and training comes again."""
    rng = random.Random(seed)
    jobs = [random_job(rng, 1000)]
    requests = random_requests(rng.randint(0, 1 << 30), 30, rate=2000)
    policy = Composed(Temporal(ChunkedPrefill(BUDGET, 12), every=2), CoMemory(PagedRestart()))
    found = replay(
        policy, [*requests, *jobs], pages=150, page=PAGE, layout=layout_of_jobs(jobs, 150)
    ).check()
    assert [row["status"] for row in found.rows("requests")] == ["finished"] * 30
    assert len(found.rows("training")) == 3


def test_a_job_that_trains_all_goes_back_to_its_embedding() -> None:
    job = finetuning_job(1000, [Sample(40)] * 2, recipe=Recipe())
    work = [*random_requests(0, 6), job]
    recorder, _ = run(within(4 * fastest_ns(work) / 1e9), work)
    backs = [piece.layers for piece in windows_of(recorder) if piece.work is Work.BACKWARD]
    assert any([units is not None and units.start == 0 for units in backs])
    assert len(recorder.tables()["training"]) == 2


def test_wrong_turns_are_told() -> None:
    with pytest.raises(ValueError, match="every is 0, must be at least 1"):
        temporal(every=0)
    with pytest.raises(ValueError, match="queue is -1, must not be below 0"):
        temporal(queue=-1)
