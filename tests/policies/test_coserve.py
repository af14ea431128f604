"""Co-serving: what is left of the budget finetunes, and finetuning takes nothing from serving."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.adapter_check import is_publication
from engine.contract.adapters import AdapterSpec
from engine.contract.executor import Launch
from engine.contract.layout import Layout, Mode
from engine.contract.plan import Compute, Copy, Free, Plan, Slice
from engine.contract.regions import KV_GRADIENT, SHARED_OWNER, Kind, Place, Region, Tier, Work
from models.parameters import adapter_bytes
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.recorded import RecordedPlans
from policies.sharing.adapters import AdapterMemory
from policies.sharing.coserve import CoMemory, CoServe
from policies.training.out_of_memory import OutOfMemory
from tests.policies.finetuning_jobs import (
    BUDGET,
    PAGE,
    SPEC,
    coserving,
    finetuning_job,
    layout_of_jobs,
    random_job,
)
from tests.support.replays import Replay, ToyExecutor, random_requests, replay
from traces.serving.request import Request, Sample, TrainingJob
from traces.training.recipe import Recipe

PAGES = (145, 160, 180, 220, 400)


def slices_of(plan: Plan) -> list[Slice]:
    return [piece for op in plan.ops if isinstance(op, Compute) for piece in op.slices]


def served(plan: Plan) -> list[Slice]:
    return [piece for piece in slices_of(plan) if piece.job.training is None]


def finetuned(plan: Plan) -> list[Slice]:
    return [piece for piece in slices_of(plan) if piece.job.training is not None]


def run(jobs: list[TrainingJob], requests: list[Request], pages: int, **given: Any) -> Replay:
    given.setdefault("policy", coserving())
    layout = layout_of_jobs(jobs, pages, given.pop("modes", Mode.KEEP))
    policy = given.pop("policy")
    return replay(policy, [*requests, *jobs], pages=pages, page=PAGE, layout=layout, **given)


@pytest.mark.broad(2)
@pytest.mark.parametrize("buffers", ["grown", "static"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("serving", [PagedRestart(), PagedSwap()], ids=["restart", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_laws_hold_under_pressure(
    buffers: Any, fused: bool, serving: Any, depth: int, request: pytest.FixtureRequest
) -> None:
    """Memory never exceeds its capacity, contents are as the launches find them, and all ends."""
    restarts = 0
    for seed in range(4):
        rng = random.Random(f"{request.node.name}{seed}")
        requests = random_requests(rng.randint(0, 1 << 30), 30, rate=rng.choice([200, 2000]))
        jobs = [random_job(rng, 1000 + i) for i in range(2)]
        memory = CoMemory(serving, buffers, fused)
        policy = coserving(memory, backward_layers=rng.choice([1, 2]))
        given = {"policy": policy, "depth": depth, "noise": 0.3, "seed": seed}
        found = run(jobs, requests, rng.choice(PAGES), **given).check()
        restarts += sum([job.training is not None for p in found.plans for job in p.restart])
        assert [row["status"] for row in found.rows("requests")] == ["finished"] * 30
        assert len(found.rows("training")) == 6
    assert not restarts or buffers == "grown"


def test_samples_give_way_in_these_replays() -> None:
    """The pressure is real: samples began anew, and their work was done again."""
    requests = random_requests(0, 30, rate=2000)
    found = run([random_job(random.Random(0), 1000, microbatches=2)], requests, PAGES[0]).check()
    restarts = [job.job_id for plan in found.plans for job in plan.restart if job.training]
    assert restarts and set(restarts) == {1000}


def by_requests(launch: Launch) -> int:
    """A launch takes as long as its requests make it."""
    op = launch.op
    own = [s.tokens for s in getattr(op, "slices", ()) if s.job.training is None]
    return 1 + 1000 * sum(own) + launch.nbytes


@pytest.mark.parametrize("backward_tokens", [None, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_finetuning_preempts_no_request(
    seed: int, microbatches: int, backward_tokens: int | None
) -> None:
    """Requests are planned as if samples held nothing, whether these are there or not."""
    rng = random.Random(seed)
    job = random_job(rng, 1000, until_served=True)
    given = {"microbatches": microbatches, "num_steps": 1 << 20, "until_served": True}
    job = finetuning_job(1000, job.samples, **given)
    requests, pages = random_requests(seed, 30), rng.choice(PAGES)
    policy = coserving(backward_tokens=backward_tokens)
    both = run([job], requests, pages, policy=policy, duration=by_requests).check()
    states = sum(layout_of_jobs([job], pages).places.values())
    alone = replay(
        policy,
        requests,
        pages=pages,
        page=PAGE,
        layout=Layout({Place(Region(SHARED_OWNER, Kind.WEIGHT), Tier.GPU, 0): states}),
        duration=by_requests,
    ).check()
    assert of_requests(both) == of_requests(alone)
    assert any(map(finetuned, both.plans))


@pytest.mark.parametrize("seed", range(4))
def test_finetuning_takes_only_adapters_that_no_request_needs(seed: int) -> None:
    """Slices are those of a run without finetuning, whose samples give way; more loads may be."""
    rng = random.Random(seed)
    recipe = Recipe(lora_rank=4)
    sizes = dict.fromkeys("acde", 3 * PAGE.nbytes + 7) | {"b": adapter_bytes(SPEC, recipe)}
    specs = [AdapterSpec(name, recipe, sizes[name]) for name in "abcde"]
    requests, pages = random_requests(seed, 30), rng.choice(PAGES[:3])
    requests = [replace(r, adapter=rng.choice(("", *"abcde"))) for r in requests]
    job = random_job(rng, 1000, until_served=True)
    job = finetuning_job(1000, job.samples, num_steps=1 << 20, until_served=True, publish="b")
    policy = coserving(CoMemory(AdapterMemory(PagedRestart(), 3)))
    given = {"pages": pages, "page": PAGE, "duration": by_requests, "host_pages": 1000}
    states = layout_of_jobs([job], pages)
    hosts = [(Tier.HOST, 0)]
    layout = states.with_adapters(specs, hosts)
    unpublished = finetuning_job(1000, job.samples, num_steps=1 << 20, until_served=True)
    both = replay(policy, [*requests, unpublished], layout=layout, **given).check()
    weights = Place(Region(SHARED_OWNER, Kind.WEIGHT), Tier.GPU, 0)
    alone = Layout({weights: sum(states.places.values())}).with_adapters(specs, hosts)
    by_itself = replay(policy, requests, layout=alone, **given).check()
    assert of_requests(both) == of_requests(by_itself)
    more, fewer = Counter(of_adapters(both)), Counter(of_adapters(by_itself))
    assert more >= fewer and fewer.total()
    assert any(map(finetuned, both.plans))
    published = replay(policy, [*requests, job], layout=layout, **given).check()
    updates = [piece for plan in published.plans for piece in finetuned(plan)]
    made = [op for plan in published.plans for op in plan.ops if is_publication(op)]
    assert len(made) == sum([piece.work is Work.UPDATE for piece in updates])


def test_a_log_with_new_versions_is_played_back_on_a_host_that_has_no_room_for_all() -> None:
    """The home of a version goes when the log frees what its last request held."""
    recipe = Recipe(lora_rank=4)
    spec = AdapterSpec("b", recipe, adapter_bytes(SPEC, recipe))
    requests = [replace(r, adapter="b") for r in random_requests(1, 30, rate=500)]
    job = finetuning_job(1000, [Sample(9)], num_steps=1 << 20, until_served=True, publish="b")
    layout = layout_of_jobs([job], 400).with_adapters([spec], [(Tier.HOST, 0)])
    host_pages = -(-4 * spec.nbytes // PAGE.nbytes)
    given = {"pages": 400, "page": PAGE, "host_pages": host_pages, "layout": layout}
    policy = coserving(CoMemory(AdapterMemory(PagedRestart())))
    run = replay(policy, [*requests, job], **given).check()
    assert sum([is_publication(op) for plan in run.plans for op in plan.ops]) > 4
    again = RecordedPlans(run.plan_log())
    played = replay(again, [*requests, job], returns_memory=False, **given).check()
    assert played.booked() == run.booked()


@pytest.mark.ci
def test_adapters_that_no_request_needs_give_way_to_finetuning() -> None:
    """Their copies would fill the device, also while nothing is served, and no window would run."""
    recipe = Recipe(lora_rank=4)
    specs = [AdapterSpec(name, recipe, 8 * PAGE.nbytes) for name in "abcdefgh"]
    requests = [Request(i, i * 1_000, 8, 2, adapter=name) for i, name in enumerate("abcdefgh" * 2)]
    requests += [Request(16, 10**9, 8, 2)]  # the job has all of the time until then
    job = finetuning_job(1000, [Sample(40)] * 4, until_served=True, num_steps=1 << 20)
    pages = 110
    layout = layout_of_jobs([job], pages).with_adapters(specs, [(Tier.HOST, 0)])
    policy = coserving(CoMemory(AdapterMemory(PagedRestart())))
    given = {"pages": pages, "page": PAGE, "host_pages": 1000, "layout": layout}
    found = replay(policy, [*requests, job], **given).check()
    early = [any([s.job.job_id < 16 for s in served(plan)]) for plan in found.plans]
    filled = max([number for number, is_early in enumerate(early) if is_early])
    assert Counter(what for what, _ in of_adapters(found))["goes"] > 0
    beside = [plan for plan in found.plans if served(plan) and has_window(plan)]
    assert beside and all(len(launches_of(plan)) == 1 for plan in beside), "windows join launches"
    assert any(map(finetuned, found.plans[:filled])), "while requests are served"
    assert sum(map(len, map(finetuned, found.plans[filled:]))) > 20, "and while none is"


def test_a_home_stays_until_the_plan_that_copies_from_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan may load a version for a job that then waits, and publish the next one."""
    freed, copied = set[Place](), Counter[Kind]()

    class Homes:
        def grow(self, place: Place, nbytes: int) -> None:
            freed.discard(place)

        def free(self, place: Place) -> None:
            freed.add(place)

    def run_copy(self: ToyExecutor, launch: Launch, done: Any) -> None:
        if isinstance(launch.op, Copy):
            assert launch.op.src not in freed
            freed.discard(launch.op.dst)
            copied[launch.op.src.region.kind] += 1
        start(self, launch, done)

    start = ToyExecutor.run
    monkeypatch.setattr(ToyExecutor, "run", run_copy)
    monkeypatch.setattr(ToyExecutor, "store", Homes())
    recipe = Recipe(lora_rank=4)
    spec = AdapterSpec("b", recipe, adapter_bytes(SPEC, recipe))
    for seed in range(8):
        freed.clear()
        rng = random.Random(seed)
        pages, names = rng.choice((145, 160)), ("", "", "", "b")
        requests = random_requests(seed, 40, rate=3000)
        requests = [replace(r, adapter=rng.choice(names)) for r in requests]
        given = {"num_steps": 1 << 20, "until_served": True, "publish": "b"}
        job = finetuning_job(1000, [Sample(2)], **given)  # it publishes every few plans
        layout = layout_of_jobs([job], pages).with_adapters([spec], [(Tier.HOST, 0)])
        memory = CoMemory(AdapterMemory(PagedRestart(watermark=0.2)))
        policy = coserving(memory, backward_layers=10)
        given = {"pages": pages, "page": PAGE, "host_pages": 1000, "layout": layout}
        replay(policy, [*requests, job], seed=seed, noise=0.3, **given).check()
        assert any([place.region.kind is Kind.ADAPTER for place in freed]), "homes go"
    assert copied[Kind.ADAPTER] > 20


