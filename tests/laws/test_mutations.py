"""The checks of the laws bite: a fault put in on purpose is caught by the check of its law."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.contract.executor import Lanes
from engine.contract.plan import Compute, Copy, Grow, Lane, Op, Plan
from engine.contract.regions import Tier, kv_place
from engine.contract.rules import BrokenLaw, ContractError, Rule
from engine.contract.view import View
from engine.laws.check_policy import WatchedPolicy
from engine.laws.check_replay import check_capacity, check_inputs
from engine.loop.admission import Admission, ArrivalQueue
from engine.loop.engine import Stalled
from engine.memory.dry_run import DryRun
from engine.memory.ledger import NOTHING
from engine.memory.pool import FreeQueue, PagePool
from engine.memory.scoreboard import Scoreboard
from policies.composed import Composed
from tests.engine.test_ledger import figures, launch, ledger
from tests.support.replays import ToyExecutor, composed, random_requests, replay
from tests.support.states import POOL, decoding, job, view

CHUNKED = composed("chunked", "restart")


# ---- laws 1 and 2: checked at every issue and settle
def test_a_lost_request_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_leave", lambda *_: None)
    with pytest.raises(BrokenLaw, match="requests do not add up"):
        replay(CHUNKED, random_requests(3, 5))


def test_lost_bytes_are_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    give = FreeQueue.give
    monkeypatch.setattr(FreeQueue, "give", lambda self, n, users: give(self, n - 4000, users))
    with pytest.raises(BrokenLaw, match="does not add up"):
        replay(CHUNKED, random_requests(3, 5))


def test_a_lost_page_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    back = PagePool._return

    def lose_one(self: PagePool, returned: Any, queue: Any) -> None:
        returned.ids.pop()
        back(self, returned, queue)

    monkeypatch.setattr(PagePool, "_return", lose_one)
    with pytest.raises(BrokenLaw, match="a page is lost"):
        replay(CHUNKED, random_requests(3, 5))


# ---- law 3
def test_without_its_dry_run_half_a_plan_would_be_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DryRun, "run", lambda *_: None)
    books = ledger()
    before = figures(books)
    with pytest.raises(BrokenLaw, match="check before you take"):
        books.book(Plan((Grow(kv_place(0), 300), launch(0), Grow(kv_place(1), 900))))
    assert figures(books) != before, "what test_ledger.py compares after every shortage"


# ---- laws 4 and 5: checked on the spans of every replay
def all_at_once(self: ArrivalQueue) -> Iterator[Any]:
    for item in self._first:
        self._handed += 1
        self._hand_over(item, item.arrival_ns)
    yield self._env.timeout(0)


def test_work_that_begins_before_its_arrival_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrivalQueue, "run", all_at_once)
    run = replay(CHUNKED, random_requests(3, 10, rate=500))
    with pytest.raises(BrokenLaw, match="before its arrival"):
        run.check()


def test_a_lane_that_runs_two_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_ns(self: Lanes, lane: Lane, waits: Iterable[Op]) -> int:
        return max([int(self._env.now), *(self._end_ns.get(op, 0) for op in waits)])

    monkeypatch.setattr(Lanes, "start_ns", start_ns)
    run = replay(CHUNKED, random_requests(3, 10))
    with pytest.raises(BrokenLaw, match="two operations at once"):
        run.check()


# ---- laws 6 and 8: a watched policy
def test_a_clock_that_runs_back_is_caught() -> None:
    watched, state = WatchedPolicy(CHUNKED), view([], [job(0, 10)])
    watched.plan(replace(state, now_ns=5))
    with pytest.raises(BrokenLaw, match="law 6"):
        watched.plan(replace(state, now_ns=4))


class Meddler:
    """Changes what it is shown."""

    def __init__(self, meddle: Callable[[View], Any]) -> None:
        self._meddle = meddle

    def plan(self, view: View) -> Plan:
        self._meddle(view)
        return CHUNKED.plan(view)


MEDDLING: dict[str, Callable[[Any], Any]] = {
    "a job": lambda view: object.__setattr__(view.serving[0], "slo", "mine"),
    "the order of jobs": lambda view: view.serving.append(view.serving[0]),
    "capacity": lambda view: view.capacity_bytes.update({POOL: 1}),
    "bytes": lambda view: view.free_bytes.update({POOL: 1}),
    "the layout": lambda view: view.layout.places.update({kv_place(7): 1}),
    "the profile": lambda view: view.profile.issued(Compute(()), 0, NOTHING),
}
FIELD = {  # what the message names
    "a job": "slo of job 0",
    "the order of jobs": "view.serving",
    "capacity": "view.capacity_bytes",
    "bytes": "view.free_bytes",
    "the layout": "view.layout",
    "the profile": "view.profile",
}


class Moody:
    """Answers as it likes."""

    def __init__(self) -> None:
        self._asked = 0

    def plan(self, view: View) -> Plan:
        self._asked += 1
        return CHUNKED.plan(view) if self._asked % 2 else Plan()


@pytest.mark.parametrize("what", MEDDLING)
def test_a_policy_that_meddles_is_caught(what: str) -> None:
    with pytest.raises(
        BrokenLaw, match=f"^law 8: .*: the policy changed what it was shown, {FIELD[what]}:"
    ):
        WatchedPolicy(Meddler(MEDDLING[what])).plan(view([decoding(0, 9)], [job(1, 10)]))


def test_a_policy_that_remembers_is_caught() -> None:
    told = r"^law 8: .*: equal views, other plans: tokens of job 0: 1 at first, none then"
    with pytest.raises(BrokenLaw, match=told):
        WatchedPolicy(Moody()).plan(view([decoding(0, 9)], [job(1, 10)]))


@pytest.mark.parametrize("name", ["held_bytes", "written", "used", "capacity_bytes"])
def test_a_policy_cannot_write_into_the_books_of_the_ledger(name: str) -> None:
    """A policy could raise the real capacity once, and no check would have noticed."""
    meddler = Meddler(lambda view: getattr(view, name).update({POOL: 1}))
    told = r"^policy Meddler \(.*test_mutations\.py:\d+\), step 0, .*: 'mappingproxy'"
    with pytest.raises(ContractError, match=told) as caught:
        replay(meddler, random_requests(3, 5))
    assert caught.value.rule is Rule.READ_ONLY


# ---- law 7
def test_durations_without_a_seed_change_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vary(self: ToyExecutor) -> float:
        return random.SystemRandom().uniform(0.6, 1.4)

    monkeypatch.setattr(ToyExecutor, "_vary", vary)
    one, two = (replay(CHUNKED, random_requests(3, 10)).files(tmp_path / n) for n in ("1", "2"))
    assert one["steps.parquet"] != two["steps.parquet"]


# ---- law 9
def test_a_policy_that_asks_only_once_idles_beside_runnable_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that finds no room keeps running jobs from decoding: what taught us to ask twice."""

    def plan(self: Composed, view: View) -> Plan:
        return self._fitted(view)

    monkeypatch.setattr(Composed, "plan", plan)
    caught = 0
    for seed in range(6):
        watched = WatchedPolicy(composed("continuous", "restart"))
        try:
            replay(watched, random_requests(seed, 30, rate=1500), pages=40)
        except Stalled:
            caught += 1
        else:
            caught += watched.idle_without_a_plan > 0
    assert caught == 6


