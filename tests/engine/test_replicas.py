"""Replicas in one engine: each is the single-device run of what was routed to it; all laws hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.plan import Compute, Copy, Free, Grow, Plan
from engine.contract.policy import Router
from engine.contract.view import View
from engine.loop.engine import Stalled
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin
from policies.scheduling.recorded import RecordedPlans, RecordedRouter
from tests.policies.test_router import ROUTERS
from tests.support.replays import (
    COMBINATIONS,
    SCHEDULING,
    Replay,
    composed,
    random_requests,
    replay,
)
from tests.support.strategies import TIMING, cases, traces
from traces.serving.request import Request


def rows_of(run: Replay, name: str, device: int) -> list[dict[str, Any]]:
    """A table's rows of one device, as if it were the only one; numbers of plans left out."""
    rows = [row for row in run.rows(name) if row["device"] == device]
    return [{**row, "device": 0, "step": 0, "body": 0} for row in rows]


def logs(run: Replay) -> dict[int, list[str]]:
    """What was decided for each device."""
    found = defaultdict(list)
    for device, plan in run.log():
        found[device].append(plan)
    return found


# ---- a replica is a run of its own
@pytest.mark.broad(4)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_each_replica_is_the_single_run_of_its_own_requests(
    scheduling: str, memory: str, depth: int
) -> None:
    """To the nanosecond, page and byte, where the host takes no time (one host serves them all)."""
    requests = random_requests(5, 21, rate=6000)
    setting: dict[str, Any] = {"pages": 31, "depth": depth}
    run = replay(composed(scheduling, memory), requests, devices=3, router=RoundRobin(), **setting)
    run.check()
    for device in range(3):
        alone = replay(composed(scheduling, memory), requests[device::3], **setting)
        for name in ("requests", "steps"):
            assert rows_of(run, name, device) == rows_of(alone, name, 0)
        assert held(run, device) == held(alone, 0)
        assert pages(run, device) == pages(alone, 0)
    taken = {"restart": "restarts", "swap": "swaps"}.get(memory)
    if taken and scheduling == "chunked":
        assert sum(getattr(o, taken) for o in run.recorder.outcomes.values()), "no pressure"


def held(run: Replay, device: int) -> list[tuple[int, int]]:
    """Bytes and pages of KV on a device after each of its own plans."""
    own = {step for step, d, *_ in run.recorder.plans if d == device}
    at_issue = [r for r in run.rows("memory") if r["cause"] == "issue" and r["step"] in own]
    here = [r for r in at_issue if (r["tier"], r["device"]) == ("gpu", device)]
    return [(r["kv_bytes"], r["kv_pages"]) for r in here]


def pages(run: Replay, device: int) -> list[Any]:
    """Whose pages each launch of a device used, by number."""
    return [launch.pieces for launch in run.launches() if launch.op.lane[0] == device]


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_equal_jobs_in_turn_give_equal_replicas(scheduling: str) -> None:
    """All at once, all equal: every replica serves its share in the same nanoseconds."""
    requests = [Request(i, 0, 24, 12) for i in range(20)]
    run = replay(composed(scheduling, "restart"), requests, devices=4, router=RoundRobin()).check()
    ends = defaultdict(list)
    for outcome in run.recorder.outcomes.values():
        ends[outcome.device].append(tuple(outcome.token_ns))
    alone = replay(composed(scheduling, "restart"), requests[:5]).recorder.outcomes.values()
    assert all(ends[d] == [tuple(o.token_ns) for o in alone] for d in range(4))


# ---- the laws
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(), devices=st.integers(2, 4), depth=st.integers(1, 3), **TIMING)
@cases(12)
def test_every_replay_with_replicas_obeys_the_laws(
    scheduling: str, memory: str, router: Router, requests: list[Request], **setting: Any
) -> None:
    policy = OnlyItsOwn(composed(scheduling, memory))
    run = replay(policy, requests, pages=34, router=router, **setting).check()
    assert run.engine.ledger.held_bytes == {}, "bytes are left over"
    assert policy.idle == 0, "law 9: a replica idled beside work of its own"
    fleet = run.engine.state.fleet
    assert fleet is not None and sum(fleet.assigned) == len(requests)
    assert all(fleet.outstanding(i) == 0 for i in range(len(fleet))), "a request never left"
    check_places(run)


