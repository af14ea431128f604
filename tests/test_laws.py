"""The laws of DESIGN.md as properties of random replays, and mutations that the checks catch."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checks import check_capacity, check_inputs
from engine.door import Door
from engine.engine import Stalled
from engine.ledger import Ledger
from engine.plan import Plan, Tier
from engine.planlog import LoggedPlan, encode
from engine.policy import Composed, Policy
from engine.view import View
from policies.recorded import Recorded
from tests.replays import MEMORY, PAGE, SCHEDULING, Replay, composed, random_requests, replay
from traces.request import Request

COMBINATIONS = [(s, m) for s in SCHEDULING for m in MEMORY]
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))

traces = st.lists(
    st.tuples(st.integers(0, 30_000_000), st.integers(1, 80), st.integers(1, 40)),
    min_size=1,
    max_size=25,
).map(lambda rows: [Request(i, *row) for i, row in enumerate(rows)])


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(
    requests=traces,
    pages=st.integers(31, 90),
    host_pages=st.integers(0, 40),
    depth=st.integers(1, 3),
    noise=st.sampled_from([0.0, 0.4]),
    host_ns=st.sampled_from([0, 30_000]),
)
@quick
def test_every_replay_obeys_the_laws(
    scheduling: str, memory: str, requests: list[Request], pages: int, **setting: float
) -> None:
    policy = Watched(composed(scheduling, memory))
    run = replay(policy, requests, pages=pages, **setting).check()  # type: ignore[arg-type]
    assert run.engine.ledger.held_bytes == {}, "bytes are left over"
    assert len(run.recorder.outcomes) == len(requests)
    assert policy.idle_without_a_plan == 0, "law 9: the device idled beside runnable work"


class Watched:
    """Checks at each question what a policy must not do, and what the engine must show."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._now_ns = policy, 0
        self._wants_nothing = False  # the last answer, while nothing was in flight
        self.idle_without_a_plan = 0

    def plan(self, view: View) -> Plan:
        assert view.now_ns >= self._now_ns, "law 6: the clock ran back"
        self.idle_without_a_plan += self._wants_nothing and view.now_ns > self._now_ns
        self._now_ns = view.now_ns
        before = snapshot(view)
        plan = self._policy.plan(view)
        assert snapshot(view) == before, "law 8: the policy changed what it was shown"
        assert encode(plan) == encode(self._policy.plan(view)), "law 8: equal views, other plans"
        self._wants_nothing = not plan and not view.in_flight
        return plan


def snapshot(view: View) -> object:
    jobs = [*view.serving, *view.training, *view.waiting]
    state = [[getattr(job, f.name) for f in dataclasses.fields(job)] for job in jobs]
    ids = [[j.job_id for j in jobs] for jobs in (view.serving, view.training, view.waiting)]
    maps = (view.free_bytes, view.coming_bytes, view.held_bytes, view.written, view.used)
    return *copy.deepcopy((state, ids, [dict(m) for m in maps])), view.in_flight


def test_a_lost_request_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 1 is checked at every issue and settle of the replays above; here, that it bites."""
    monkeypatch.setattr(Door, "_leave", lambda *_: None)
    with pytest.raises(AssertionError, match="requests do not add up"):
        replay(composed("chunked", "restart"), random_requests(3, 5))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_plans_do_not_depend_on_durations(scheduling: str, memory: str, depth: int) -> None:
    """Law 11: all work at t=0, every duration varied by +-40 %: the same plans, page for page."""
    requests = random_requests(7, 30)
    runs = [
        replay(
            composed(scheduling, memory),
            requests,
            pages=40,
            depth=depth,
            noise=0.4 if seed else 0.0,
            seed=seed,
            host_ns=20_000 if seed % 2 else 0,
        ).check()
        for seed in range(5)
    ]
    assert all(run.log() == runs[0].log() for run in runs[1:])
    pages = [[row.pieces for row in launches(run)] for run in runs]
    assert all(other == pages[0] for other in pages[1:]), "page ids differ between runs"


def launches(run: Replay) -> list:
    rows = sorted(run.recorder.steps, key=lambda row: row[0])
    return [row[-1] for row in rows if row[-1].pieces]


def test_pressure_is_real() -> None:
    """The tight settings above do preempt: else the laws would be checked on idle ground."""
    requests = random_requests(7, 30)
    restarts = replay(composed("chunked", "restart"), requests, pages=40)
    swaps = replay(composed("chunked", "swap"), requests, pages=36, host_pages=60)
    assert sum(o.restarts for o in restarts.recorder.outcomes.values()) >= 5
    assert sum(o.swaps for o in swaps.recorder.outcomes.values()) >= 5


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_one_seed_gives_identical_bytes(scheduling: str, memory: str, tmp_path) -> None:
    """Law 7, down to the Parquet files."""
    for name in ("a", "b"):
        run = replay(composed(scheduling, memory), random_requests(5, 30, rate=1500), pages=40)
        (tmp_path / name).mkdir()
        run.recorder.write(tmp_path / name)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert len(files) == 4
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_output_lengths_stay_hidden(scheduling: str, memory: str) -> None:
    """Law 8: longer answers change no plan that is issued before the first request finishes."""
    requests = random_requests(11, 20, rate=800)
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


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
def test_a_plan_log_plays_back_byte_for_byte(scheduling: str, memory: str) -> None:
    """Timed arrivals, other durations: pages and bytes go through the same states."""
    requests = random_requests(13, 30, rate=1200)
    measured = replay(
        composed(scheduling, memory), requests, pages=40, noise=0.4, seed=3, host_ns=9_000
    )
    log = tuple(
        LoggedPlan(device, back, encode(plan))
        for _, device, _, back, plan in measured.recorder.plans
    )
    played = replay(Recorded(log), requests, pages=40, returns_memory=False)
    assert played.check().log() != []
    columns = ["step", "tier", "kv_bytes", "kv_pages"]
    before, after = (issue_counters(run, columns) for run in (measured, played))
    assert before == after
    assert [s.pieces for s in launches(measured)] == [s.pieces for s in launches(played)]


def issue_counters(run: Replay, columns: list[str]) -> list[tuple]:
    table = run.recorder.tables()["memory"].to_pylist()
    return [tuple(row[c] for c in columns) for row in table if row["cause"] == "issue"]


def mutate_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_wait", lambda *_: None)


def mutate_byte_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable = Ledger._take

    def take(self: Ledger, place, nbytes) -> None:  # type: ignore[no-untyped-def]
        original(self, place, nbytes)
        self._givers.pop(place, None)

    monkeypatch.setattr(Ledger, "_take", take)


@pytest.mark.parametrize("mutate", [mutate_all_waits, mutate_byte_waits])
def test_the_checks_catch_a_ledger_that_forgets_waits(
    mutate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its waits a swapping policy reads stale pages or overfills the device."""
    mutate(monkeypatch)
    caught = 0
    for seed in range(6):
        run = replay(composed("chunked", "swap"), random_requests(seed, 30), pages=36)
        try:
            check_inputs(run.plans, run.spans)
            check_capacity(run.journal.lives, run.spans, run.engine.ledger.capacity_bytes)
        except AssertionError:
            caught += 1
    assert caught == 6


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