class Patient:
    """Waits until all that is in flight has ended."""

    def plan(self, view: View) -> Plan:
        return Plan()


@pytest.mark.parametrize(
    ("op", "idle"), [(Copy(kv_place(1), kv_place(1, Tier.HOST)), 1), (Compute(()), 0)]
)
def test_a_policy_that_rests_beside_a_copy_is_caught(op: Op, idle: int) -> None:
    """Beside a launch it may: the lane is busy."""
    watched, state = WatchedPolicy(Patient()), view([decoding(0, 9)], [])
    watched.plan(replace(state, in_flight=(op,)))
    watched.plan(replace(state, now_ns=state.now_ns + 1))
    assert watched.idle_without_a_plan == idle


# ---- law 11
class ByTheClock:
    """Admits waiting jobs in odd microseconds only: its decisions change with durations."""

    def plan(self, view: View) -> Plan:
        is_open = view.now_ns // 1000 % 2 or not view.serving
        return CHUNKED.plan(view if is_open else replace(view, waiting=()))


def test_plans_that_depend_on_durations_are_told_apart() -> None:
    logs = [replay(ByTheClock(), random_requests(7, 30), noise=0.4, seed=s).log() for s in (1, 2)]
    assert logs[0] != logs[1]


# ---- law 11b
@pytest.mark.parametrize("forgotten", ["_waits", "rest"])
def test_a_ledger_that_forgets_waits_is_caught(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waits, or those for bytes: a swapping policy reads stale pages or fills too many."""
    monkeypatch.setattr(Scoreboard, forgotten, lambda *_: ())
    caught = 0
    for seed in range(6):
        run = replay(composed("chunked", "swap"), random_requests(seed, 30), pages=36)
        try:
            check_inputs(run.plans, run.spans)
            check_capacity(run.journal.lives, run.spans, run.engine.ledger.capacity_bytes)
        except BrokenLaw:
            caught += 1
    assert caught == 6