class OnlyItsOwn:
    """Checks at each question that a replica sees its own jobs, and that it does not idle."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.idle = policy, 0
        self._idle_since: dict[int, int] = {}

    def plan(self, view: View) -> Plan:
        jobs = [*view.serving, *view.waiting]
        assert {job.device for job in jobs} <= {view.device}
        plan = self._policy.plan(view)
        busy = any(op.lane[0] == view.device for op in view.in_flight)
        since = self._idle_since.pop(view.device, view.now_ns)
        self.idle += bool(plan) and view.now_ns > since
        if jobs and not plan and not busy:
            self._idle_since[view.device] = since
        return plan


def check_places(run: Replay) -> None:
    """Whatever happens to a request, restarts and swaps included, happens on its replica."""
    home = {job_id: outcome.device for job_id, outcome in run.recorder.outcomes.items()}
    for _, device, _, _, plan in run.recorder.plans:
        for op in plan.ops:
            if isinstance(op, Compute):
                assert op.device == device
                assert {home[piece.job.job_id] for piece in op.slices} == {device}
                places = op.writes
            else:
                places = (op.src, op.dst) if isinstance(op, Copy) else (op.place,)
                assert isinstance(op, Copy | Grow | Free)
            assert all(place.device == home[place.region.owner] == device for place in places)


def test_under_pressure_jobs_restart_and_swap_on_their_replica() -> None:
    """The tight settings are tight: else the checks of places would look at nothing."""
    requests = random_requests(7, 24)
    for memory, name in (("restart", "restarts"), ("swap", "swaps")):
        run = replay(
            composed("chunked", memory), requests, pages=31, devices=2, router=LeastOutstanding()
        )
        check_places(run.check())
        by_device = defaultdict(int)
        for outcome in run.recorder.outcomes.values():
            by_device[outcome.device] += getattr(outcome, name)
        assert min(by_device.values()) >= 3 and len(by_device) == 2


@pytest.mark.broad(4)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_decisions_of_a_replica_do_not_depend_on_durations(
    scheduling: str, memory: str, depth: int
) -> None:
    """Law 11 by device: all work at once, every duration varied by +-40 %."""
    requests = random_requests(7, 20)
    runs = [
        replay(
            composed(scheduling, memory),
            requests,
            pages=31,
            devices=2,
            depth=depth,
            noise=0.4 if seed else 0.0,
            seed=seed,
            host_ns=20_000 if seed % 2 else 0,
            router=LeastOutstanding(),
        ).check()
        for seed in range(3)
    ]
    decided = [logs(run) for run in runs]
    assert all(other == decided[0] for other in decided[1:]) and len(decided[0]) == 2
    for device in range(2):
        assert all(pages(run, device) == pages(runs[0], device) for run in runs[1:])


# ---- what can go wrong
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_a_request_too_big_for_a_replica_is_refused_and_the_rest_is_served(
    scheduling: str, memory: str
) -> None:
    requests = [Request(i, 0, 500 if i == 3 else 30, 5) for i in range(8)]
    run = replay(
        composed(scheduling, memory), requests, pages=32, devices=2, router=LeastOutstanding()
    ).check()
    statuses = [run.recorder.outcomes[i].status for i in range(8)]
    assert statuses == ["refused" if i == 3 else "finished" for i in range(8)]
    assert run.engine.state.fleet is not None and run.engine.state.fleet.outstanding(1) == 0


class RefusesToWork:
    """A policy that plans nothing on one device."""

    def plan(self, view: View) -> Plan:
        return Plan() if view.device == 1 else composed("chunked", "restart").plan(view)


def test_a_replica_that_stalls_is_told_with_its_jobs_when_the_others_are_done() -> None:
    requests = [Request(i, 0, 10, 3) for i in range(6)]
    with pytest.raises(Stalled, match=r"waiting \[1, 3, 5\]; free bytes .*gpu:1"):
        replay(RefusesToWork(), requests, devices=2, router=RoundRobin())


@pytest.mark.broad(4)
# ---- playing back
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_a_plan_log_of_replicas_plays_back_on_other_durations(scheduling: str, memory: str) -> None:
    """Each device passes through the same plans, pages and bytes, whichever is faster now."""
    requests = random_requests(9, 20, rate=2500)
    real = replay(
        composed(scheduling, memory),
        requests,
        pages=31,
        devices=2,
        noise=0.4,
        seed=3,
        router=LeastOutstanding(),
    ).check()
    log = real.plan_log()
    played = replay(
        RecordedPlans(log),
        requests,
        pages=31,
        devices=2,
        router=RecordedRouter(log),
        returns_memory=False,
    ).check()
    for device in range(2):
        assert pages(played, device) == pages(real, device)
        assert held(played, device) == held(real, device) != []
    homes = [[o.device for o in run.recorder.outcomes.values()] for run in (played, real)]
    assert homes[0] == homes[1]


def test_one_replica_with_a_router_is_the_run_without_one() -> None:
    """Repeated plans included: there is one device."""
    requests = random_requests(5, 30, rate=800)
    plain, routed = (
        replay(composed("chunked", "restart"), requests, pages=40, router=router)
        for router in (None, LeastOutstanding())
    )
    assert plain.recorder.tables() == routed.recorder.tables()


def test_a_request_knows_its_replica_in_the_table() -> None:
    requests = [replace(r, arrival_ns=i) for i, r in enumerate(random_requests(1, 7))]
    run = replay(composed("chunked", "restart"), requests, devices=3, router=RoundRobin())
    assert run.recorder.tables()["requests"]["device"].to_pylist() == [0, 1, 2, 0, 1, 2, 0]
