"""Records of served prompts: kept whole, used by samples, and first to give way."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.contract.adapters import AdapterSpec
from engine.contract.executor import Launch
from engine.contract.job import Job
from engine.contract.layout import Mode
from engine.contract.plan import Compute, Copy, Free, Plan, Slice
from engine.contract.policy import Traits
from engine.contract.records import is_adoption, record_places
from engine.contract.regions import Kind, Tier, Work, kv_place
from engine.contract.rules import ContractError
from engine.contract.view import View
from models.parameters import adapter_bytes
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.recorded import RecordedPlans
from policies.sharing.adapters import AdapterMemory
from policies.sharing.alchemist import Alchemist
from policies.sharing.coserve import CoMemory, CoServe
from policies.sharing.records import RecordRules
from tests.policies.finetuning_jobs import BUDGET, PAGE, SPEC, finetuning_job, layout_of_jobs
from tests.policies.test_feedback import feedback
from tests.support.prefixes import alike
from tests.support.replays import Replay, random_requests, replay
from traces.serving.request import Request, TrainingJob
from traces.training.recipe import Recipe

SERVING = {
    "restart": PagedRestart(),
    "swap": PagedSwap(),
    "kept": PagedRestart(prefix_caching=True),
    "kept, swap": PagedSwap(prefix_caching=True),
}
MS = 10**6
RECIPE = Recipe(lora_rank=4)
ADAPTER = AdapterSpec("a", RECIPE, adapter_bytes(SPEC, RECIPE))
CHUNKED = ChunkedPrefill(BUDGET, 40)  # more jobs than find room: some are preempted
HOMES = 2 * ADAPTER.nbytes // PAGE.nbytes  # of the host: two versions, and no record


def through(requests: list[Request]) -> list[Request]:
    return [replace(request, adapter="a") for request in requests]


def pressing(seed: int) -> list[Request]:
    """Requests that need more pages than there are: some are preempted."""
    rate = random.Random(seed).choice([1000, 20_000])
    found = through(random_requests(seed, 60, rate=rate))
    return [replace(request, output_tokens=2 * request.output_tokens) for request in found]


def learning(requests: list[Request], seed: int = 0, **given: Any) -> TrainingJob:
    given.setdefault("microbatches", 4)
    return finetuning_job(
        1000, feedback(requests, seed), learns=True, publish="a", **{"recipe": RECIPE, **given}
    )


def in_one_step(requests: list[Request], seed: int, most_ms: int = 40) -> TrainingJob:
    """A job whose first update is its last: meanwhile no record grows old, and no version comes."""
    samples, given = feedback(requests, seed, most_ms), {"learns": True, "until_served": True}
    given |= {"publish": "a", "recipe": RECIPE, "microbatches": len(samples)}
    return finetuning_job(1000, samples, **given)


def alchemist(
    serving: Any = None, rules: RecordRules | None = None, sharing: Any = None, **given: Any
) -> Composed:
    given.setdefault("record", "all")
    memory = AdapterMemory(serving or PagedRestart())
    return Composed(
        Alchemist(sharing or CoServe(CHUNKED, BUDGET), **given),
        CoMemory(memory, records=rules or RecordRules()),
    )


def run(requests: list[Request], job: TrainingJob, **given: Any) -> Replay:
    given = {"pages": 900, "host_pages": 4000, "policy": alchemist()} | given
    layout = layout_of_jobs([job], given["pages"], given.pop("modes", Mode.KEEP))
    layout = layout.with_adapters([ADAPTER], [(Tier.HOST, 0)])
    return replay(given.pop("policy"), [*requests, job], page=PAGE, layout=layout, **given)


def slices_of(plan: Plan) -> list[Slice]:
    return [piece for op in plan.ops if isinstance(op, Compute) for piece in op.slices]


def adopted(found: Replay) -> list[int]:
    """The requests behind whose records samples have started."""
    return [
        op.src.region.owner
        for plan in found.plans
        for op in plan.ops
        if is_adoption(op)
        for op in [op]
        if isinstance(op, Copy)
    ]


def forward_tokens(found: Replay) -> int:
    pieces = [piece for plan in found.plans for piece in slices_of(plan)]
    own = [p.tokens for p in pieces if p.job.training is not None and p.work is Work.FORWARD]
    return sum(own)


@pytest.mark.broad(2)
@pytest.mark.parametrize("modes", [Mode.KEEP, Mode.RECOMPUTE, Mode.OFFLOAD])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_start_behind_records(depth: int, offload: bool, modes: Mode) -> None:
    requests = through(random_requests(3, 30, rate=300))
    job = learning(requests, microbatches=8)
    policy = alchemist(rules=RecordRules(offload=offload))
    found = run(requests, job, depth=depth, modes=modes, policy=policy, noise=0.3).check()
    alone = run(
        requests, job, depth=depth, modes=modes, policy=alchemist(record="none"), noise=0.3
    ).check()
    used = adopted(found)
    assert len(used) > 4 and not adopted(alone)
    assert [row["status"] for row in found.rows("requests")] == ["finished"] * 30
    assert len(found.rows("training")) == job.num_steps
    saved = forward_tokens(alone) - forward_tokens(found)
    spared = sum([row[10] for row in found.recorder.records if row[7] == "used"])
    assert saved >= spared > 100


@pytest.mark.ci
@pytest.mark.broad(4)
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("depth", [1, 2])
def test_laws_hold_under_pressure(depth: int, serving: str, offload: bool) -> None:
    """Memory never exceeds its capacity, contents are as launches find them, and all ends."""
    preempted = found_tokens = 0
    keeps = "kept" in serving
    for seed in range(6):
        rng = random.Random(seed)
        rate = rng.choice([200, 2000])
        few = through(alike(seed, 60, rate) if keeps else random_requests(seed, 30, rate=rate))
        requests = rng.choice([few, pressing(seed)])
        job = learning(requests, seed, microbatches=rng.choice([1, 2, 4]))
        rules = RecordRules(
            offload, rng.choice([0, 2]), rng.choice([0, 1, 3]), hedge=rng.choice([0, 0.3])
        )
        record = rng.choice(["all", "everything"])
        start = rng.choice([0, 0, 7])
        policy = alchemist(SERVING[serving], rules, from_token=start, record=record)
        given = {"policy": policy, "depth": depth, "noise": 0.3, "seed": seed}
        pages, host = rng.choice([440, 500]), rng.choice([100, 400, 4000])
        found = run(requests, job, pages=pages, host_pages=host, **given).check()
        rows = found.rows("requests")
        assert {row["status"] for row in rows} == {"finished"}
        assert len(found.rows("training")) == job.num_steps
        preempted += sum([row["restarts"] + row["swaps"] for row in rows])
        found_tokens += sum([row["cached_tokens"] for row in rows])
    assert preempted and bool(found_tokens) is keeps


def by_requests(launch: Any) -> int:
    """A launch takes as long as its requests make it, and a copy of what is recorded no time.

    Where records make room by a copy, what is served waits for that: `hedge` is for it.
    """
    own = [s.tokens for s in getattr(launch.op, "slices", ()) if s.job.training is None]
    if isinstance(launch.op, Copy) and launch.op.src.region.kind is not Kind.ADAPTER:
        return 0
    return 1 + 1000 * sum(own) + launch.nbytes


def of_requests(found: Replay) -> list[list[tuple[int, int]]]:
    """Per plan, the slices of requests as job and tokens; plans without any are left out."""
    plans = [
        [(s.job.job_id, s.tokens) for s in slices_of(plan) if s.job.training is None]
        for plan in found.plans
    ]
    return [plan for plan in plans if plan]


def restarts(found: Replay) -> int:
    return sum([row["restarts"] for row in found.rows("requests")])


@pytest.mark.ci
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_requests_are_planned_as_if_records_held_nothing(seed: int, offload: bool) -> None:
    requests = pressing(seed)
    job = learning(requests, seed, until_served=True)
    pages = random.Random(seed).choice([440, 500])
    given = {"pages": pages, "duration": by_requests}
    rules = RecordRules(offload=offload)
    found = run(requests, job, policy=alchemist(rules=rules), **given).check()
    without = run(requests, job, policy=alchemist(record="none"), **given).check()
    assert of_requests(found) == of_requests(without)
    assert any(piece.record for plan in found.plans for piece in slices_of(plan))


@pytest.mark.ci
@pytest.mark.parametrize("offload", [True, False])
def test_records_cause_no_restart(offload: bool) -> None:
    """In a memory that is too small for the requests.

    What an answered request leaves may give way as its record a plan before it would come back
    without one. So plans are not equal. A request that is not preempted then goes on, and another
    one may find no room later: one of these traces has three restarts more, others have fewer.
    """
    counts = [0, 0]
    for seed in range(8):
        requests = through(random_requests(seed, 60, rate=20_000))
        requests = [replace(one, output_tokens=2 * one.output_tokens) for one in requests]
        job = in_one_step(requests, seed)
        for i, record in enumerate(("all", "none")):
            policy = alchemist(rules=RecordRules(offload=offload), record=record)
            found = run(requests, job, policy=policy, pages=320, duration=by_requests).check()
            counts[i] += restarts(found)
    assert 50 < counts[0] <= counts[1]


@dataclass
class Watched:
    """A policy, and what records keep on the device where a sample begins anew."""

    policy: Composed
    kept_bytes: list[int] = field(default_factory=list)  # per plan that has one begin anew
    ended: int = 0  # records that the plans have dropped

    @property
    def traits(self) -> Traits:
        return self.policy.traits

    def plan(self, view: View) -> Plan:
        plan, served = self.policy.plan(view), {job.job_id for job in view.serving}
        copies = [op for op in plan.ops if isinstance(op, Copy)]
        used = {op.src.region.owner for op in copies if is_adoption(op)}
        freed = {op.place for op in plan.ops if isinstance(op, Free)}
        ended, kept = freed - {op.src for op in copies}, 0
        for request, record in (view.records or {}).items():
            kv = () if request in served else (kv_place(request),)
            held = {place for place in (*record_places(record, 0), *kv) if place in view.held_bytes}
            if request not in used:
                self.ended += not held.isdisjoint(ended)
                kept += sum([view.held_bytes[place] for place in held - freed])
        if any(job.training is not None for job in plan.restart):
            self.kept_bytes.append(kept)
        return plan


def over_a_fast_link(launch: Launch) -> int:
    return 50_000 + 1_000 * sum(p.tokens for p in launch.pieces) + launch.nbytes // 2


def in_a_burst(rules: RecordRules) -> list[Watched]:
    """Runs in which three times the rate comes, with answers four times as long."""
    watched = list[Watched]()
    for seed in range(4):
        calm = random_requests(seed, 30, rate=300)
        end_ns = calm[-1].arrival_ns
        burst = [
            replace(
                request,
                request_id=100 + request.request_id,
                arrival_ns=end_ns + request.arrival_ns,
                output_tokens=4 * request.output_tokens,
            )
            for request in random_requests(50 + seed, 60, rate=900)
        ]
        requests = through([*calm, *burst])
        job = in_one_step(requests, seed, most_ms=60)
        watched.append(Watched(alchemist(rules=rules)))
        given = {"policy": watched[-1], "duration": over_a_fast_link}
        found = run(requests, job, pages=450, **given).check()
        assert {row["status"] for row in found.rows("requests")} == {"finished"}
        assert not restarts(found)
    return watched


@pytest.mark.ci
@pytest.mark.parametrize("hedge", [0.0, 0.05])
@pytest.mark.parametrize("offload", [True, False])
def test_in_a_burst_records_give_way_first_and_in_one_plan(offload: bool, hedge: float) -> None:
    """Where a sample begins anew, no record is left; no request does."""
    watched = in_a_burst(RecordRules(offload=offload, hedge=hedge))
    kept_bytes = [nbytes for one in watched for nbytes in one.kept_bytes]
    assert kept_bytes and not any(kept_bytes)
    assert sum([one.ended for one in watched])


@pytest.mark.ci
def test_fewer_records_end_where_what_waits_is_foreseen() -> None:
    """They have left for the host by then; a share that is kept in the calm, too, spares fewer."""
    rules = RecordRules(hedge=0.0), RecordRules(), RecordRules(hedge=0.0, hedge_tokens=64)
    none, share, foreseen = (sum([one.ended for one in in_a_burst(rule)]) for rule in rules)
    assert foreseen < share < none


def test_an_update_makes_records_old() -> None:
    """With a version behind each sample, only what was served with the newest one is of use."""
    requests = through(random_requests(3, 30, rate=300))
    each = run(requests, learning(requests, microbatches=1)).check()
    once = run(requests, learning(requests, microbatches=8)).check()
    assert len(adopted(each)) < len(adopted(once))


def test_staleness_lets_older_records_be_used() -> None:
    requests = through(random_requests(3, 30, rate=300))
    none = run(requests, learning(requests, microbatches=1)).check()
    some = run(requests, learning(requests, microbatches=1, staleness=100)).check()
    assert len(adopted(some)) > len(adopted(none))
    resident = [op for plan in some.plans for op in plan.ops if isinstance(op, Copy)]
    assert any(op.dst.region.kind is Kind.ADAPTER and op.dst.tier is Tier.GPU for op in resident)


@pytest.mark.broad(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_laws_hold_under_pressure_with_older_records(depth: int) -> None:
    for seed in range(4):
        rng = random.Random(100 + seed)
        requests = through(random_requests(seed, 30, rate=rng.choice([200, 2000])))
        job = learning(requests, seed, microbatches=1, staleness=rng.choice([1, 3, 100]))
        given = {"depth": depth, "noise": 0.3, "seed": seed, "pages": rng.choice([300, 400])}
        found = run(requests, job, host_pages=rng.choice([400, 4000]), **given).check()
        assert [row["status"] for row in found.rows("requests")] == ["finished"] * 30
        assert len(found.rows("training")) == job.num_steps


def test_a_stale_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = through(random_requests(3, 30, rate=300))
    monkeypatch.setattr("engine.contract.records.is_stale", lambda *_: False)
    monkeypatch.setattr("policies.sharing.records.is_stale", lambda *_: False)
    with pytest.raises(ContractError, match="updates behind"):
        run(requests, learning(requests, microbatches=1))


def test_a_preempted_prompt_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = pressing(0)
    monkeypatch.setattr(Job, "may_record", property(lambda job: True))
    with pytest.raises(ContractError, match="a job that was preempted leaves none"):
        run(requests, learning(requests, 0), pages=300)


def test_outcomes_tell_what_became_of_records() -> None:
    requests = through(random_requests(1, 40, rate=2000))
    found = run(requests, learning(requests, 1), pages=300, host_pages=HOMES).check()
    rows = found.recorder.records
    status = Counter([row[7] for row in rows])
    assert status["used"] == len(adopted(found)) - status["lost"]
    assert status["dropped"] > 0
    assert all((row[9] is None) is (row[8] is None) for row in rows)


@pytest.mark.parametrize("record", ["none", "all"])
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_a_step_begins_with_enough_samples(samples: int, record: str) -> None:
    """Each step; the last steps begin with those that are left."""
    requests = through(random_requests(5, 30, rate=300))
    job = learning(requests, 5)
    found = run(requests, job, policy=alchemist(samples=samples, record=record)).check()
    trained = found.rows("training")
    assert len(trained) == job.num_steps > 3
    came = sorted([at for times in found.recorder._released.values() for at in times])
    waited = 0
    for step, row in enumerate(trained):
        first = step * job.microbatches
        needs = min(samples, job.num_steps * job.microbatches - first)
        assert row["start_ns"] >= came[first + needs - 1], step
        waited += row["start_ns"] > came[first]
    assert samples == 1 or waited


def copied(plan: Plan, to: Tier) -> dict[int, list[int]]:
    """By request, the units of its record that a plan copies to a tier, in order."""
    found = dict[int, list[int]]()
    for op in plan.ops:
        if isinstance(op, Copy) and op.dst.tier is to and op.dst.region.kind is Kind.ACTIVATION:
            found.setdefault(op.dst.region.owner, []).append(op.dst.region.part)
    return found


def test_records_go_out_lowest_layer_first_and_come_back_highest_first() -> None:
    """Each unit ahead of its backward; with `ahead` none comes before the plan that reads it."""
    requests = through(random_requests(3, 30, rate=300))
    job = learning(requests, microbatches=8)

    def came(ahead: int) -> tuple[int, int]:
        """Units that came back with the plan of their backward, and those that came before."""
        rules = RecordRules(hedge=0.0, ahead=ahead)
        found = run(requests, job, policy=alchemist(rules=rules)).check()
        with_it, before = 0, 0
        for plan in found.plans:
            for units in copied(plan, Tier.HOST).values():
                assert units == sorted(units)
            back = [unit for units in copied(plan, Tier.GPU).values() for unit in units]
            assert back == sorted(back, reverse=True)
            own = [p for p in slices_of(plan) if p.work is Work.BACKWARD and p.layers]
            reads = {unit for piece in own for unit in piece.layers or ()}
            with_it += len([unit for unit in back if unit in reads])
            before += len([unit for unit in back if unit not in reads])
        return with_it, before

    lazy, eager = came(0), came(1)
    assert lazy[0] > 10 and not lazy[1]
    assert eager[1] > 10 and eager[0] < lazy[0] / 2


@pytest.mark.parametrize("tail", [0, 1, 2, 50])
def test_the_last_layers_stay(tail: int) -> None:
    """So many; all of them where there are fewer."""
    requests = through(random_requests(3, 30, rate=300))
    rules = RecordRules(hedge=0.0, keep_tail=tail)
    found = run(requests, learning(requests), policy=alchemist(rules=rules)).check()
    copies = [copied(plan, Tier.HOST).values() for plan in found.plans]
    out = {unit for units in copies for own in units for unit in own}
    units = range(1, SPEC.num_layers + 1)
    assert out == {*units[: max(0, len(units) - tail)]}


def test_records_leave_their_share_of_the_device_and_the_host_free() -> None:
    requests = through(random_requests(3, 40, rate=3000))

    def most(headroom: float, host_headroom: float) -> tuple[float, float]:
        """The fullest share of the device and of the host while prompts are recorded."""
        rules = RecordRules(headroom=headroom, host_headroom=host_headroom, hedge=0.0)
        policy, full = alchemist(rules=rules), dict[Tier, float]()
        found = run(requests, learning(requests), policy=policy, host_pages=400).check()
        for row in found.rows("memory"):
            tier, left = Tier(row["tier"]), row["free_bytes"] + row["coming_bytes"]
            full[tier] = max(full.get(tier, 0.0), 1 - left / row["capacity_bytes"])
        return full[Tier.GPU], full[Tier.HOST]

    free, kept = most(0.0, 0.0), most(0.5, 0.5)
    assert free[1] > 0.9 and kept[1] <= 0.5
    assert kept[0] < free[0]


def test_records_end_once_they_have_waited_for_too_long() -> None:
    requests = through(random_requests(3, 30, rate=300))
    job = learning(requests, 3, microbatches=8)
    lasting, short = (
        run(requests, job, policy=alchemist(rules=RecordRules(max_age_s=age))).check()
        for age in (None, 1e-6)
    )
    ends = {row["request_id"]: row["finish_ns"] for row in short.rows("requests")}
    answered = {sample.request for sample in job.samples}
    rows = [row for row in short.recorder.records if row[7] == "dropped"]
    silent = [row for row in rows if row[0] not in answered]
    assert silent and len(rows) > len([r for r in lasting.recorder.records if r[7] == "dropped"])
    assert all(row[6] - ends[row[0]] < 5 * 10**6 for row in silent)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"headroom": 1.0}, r"headroom is 1.0, must be in \[0, 1\)"),
        ({"host_headroom": -0.1}, "host_headroom is -0.1"),
        ({"hedge": 1.5}, "hedge is 1.5"),
        ({"keep_tail": -1}, "keep_tail is -1, must be at least 0"),
        ({"ahead": -1}, "ahead is -1, must be at least 0"),
        ({"max_age_s": 0.0}, "max_age_s is 0.0, must be above 0, or null"),
    ],
)
def test_wrong_rules_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RecordRules(**given)


@pytest.mark.parametrize("hedge", [0.0, 0.4])
def test_a_job_may_end_while_prompts_are_recorded(hedge: float) -> None:
    requests = through(random_requests(4, 40, rate=1000))
    job = learning(requests, 4, microbatches=1, num_steps=2)
    for offload in (True, False):
        rules = RecordRules(offload, hedge=hedge)
        found = run(requests, job, policy=alchemist(rules=rules), noise=0.3).check()
        assert len(found.rows("training")) == 2 and found.recorder.records


def test_what_a_sample_cannot_use_is_given_back() -> None:
    """A window behind the token before the last one of a prompt, or of an answer."""
    requests = through(random_requests(6, 30, rate=300))
    policy = alchemist(record="everything")
    found = run(requests, learning(requests, 6, microbatches=8), policy=policy).check()
    used = [row for row in found.recorder.records if row[7] == "used"]
    ends = {row["request_id"]: row["finish_ns"] for row in found.rows("requests")}
    assert used and all(row[6] is not None for row in used)
    prompts = {request.request_id: request.prompt_tokens for request in requests}
    assert all(row[10] <= prompts[row[0]] - 1 < row[3] for row in used)  # type: ignore[operator]
    assert all(row[8] >= ends[row[0]] for row in used)  # type: ignore[operator]


@pytest.mark.parametrize("serving", ["restart", "kept"])
@pytest.mark.parametrize("staleness", [0, 100])
def test_a_log_is_played_back(staleness: int, serving: str) -> None:
    requests = through(random_requests(8, 25, rate=500) if serving == "restart" else alike(8, 25))
    job = learning(requests, 3, microbatches=1, staleness=staleness)
    policy = alchemist(SERVING[serving])
    found = run(requests, job, policy=policy, noise=0.4, seed=1).check()
    assert adopted(found)
    order = [
        piece.job.training.spec.sample(piece.microbatch)
        for plan in found.plans
        for piece in slices_of(plan)
        if piece.job.training is not None and piece.work is Work.UPDATE
    ]
    again = finetuning_job(
        1000,
        [s._replace(release_ns=0) for s in order],
        publish="a",
        recipe=RECIPE,
        staleness=staleness,
    )
    played = run(
        requests, again, policy=RecordedPlans(found.plan_log()), returns_memory=False
    ).check()
    assert played.booked() == found.booked()


def test_records_that_share_pages_give_way_together() -> None:
    """The pages of a prompt that many records begin with come back with the last of these.

    A long request is not admitted beside another one as if each record gave them back.
    """
    begin = tuple(range(60))
    early = [Request(i, i * MS, 64, 2, prompt_ids=(*begin, *[i] * 4)) for i in range(12)]
    late = [Request(12 + i, 40 * MS, n, 9) for i, n in enumerate((400, 950))]
    late.append(Request(14, 41 * MS, 64, 9, prompt_ids=(*begin, 99, 99, 99, 99)))
    requests = through([*early, *late])
    job = learning(early, microbatches=1, until_served=True)
    job = replace(job, samples=tuple([s._replace(release_ns=10**9) for s in job.samples]))
    serving = PagedRestart(prompts="reserved", prefix_caching=True)  # many pages in a plan
    policy = alchemist(serving, RecordRules(offload=False, hedge=0.0, headroom=0.0))
    given = {"pages": 340, "host_pages": HOMES + 100, "policy": policy}
    found = run(requests, job, **given).check()
    assert {row["status"] for row in found.rows("requests")} == {"finished"}
    starts = {row["request_id"]: row["scheduled_ns"] for row in found.rows("requests")}
    assert starts[13] > starts[12] + MS, "it waits for the other one's end"


@pytest.mark.parametrize("tokens", range(1000, 1340, 20))
def test_pages_on_which_a_request_starts_are_no_room_for_another(tokens: int) -> None:
    """A record gives way, and its pages stay where a request of that plan has begun on them."""
    begin = tuple(range(60))
    requests = [Request(0, 0, 64, 2, prompt_ids=(*begin, 1, 1, 1, 1))]
    requests.append(Request(1, 40 * MS, 64, 2, prompt_ids=(*begin, 2, 2, 2, 2)))
    requests = through([*requests, Request(2, 40 * MS, tokens, 1)])
    job = learning(requests[:1] * 3, microbatches=1, until_served=True)
    job = replace(job, samples=tuple([s._replace(release_ns=10**9) for s in job.samples]))
    serving = PagedRestart(0.0, prompts="reserved", prefix_caching=True)
    policy = alchemist(serving, RecordRules(offload=False, hedge=0.0, headroom=0.0))
    given = {"pages": 340, "host_pages": HOMES + 100, "policy": policy}
    found = run(requests, job, **given).check()
    assert {row["status"] for row in found.rows("requests")} == {"finished"}
    assert found.rows("requests")[1]["cached_tokens"] == len(begin)