def has_window(plan: Plan) -> bool:
    return any([piece.work is Work.FORWARD for piece in finetuned(plan)])


def launches_of(plan: Plan) -> list[Compute]:
    return [op for op in plan.ops if isinstance(op, Compute) and op.slices[0].work is Work.FORWARD]


def of_adapters(found: Replay) -> list[tuple[str, Place]]:
    """The copies of adapters to the device, and what gives way."""
    told = list[tuple[str, Place]]()
    for op in (op for plan in found.plans for op in plan.ops):
        if isinstance(op, Copy) and op.src.region.kind is Kind.ADAPTER:
            told.append(("comes", op.dst))
        elif isinstance(op, Free) and op.place.region.kind is Kind.ADAPTER:
            told.append(("goes", op.place))
    return told


def of_requests(found: Replay) -> list[tuple[list[tuple[int, int]], list[int]]]:
    """What plans decide of requests: slices and restarts."""
    told = list[tuple[list[tuple[int, int]], list[int]]]()
    for plan in found.plans:
        again = [job.job_id for job in plan.restart if job.training is None]
        if own := [(piece.job.job_id, piece.tokens) for piece in served(plan)]:
            told.append((own, again))
        assert own or not again
    return told


def test_a_window_takes_what_requests_leave_of_the_budget() -> None:
    job = finetuning_job(1000, [Sample(200)])
    found = run([job], [Request(i, 0, 1, 60) for i in range(10)], 900, depth=1).check()
    windows = [p for plan in found.plans for p in finetuned(plan) if p.work is Work.FORWARD]
    assert [piece.tokens for piece in windows] == [BUDGET - 10] * 5 + [200 - 5 * (BUDGET - 10)]
    launches = [op for plan in found.plans for op in plan.ops if isinstance(op, Compute)]
    fused = [op for op in launches if len({s.job.training is None for s in op.slices}) == 2]
    assert len(fused) == len(windows)
    assert max([sum([s.tokens for s in op.slices]) for op in fused]) == BUDGET


