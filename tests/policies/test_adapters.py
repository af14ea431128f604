"""Adapters beside keys and values: which lie on the device, and what waits for one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.adapter_check import adapters_of
from engine.contract.adapters import AdapterSpec, AdapterVersion, resident_adapters
from engine.contract.layout import Layout
from engine.contract.plan import Compute, Copy, Free, Plan, Share
from engine.contract.regions import Kind, Place, Tier, adapter_place
from engine.contract.rules import ContractError, Rule
from engine.contract.view import View
from engine.laws.check_policy import WatchedPolicy
from engine.memory.pool import Chain
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.recorded import RecordedPlans
from policies.sharing.adapters import AdapterMemory
from tests.support.replays import MEMORY, SCHEDULING, Replay, random_requests
from tests.support.replays import replay as replay_with
from traces.serving.request import Request
from traces.training.recipe import Recipe

HOST_PAGES = 200
NAMES = tuple("abcdef")
SIZES = dict(zip(NAMES, (9_000, 4_000, 12_345, 7_000, 8_001, 9_000), strict=True))


def specs(names: Sequence[str] = NAMES) -> list[AdapterSpec]:
    return [AdapterSpec(name, Recipe(lora_rank=4), SIZES[name]) for name in names]


def layout(names: Sequence[str] = NAMES, devices: int = 1) -> Layout:
    pools = [(Tier.HOST, device) for device in range(devices)]
    return Layout().with_adapters(specs(names), pools)


def naming(requests: Sequence[Request], seed: int, names: Sequence[str] = NAMES) -> list[Request]:
    """Requests of which a seventh run through no adapter."""
    rng = random.Random(seed)
    return [replace(request, adapter=rng.choice(("", *names))) for request in requests]


def policy(
    memory: str = "restart", most: int | None = None, scheduling: str = "chunked"
) -> Composed:
    return Composed(SCHEDULING[scheduling], AdapterMemory(MEMORY[memory], most))


def replay(given: Any, requests: Sequence[Request], **how: Any) -> Replay:
    how = {"layout": layout(), "pages": 50, "host_pages": HOST_PAGES} | how
    return replay_with(given, requests, **how).check()


def loads(run: Replay) -> list[Place]:
    """Copies of adapters to the device, in issue order."""
    ops = [op for plan in run.plans for op in plan.ops if isinstance(op, Copy)]
    return [op.dst for op in ops if op.dst.region.kind is Kind.ADAPTER]


def residents(run: Replay) -> list[set[Place]]:
    """The adapters on the device behind each plan."""
    found, now = list[set[Place]](), set[Place]()
    for plan in run.plans:
        for op in plan.ops:
            if isinstance(op, Copy) and op.dst.region.kind is Kind.ADAPTER:
                assert op.dst not in now
                now = now | {op.dst}
            elif isinstance(op, Free) and op.place.region.kind is Kind.ADAPTER:
                now = now - {op.place}
        found.append(now)
    return found


@pytest.mark.broad(3)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_random_traces_keep_every_law(scheduling: str, memory: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        requests = naming(random_requests(seed, rate=rng.choice((None, 2000.0))), seed)
        how = {"pages": rng.randint(38, 60), "depth": rng.randint(1, 3), "noise": 0.4}
        watched = WatchedPolicy(policy(memory, rng.choice((None, 2)), scheduling))
        run = replay(watched, requests, seed=seed, **how)
        assert {outcome.status for outcome in run.recorder.outcomes.values()} == {"finished"}
        for op in (op for plan in run.plans for op in plan.ops if isinstance(op, Compute)):
            assert op.reads == adapters_of(op.slices, 0)
        calm = replay(policy(memory, None, scheduling), requests, **{**how, "noise": 0.0})
        noisy = replay(policy(memory, None, scheduling), requests, **how)
        if not requests[-1].arrival_ns:
            assert calm.log() == noisy.log()


def test_bytes_of_adapters_are_those_of_the_residents() -> None:
    run = replay(policy(), naming(random_requests(3), 3))
    rows = [r for r in rows_of_memory(run) if r["tier"] == "gpu" and r["cause"] == "issue"]
    sizes = [sum(SIZES[NAMES[p.region.part]] for p in held) for held in residents(run)]
    assert [row["adapter_bytes"] for row in rows] == sizes
    assert max(sizes) > 0 and len(set(sizes)) > 3


def rows_of_memory(run: Replay) -> list[dict[str, Any]]:
    run.recorder._names_adapters = True
    return run.rows("memory")


def test_the_least_recently_used_goes_first() -> None:
    """One request after another; of three adapters two fit."""
    turns = [("a", "b", "c", "b", "a", "c")[i] for i in range(6)]
    requests = [Request(i, i * 10**9, 4, 2, adapter=name) for i, name in enumerate(turns)]
    run = replay(policy(most=2), requests)
    assert [NAMES[place.region.part] for place in loads(run)] == ["a", "b", "c", "a", "c"]
    assert all(len(held) <= 2 for held in residents(run))


def test_an_adapter_that_no_job_needs_gives_way_to_keys_and_values() -> None:
    """The long prompt takes all pages but one, whose bytes no adapter fits into."""
    requests = [Request(0, 0, 4, 2, adapter="a"), Request(1, 10**9, 190, 2)]
    run = replay(policy(), requests, pages=49)
    assert [place.region.part for place in loads(run)] == [0]
    assert residents(run)[-1] == set()
    roomy = replay(policy(), requests, pages=60)
    assert residents(roomy)[-1] == {adapter_place(0, 0)}


def test_a_slice_without_room_for_its_adapter_waits() -> None:
    requests = [Request(0, 0, 150, 8, adapter="a"), Request(1, 0, 20, 4, adapter="c")]
    run = replay(policy(scheduling="static"), requests, pages=45)
    first, other = (run.recorder.outcomes[i] for i in (0, 1))
    assert other.scheduled_ns is not None and first.finish_ns is not None
    assert other.scheduled_ns >= first.finish_ns and not other.restarts
    assert {outcome.status for outcome in (first, other)} == {"finished"}


def test_a_job_that_fits_with_no_adapter_beside_it_is_refused() -> None:
    requests = [Request(0, 0, 170, 4, adapter="c"), Request(1, 0, 20, 4, adapter="c")]
    run = replay(policy(), requests, pages=44)
    assert [run.recorder.outcomes[i].status for i in (0, 1)] == ["refused", "finished"]


def test_other_requests_pass_one_that_would_need_an_adapter_too_many() -> None:
    requests = [Request(i, 0, 8, 30, adapter=name) for i, name in enumerate("aba")]
    run = replay(policy(most=1), requests)
    starts = [run.recorder.outcomes[i].scheduled_ns for i in range(3)]
    assert starts[0] == starts[2] and starts[1] is not None and starts[1] > (starts[0] or 0)


def test_without_adapters_plans_are_those_of_the_memory_policy() -> None:
    requests = random_requests(5)
    for memory in MEMORY:
        own = replay_with(Composed(SCHEDULING["chunked"], MEMORY[memory]), requests, pages=40)
        other = replay_with(policy(memory), requests, pages=40)
        assert own.log() == other.log()


def test_pages_of_another_adapter_are_never_found() -> None:
    prompt = tuple(range(16))
    turns = ("a", "b", "", "a", "b", "")
    requests = [
        Request(i, i * 10**9, 16, 2, prompt_ids=prompt, adapter=name)
        for i, name in enumerate(turns)
    ]
    memory = AdapterMemory(PagedRestart(prefix_caching=True))
    run = replay(Composed(SCHEDULING["chunked"], memory), requests)
    found = [run.recorder.outcomes[i].cached_tokens for i in range(6)]
    assert found == [0, 0, 0, 12, 12, 12]
    assert sum(isinstance(op, Share) for plan in run.plans for op in plan.ops) == 3


def test_pages_of_another_version_are_never_found() -> None:
    """A request that waits takes the keys of the version that it will run through."""
    spec = specs()[0]
    request = Request(0, 0, 16, 2, prompt_ids=tuple(range(16)), adapter=spec.name)
    begun = AdapterVersion(spec, 0, 0)
    chains = {version: Chain(request, 4, begun._replace(version=version)) for version in range(3)}
    keys = {version: chain.of_prompt() for version, chain in chains.items()}
    assert len({key for own in keys.values() for key in own}) == 12
    assert chains[0].through(begun._replace(version=2)).of_prompt() == keys[2]


def test_replicas_have_copies_of_their_own() -> None:
    from policies.routing.round_robin import RoundRobin

    requests = naming(random_requests(1, count=16), 1)
    how = {"devices": 2, "router": RoundRobin(), "layout": layout(devices=2)}
    run = replay(policy(), requests, **how)
    assert {place.device for place in loads(run)} == {0, 1}


@pytest.mark.broad(2)
@pytest.mark.parametrize("memory", MEMORY)
def test_a_log_is_played_back(memory: str) -> None:
    requests = naming(random_requests(7), 7)
    run = replay(policy(memory, 3), requests)
    played = replay(RecordedPlans(run.plan_log()), requests, returns_memory=False)
    assert played.booked() == run.booked() and residents(played) == residents(run)


# ---- what is refused
def test_an_unknown_adapter_is_refused_in_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"^request 0 names adapter 'z', and the run has a, b: [^\n]+$"
    ):
        replay(policy(), [Request(0, 0, 4, 2, adapter="z")], layout=layout("ab"))
    with pytest.raises(ValueError, match=r"^request 0 names adapter 'a', and the run has none: "):
        replay(policy(), [Request(0, 0, 4, 2, adapter="a")], layout=Layout())


def test_a_policy_that_brings_no_adapters_is_refused_in_one_line() -> None:
    own = Composed(SCHEDULING["chunked"], PagedRestart())
    with pytest.raises(ValueError, match=r"^policy ChunkedPrefill with PagedRestart brings no ad"):
        replay(own, [Request(0, 0, 4, 2, adapter="a")])


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two have one name"):
        replay(policy(), [Request(0, 0, 4, 2)], layout=layout("aa"))


class Broken:
    """Plans of a policy, of which one operation is changed."""

    def __init__(self, change: Any) -> None:
        self._whole, self._change = policy(), change
        self.traits = self._whole.traits

    def plan(self, view: View) -> Plan:
        plan = self._whole.plan(view)
        return replace(plan, ops=tuple(self._change(view, plan.ops)))


def without_reads(view: View, ops: Any) -> Any:
    return [replace(op, reads=()) if isinstance(op, Compute) else op for op in ops]


def without_copy(view: View, ops: Any) -> Any:
    return [op for op in ops if not isinstance(op, Copy)]


def frees_home(view: View, ops: Any) -> Any:
    return [*ops, Free(adapter_place(0, 0, Tier.HOST))]


def writes_to_it(view: View, ops: Any) -> Any:
    places = tuple(resident_adapters(view.held_bytes, (Tier.GPU, 0)))
    return [
        replace(op, writes=(*op.writes, *places)) if isinstance(op, Compute) else op for op in ops
    ]


def copies_back(view: View, ops: Any) -> Any:
    places = resident_adapters(view.held_bytes, (Tier.GPU, 0))
    return [*ops, *[Copy(p, Place(p.region, Tier.HOST)) for p in places]]


FAULTS = {
    without_reads: Rule.ADAPTER,
    without_copy: Rule.HELD,
    frees_home: Rule.JOB,
    writes_to_it: Rule.ADAPTER,
    copies_back: Rule.ADAPTER,
}


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_plan_that_breaks_a_rule_of_adapters_is_refused(change: Any) -> None:
    requests = [Request(0, 0, 8, 4, adapter="a"), Request(1, 0, 8, 4, adapter="b")]
    with pytest.raises(ContractError) as caught:
        replay(Broken(change), requests)
    assert caught.value.rule is FAULTS[change]
    assert "\n" not in str(caught.value)


def test_at_least_one_adapter_is_on_the_device() -> None:
    with pytest.raises(ValueError, match="most is 0"):
        AdapterMemory(PagedRestart(), most=0)
