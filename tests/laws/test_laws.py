"""The laws of DESIGN.md as properties of random replays; test_mutations.py shows that they bite."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.plan import Compute, Free, Grow, Plan
from engine.contract.policy import Policy
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View
from engine.laws.check_policy import WatchedPolicy
from engine.loop.engine import Stalled
from engine.results.plan_log import encode
from policies.composed import Composed
from policies.scheduling.recorded import RecordedPlans
from tests.support.replays import (
    COMBINATIONS,
    MEMORY,
    PAGE,
    SCHEDULING,
    composed,
    random_requests,
    replay,
)
from tests.support.strategies import SEEDS, TIMING, cases, room, traces
from traces.serving.request import Request


@pytest.mark.broad(4)
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(), **room(), **TIMING)
@cases(80)
def test_every_replay_obeys_the_laws(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    policy = WatchedPolicy(composed(scheduling, memory))
    run = replay(policy, requests, **setting).check()
    assert run.engine.ledger.held_bytes == {}, "bytes are left over"
    assert len(run.recorder.outcomes) == len(requests)
    assert policy.idle_without_a_plan == 0, "law 9: the device idled beside runnable work"


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(16, last_ns=0), seed=SEEDS, **room(50))
@cases(20)
def test_plans_do_not_depend_on_durations(
    scheduling: str, memory: str, requests: list[Request], seed: int, **setting: int
) -> None:
    """Law 11: all work at t=0, every duration varied by +-40 %: the same plans, page for page."""
    policy = composed(scheduling, memory)
    steady = replay(policy, requests, **setting)
    noisy = replay(policy, requests, noise=0.4, seed=seed, host_ns=20_000, **setting).check()
    assert noisy.log() == steady.log()
    assert [s.pieces for s in noisy.launches()] == [s.pieces for s in steady.launches()]


def test_pressure_is_real() -> None:
    """The tight settings above do preempt: else the laws would be checked on idle ground."""
    requests = random_requests(7, 16)
    restarts = replay(composed("chunked", "restart"), requests, pages=31)
    swaps = replay(composed("chunked", "swap"), requests, pages=31)
    assert sum(o.restarts for o in restarts.recorder.outcomes.values()) >= 5
    assert sum(o.swaps for o in swaps.recorder.outcomes.values()) >= 5


@pytest.mark.broad(4)
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(16), seed=SEEDS, **room(50), **TIMING)
@cases(20)
def test_one_seed_gives_identical_bytes(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    """Law 7, down to the Parquet files."""
    with TemporaryDirectory() as folder:
        one, two = (
            replay(composed(scheduling, memory), requests, **setting).files(Path(folder, name))
            for name in ("one", "two")
        )
    assert len(one) == 6 and one == two, "five tables and their hashes"


@pytest.mark.broad(4)
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(12, least_output_tokens=6), **room(), **TIMING)
@cases(20)
def test_output_lengths_stay_hidden(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    """Law 8: longer answers change no plan that is issued before the first request finishes."""
    longer = [dataclasses.replace(r, output_tokens=r.output_tokens + 50) for r in requests]
    policy = composed(scheduling, memory)
    runs = [replay(policy, work, **setting) for work in (requests, longer)]
    finish_ns = min(o.finish_ns for run in runs for o in run.recorder.outcomes.values())
    early = [[encode(row[-1]) for row in run.recorder.plans if row[2] < finish_ns] for run in runs]
    common = min(len(log) for log in early) - setting["depth"]  # so many may count on the finish
    assert common >= 6 - setting["depth"], "the shortest answer has 6 tokens"
    assert early[0][:common] == early[1][:common]


@dataclasses.dataclass
class Tired:
    """Wants nothing any more from some moment on."""

    policy: Policy
    until_ns: int

    def plan(self, view: View) -> Plan:
        return self.policy.plan(view) if view.now_ns < self.until_ns else Plan()


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(12), until_ns=st.integers(0, 30_000_000), **room(), **TIMING)
@cases(20)
def test_a_policy_that_wants_nothing_is_an_error_that_names_the_jobs(
    scheduling: str, memory: str, requests: list[Request], until_ns: int, **setting: Any
) -> None:
    """Law 10: jobs that would have been in a launch from then on are named, and no others, as many
    as a message has room for."""
    policy = composed(scheduling, memory)
    alone = {"fast_forward": False, **setting}  # it goes by the clock, so no plan may stand
    whole = replay(policy, requests, **alone).recorder.plans
    lost = {
        piece.job.job_id
        for _, _, issue_ns, _, plan in whole
        for op in plan.ops
        if issue_ns >= until_ns and isinstance(op, Compute)
        for piece in op.slices
    }
    named, more = set[int](), 0
    try:
        replay(Tired(policy, until_ns), requests, **alone)
    except Stalled as error:
        lists = re.findall(r"(?:waiting|serving) \[([\d, ]+)\](?: and (\d+) more)?", str(error))
        named = {int(number) for numbers, _ in lists for number in numbers.split(",")}
        more = sum(int(count or 0) for _, count in lists)
    assert named <= lost and len(named) + more == len(lost)


def test_turns_that_never_come_are_no_reason_to_wait() -> None:
    """Law 10: the first turn gets no answer."""
    turns = [Request(i, 0, 30, 5, session=0, turn=i) for i in range(3)]
    with pytest.raises(Stalled, match=r"waiting \[0\]"):
        replay(Tired(composed("chunked", "restart"), 0), turns)


class Idle:
    """Takes a page and gives it back, for ever."""

    def plan(self, view: View) -> Plan:
        place = kv_place(view.waiting[0].job_id)
        return Plan((Free(place) if place in view.held_bytes else Grow(place, PAGE.nbytes),))


@given(requests=traces(8, last_ns=0), **room())
@cases(30)
def test_plans_without_end_that_do_nothing_are_an_error_that_names_the_jobs(
    requests: list[Request], **setting: int
) -> None:
    """Law 10: no time passes in them, so nothing would ever end the loop."""
    named = re.escape(f"waiting {[r.request_id for r in requests]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.loop.engine.FRUITLESS", 1_000)
        with pytest.raises(Stalled, match=f"last 1,000 plans hold no operation: .*{named}"):
            replay(Idle(), requests, **setting)


@pytest.mark.broad(4)
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(16), seed=SEEDS, **room(50))
@cases(20)
def test_a_plan_log_plays_back_byte_for_byte(
    scheduling: str, memory: str, requests: list[Request], seed: int, **setting: int
) -> None:
    """Timed arrivals, other durations: pages and bytes go through the same states."""
    noisy = {"noise": 0.4, "seed": seed, "host_ns": 9_000}
    measured = replay(composed(scheduling, memory), requests, **noisy, **setting)
    policy = WatchedPolicy(RecordedPlans(measured.plan_log()))
    played = replay(policy, requests, returns_memory=False, **setting).check()
    assert played.booked() == measured.booked() != []
    assert [s.pieces for s in played.launches()] == [s.pieces for s in measured.launches()]


def test_a_request_that_can_never_fit_is_refused_and_the_rest_is_served() -> None:
    requests = [Request(0, 0, 30, 5), Request(1, 0, 500, 5), Request(2, 0, 30, 5)]
    for scheduling, memory in COMBINATIONS:
        run = replay(composed(scheduling, memory), requests, pages=32).check()
        statuses = [run.recorder.outcomes[i].status for i in range(3)]
        assert statuses == ["finished", "refused", "finished"], (scheduling, memory)


def test_a_request_that_outgrows_the_device_is_refused_alone() -> None:
    requests = [Request(0, 0, 40, 300), Request(1, 0, 20, 5)]
    run = replay(composed("chunked", "restart"), requests, pages=20).check()
    assert [run.recorder.outcomes[i].status for i in range(2)] == ["refused", "finished"]
    assert run.engine.ledger.held_bytes == {}


def test_sessions_release_a_turn_after_the_answer_and_the_thinking() -> None:
    turns = [Request(i, 0, 10, 4, session=7, turn=i, think_ns=5_000_000) for i in range(3)]
    run = replay(composed("chunked", "restart"), turns).check()
    outcomes = [run.recorder.outcomes[i] for i in range(3)]
    for before, after in itertools.pairwise(outcomes):
        assert after.arrival_ns == before.finish_ns + 5_000_000


def test_a_missing_turn_is_named() -> None:
    with pytest.raises(ValueError, match="session 3 has a turn 2 but no turn 1"):
        replay(composed("chunked", "restart"), [Request(0, 0, 5, 5, session=3, turn=2)])


def test_a_turn_that_comes_twice_is_named() -> None:
    """Else one of the two would be lost: law 1 begins with the trace."""
    turns = [Request(i, 0, 5, 5, session=3, turn=min(i, 1)) for i in range(3)]
    with pytest.raises(ValueError, match="session 3 has two turns 1"):
        replay(composed("chunked", "restart"), turns)


def test_run_ahead_hides_the_host() -> None:
    """With host time of 30 us a plan, two plans in flight end sooner than one (exact times)."""
    requests = random_requests(2, 20)
    ends = [
        replay(
            composed("chunked", "restart"), requests, depth=d, host_ns=30_000
        ).engine.state.env.now
        for d in (1, 2)
    ]
    assert ends[1] < ends[0]


def test_pages_hold_what_the_page_size_says() -> None:
    assert PAGE.count(9) == 3 and PAGE.bytes_for(9) == 12_000
    assert (Tier.GPU, 0) in replay(
        Composed(SCHEDULING["chunked"], MEMORY["restart"]), random_requests(0, 2)
    ).engine.ledger.capacity_bytes