def test_a_backward_goes_down_some_layers_a_step_beside_what_is_served() -> None:
    job = finetuning_job(1000, [Sample(20)])
    requests = [Request(i, 0, 1, 60) for i in range(3)]
    found = run([job], requests, 900, policy=coserving(backward_layers=3)).check()
    own = [(plan, p) for plan in found.plans for p in finetuned(plan) if p.work is Work.BACKWARD]
    assert [piece.layers for _, piece in own] == [range(2, 5), range(1, 2)]
    assert all(len(served(plan)) == 3 for plan, _ in own)
    assert all(op.slices == (piece,) for plan, piece in own for op in alone_in(plan))


def alone_in(plan: Plan) -> list[Compute]:
    """Launches that serve nothing."""
    launches = [op for op in plan.ops if isinstance(op, Compute)]
    return [op for op in launches if all(s.job.training is not None for s in op.slices)]


def test_a_backward_in_windows_goes_from_the_last_token_to_the_first() -> None:
    """A unit has the sums of its keys' and values' gradients from its first window to its last."""
    job = finetuning_job(1000, [Sample(20)])
    policy = coserving(backward_tokens=8)
    found = run([job], [Request(0, 0, 1, 60)], 900, policy=policy).check()
    launches = [launch for launch in found.launches() if launch.op.slices[-1].work is Work.BACKWARD]  # type: ignore[union-attr]
    told = [
        (launch.op.slices[0].layers.start, launch.pieces[0].context_tokens, launch.pieces[0].tokens)  # type: ignore[union-attr]
        for launch in launches
    ]
    assert told == [
        (unit, start, tokens)
        for unit in (4, 3, 2, 1)
        for start, tokens in ((12, 8), (4, 8), (0, 4))
    ]
    sums = [life for life in found.journal.lives if life.place.region.slot == KV_GRADIENT]
    assert len(sums) == 4


