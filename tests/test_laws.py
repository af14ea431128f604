"""The laws of DESIGN.md as properties of random replays; test_mutations.py shows that they bite."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from engine.engine import Stalled
from engine.plan import Free, Grow, Plan, Tier, kv_place
from engine.planlog import encode
from engine.policy import Composed
from engine.view import View
from policies.recorded import Recorded
from tests.replays import (
    COMBINATIONS,
    MEMORY,
    PAGE,
    SCHEDULING,
    composed,
    random_requests,
    replay,
)
from tests.strategies import TIMING, cases, room, traces
from tests.watched import Watched
from traces.request import Request


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=traces(), **room(), **TIMING)
@cases(80)
def test_every_replay_obeys_the_laws(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    policy = Watched(composed(scheduling, memory))
    run = replay(policy, requests, **setting).check()
    assert run.engine.ledger.held_bytes == {}, "bytes are left over"
    assert len(run.recorder.outcomes) == len(requests)
    assert policy.idle_without_a_plan == 0, "law 9: the device idled beside runnable work"


@pytest.mark.parametrize("depth", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_plans_do_not_depend_on_durations(scheduling: str, memory: str, depth: int) -> None:
    """Law 11: all work at t=0, every duration varied by +-40 %: the same plans, page for page."""
    requests = random_requests(7, 16)
    runs = [
        replay(
            composed(scheduling, memory),
            requests,
            pages=31,
            depth=depth,
            noise=0.4 if seed else 0.0,
            seed=seed,
            host_ns=20_000 if seed % 2 else 0,
        ).check()
        for seed in range(3)
    ]
    assert len({tuple(run.log()) for run in runs}) == 1
    pages = [[launch.pieces for launch in run.launches()] for run in runs]
    assert all(other == pages[0] for other in pages[1:]), "page ids differ between runs"


def test_pressure_is_real() -> None:
    """The tight settings above do preempt: else the laws would be checked on idle ground."""
    requests = random_requests(7, 16)
    restarts = replay(composed("chunked", "restart"), requests, pages=31)
    swaps = replay(composed("chunked", "swap"), requests, pages=31)
    assert sum(o.restarts for o in restarts.recorder.outcomes.values()) >= 5
    assert sum(o.swaps for o in swaps.recorder.outcomes.values()) >= 5


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_one_seed_gives_identical_bytes(scheduling: str, memory: str, tmp_path: Path) -> None:
    """Law 7, down to the Parquet files."""
    requests = random_requests(5, 16, rate=1500)
    one, two = (
        replay(composed(scheduling, memory), requests, pages=31).files(tmp_path / name)
        for name in ("one", "two")
    )
    assert len(one) == 5 and one == two


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_output_lengths_stay_hidden(scheduling: str, memory: str) -> None:
    """Law 8: longer answers change no plan that is issued before the first request finishes."""
    requests = random_requests(11, 12, rate=800)
    longer = [dataclasses.replace(r, output_tokens=r.output_tokens + 50) for r in requests]
    runs = [replay(composed(scheduling, memory), work, pages=70) for work in (requests, longer)]
    finish_ns = min(o.finish_ns for run in runs for o in run.recorder.outcomes.values())
    shortest = min(min(r.output_tokens for r in requests) - 1, 3)
    early = [[encode(row[-1]) for row in run.recorder.plans if row[2] < finish_ns] for run in runs]
    common = min(len(log) for log in early) - 2  # depth 2: two plans may count on the finish
    assert common > shortest
    assert early[0][:common] == early[1][:common]


def test_a_policy_that_wants_nothing_is_an_error_that_names_the_jobs() -> None:
    """Law 10."""

    class Nothing:
        def plan(self, view: View) -> Plan:
            return Plan()

    with pytest.raises(Stalled, match=r"waiting \[0, 1, 2\]"):
        replay(Nothing(), random_requests(1, 3))
    turns = [Request(i, 0, 30, 5, session=0, turn=i) for i in range(3)]
    with pytest.raises(Stalled, match=r"waiting \[0\]"):  # nobody answers, so no turn will come
        replay(Nothing(), turns)


def test_plans_without_end_that_do_nothing_are_an_error_that_names_the_jobs() -> None:
    """Law 10: no time passes in them, so nothing would ever end the loop."""

    class Idle:
        def plan(self, view: View) -> Plan:
            place = kv_place(view.waiting[0].job_id)
            return Plan((Free(place) if place in view.held_bytes else Grow(place, PAGE.nbytes),))

    with pytest.raises(Stalled, match=r"last 10,000 plans hold no operation: .*waiting \[0, 1\]"):
        replay(Idle(), random_requests(1, 2))


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_a_plan_log_plays_back_byte_for_byte(scheduling: str, memory: str) -> None:
    """Timed arrivals, other durations: pages and bytes go through the same states."""
    requests = random_requests(13, 18, rate=1200)
    measured = replay(
        composed(scheduling, memory), requests, pages=31, noise=0.4, seed=3, host_ns=9_000
    )
    policy = Watched(Recorded(measured.plan_log()))
    played = replay(policy, requests, pages=31, returns_memory=False).check()
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
        replay(composed("chunked", "restart"), requests, depth=d, host_ns=30_000).engine.env.now
        for d in (1, 2)
    ]
    assert ends[1] < ends[0]


def test_pages_hold_what_the_page_size_says() -> None:
    assert PAGE.count(9) == 3 and PAGE.bytes_for(9) == 12_000
    assert (Tier.GPU, 0) in replay(
        Composed(SCHEDULING["chunked"], MEMORY["restart"]), random_requests(0, 2)
    ).engine.ledger.capacity_bytes