def test_a_budget_that_is_served_whole_leaves_no_window() -> None:
    """Finetuning has no minimum share (FlexLLM)."""
    job = finetuning_job(1000, [Sample(10)])
    requests = [Request(i, 0, BUDGET * 20, 1) for i in range(2)]
    found = run([job], requests, 900).check()
    first = next(i for i, plan in enumerate(found.plans) if finetuned(plan))
    assert first >= 2 * 20 - 1


def test_small_windows_wait_and_others_are_multiples() -> None:
    job = finetuning_job(1000, [Sample(100)])
    requests = [Request(i, 0, 1, 60) for i in range(10)]
    policy = coserving(multiple=16)
    found = run([job], requests, 900, policy=policy, depth=1).check()
    windows = [p for plan in found.plans for p in finetuned(plan) if p.work is Work.FORWARD]
    assert [piece.tokens for piece in windows] == [32, 32, 36]
    none = coserving(min_window=BUDGET - 9)
    found = run([job], requests, 900, policy=none, depth=1).check()
    begun = next(plan for plan in found.plans if finetuned(plan))
    assert not served(begun), "every window beside ten requests would be too small"


def test_jobs_take_turns_where_samples_come_late() -> None:
    """The first job waits for its second sample, and the job behind it goes on meanwhile."""
    early = finetuning_job(1000, [Sample(10), Sample(10, release_ns=10**9)], num_steps=2)
    late = finetuning_job(1001, [Sample(12), Sample(12)], num_steps=2)
    found = run([early, late], [Request(0, 0, 1, 2)], 900).check()
    ends = [(row["job_id"], row["step"]) for row in found.rows("training")]
    assert ends == [(1000, 0), (1001, 0), (1001, 1), (1000, 1)]
    starts = {row["start_ns"] for row in found.rows("training") if row["job_id"] == 1000}
    assert max(starts) == 10**9


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_that_has_begun_goes_on_before_another_begins(seed: int) -> None:
    """Samples that come late: one at a time holds memory, and none waits for another's to go."""
    rng = random.Random(seed)
    requests = random_requests(seed, 30, rate=400)
    last_ns = requests[-1].arrival_ns

    def samples() -> list[Sample]:
        released = sorted(rng.randrange(last_ns // 10) for _ in range(5))
        return [Sample(rng.randint(30, 60), release_ns=ns) for ns in released]

    jobs = [finetuning_job(1000 + i, samples(), num_steps=5) for i in range(2)]
    found = run(jobs, requests, 150).check()
    under_way: tuple[int, int] | None = None
    for plan in found.plans:
        if under_way is not None and under_way[0] in [job.job_id for job in plan.restart]:
            under_way = None
        for piece in finetuned(plan):
            own, work = (piece.job.job_id, piece.microbatch), piece.work
            if work is Work.UPDATE:
                under_way = None
            else:
                assert under_way in (None, own), "the other job's sample is not through"
                under_way = own


def test_a_job_ends_with_the_last_request() -> None:
    job = finetuning_job(1000, [Sample(30)], num_steps=1 << 20, until_served=True)
    found = run([job], [Request(0, 0, 5, 40)], 900).check()
    last_ns = max(found.recorder.outcomes[0].token_ns)
    assert found.recorder.plans[-1][2] <= last_ns and found.rows("training")
    resident = {place.region.owner for place in found.engine.ledger.held_bytes}
    assert 1000 not in resident


def test_a_log_is_played_back() -> None:
    rng = random.Random(8)
    requests, jobs = random_requests(8, 20), [random_job(rng, 1000)]
    found = run(jobs, requests, 150)
    layout = layout_of_jobs(jobs, 150)
    played = replay(
        RecordedPlans(found.plan_log()),
        [*requests, *jobs],
        pages=150,
        page=PAGE,
        layout=layout,
        returns_memory=False,
    ).check()
    assert played.booked() == found.booked()


@pytest.mark.parametrize("buffers", ["grown", "static"])
def test_a_sample_that_never_fits_is_told(buffers: Any) -> None:
    job = finetuning_job(1000, [Sample(200)])
    memory = CoMemory(PagedRestart(), buffers)
    with pytest.raises(OutOfMemory, match=r"gpu:0 is at least [\d,]+ bytes short for a window of"):
        run([job], [Request(0, 0, 5, 5)], 130, policy=coserving(memory))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"token_budget": 0}, "co-serving: token_budget is 0, must be at least 1"),
        ({"backward_layers": 0}, "co-serving: backward_layers is 0, must be at least 1"),
        ({"backward_tokens": 8, "backward_layers": 2}, "takes one layer in a step"),
    ],
)
def test_wrong_settings_are_told(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CoServe(ChunkedPrefill(), **setting)


def test_a_headroom_beyond_the_device_is_told() -> None:
    with pytest.raises(ValueError, match=r"headroom is 1.5, must be in \[0, 1\)"):
        CoMemory(PagedRestart(), headroom=1.5)
