"""The objects that a scheduling without promises is shown, and the state that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from pickle import dumps, loads
from types import SimpleNamespace
from typing import Any

import pytest

from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Plan, Slice
from engine.contract.policy import PlanBuilder, Scheduling, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.rules import ContractError, Rule
from engine.contract.view import View
from engine.fast_forward import reads
from engine.fast_forward.reads import MOST_STATE_BYTES, SeenReads, state_of
from engine.laws.check_policy import check_policy
from engine.loop.engine import Engine
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from tests.laws.test_plain_policies import check, run, seen, trees
from tests.support import states
from tests.support.jumps import check_equal
from tests.support.schedulings import Counts, Draws
from traces.serving.request import Request

GIVEN: dict[str, Any] = {"pages": 400, "host_pages": 0, "depth": 1, "host_ns": 0}


# ---- objects
@dataclass(frozen=True)
class NotInFlight:
    """Serves the first three jobs that are not in flight."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        launches = [op for op in view.in_flight if isinstance(op, Compute)]
        busy = [piece.job for op in launches for piece in op.slices]
        jobs = [job for job in (*view.serving, *view.waiting) if job not in busy]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs[:3])


@pytest.mark.parametrize("depth", [2, 3])
def test_a_policy_finds_its_own_jobs_in_flight(depth: int) -> None:
    requests = [Request(i, 0, 20 + i, 30) for i in range(6)]
    check(NotInFlight(), "paged_restart", requests=requests, **GIVEN | {"depth": depth})
    assert check_policy(Composed(NotInFlight(), PagedRestart()))


@seen
def test_a_job_is_one_object_wherever_a_view_shows_it() -> None:
    served, trained = states.job(0, 8), states.job(1, 8)
    op, moved = Compute((Slice(served, 4), Slice(trained, 4))), Copy(kv_place(0), kv_place(0))
    engines = replace(states.view([served], []), training=[trained], in_flight=(op, moved))
    seen_reads = SeenReads()

    def asked() -> tuple[View, bool]:
        seen_reads.begin({}, engines.in_flight)  # also of jobs that have left
        shown = seen_reads.shown(replace(engines, reads=seen_reads))
        seen_reads.slices((), served)
        return shown, seen_reads.hold(Plan(), ())

    first, _ = asked()
    again, holds = asked()
    assert holds, "nothing is read yet"
    for shown in (first, again):
        launch, copied = shown.in_flight
        assert isinstance(launch, Compute)
        own = [piece.job for piece in launch.slices]
        assert own == [*shown.serving, *shown.training] == [*again.serving, *again.training]
        assert launch is again.in_flight[0] and copied is moved
        assert served not in own and not seen_reads.hold(Plan(), ())


COPIES: dict[str, Callable[[Job], Job]] = {
    "copy": copy,
    "deepcopy": deepcopy,
    "pickle": lambda job: loads(dumps(job)),  # type: ignore[no-any-return]
}


@dataclass(frozen=True)
class ServesCopies:
    """Slices of copies of jobs."""

    copied: Callable[[Job], Job]

    def batch(self, view: View) -> tuple[Slice, ...]:
        return tuple(Slice(self.copied(job), job.remaining_tokens) for job in view.waiting)


@dataclass(frozen=True)
class ReadsCopies:
    """Reverses the jobs by what copies of them know."""

    copied: Callable[[Job], Job]

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        if any(self.copied(job).known_tokens % 8 < 4 for job in jobs):
            jobs.reverse()
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)


@pytest.mark.parametrize("name", COPIES)
def test_a_slice_of_a_copied_job_is_refused_also_where_reads_are_noted(name: str) -> None:
    policy, told = Composed(ServesCopies(COPIES[name]), PagedRestart()), []
    for fast in (True, False):
        with pytest.raises(ContractError) as caught:
            run(policy, [Request(0, 0, 20, 10)], fast, **GIVEN)
        assert caught.value.rule is Rule.JOB
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_job_counts_as_a_read_of_it(name: str) -> None:
    requests = [Request(i, 0, 20 + i, 30) for i in range(3)]
    fast, slow = check(ReadsCopies(COPIES[name]), "paged_restart", requests=requests, **GIVEN)
    assert isinstance(fast, Engine) and isinstance(slow, Engine)
    assert fast.asked == slow.asked


# ---- state
@seen
def test_state_that_moves_is_seen_and_state_that_stays_is_not_read_again() -> None:
    table = {"a": [1, 2], "b": {3}}
    held = [Counts(trees(1, 0, 0), trees(1, 0, 0), 2), Draws(trees(1, 0, 0), trees(1, 0, 0), 2)]
    held += [SimpleNamespace(table=table, sort=sorted, order=int, job=Job(0, 0, 5))]
    empty = SimpleNamespace(serving=[], waiting=[])
    assert [state_of(one) for one in held] == [state_of(one) for one in deepcopy(held)]
    before = [state_of(one) for one in held]
    for one in held[:2]:
        one.batch(empty)
    table["b"].add(4)  # type: ignore[attr-defined]
    assert all(now != then for now, then in zip(map(state_of, held), before, strict=True))
    assert None not in before
    assert state_of(SimpleNamespace(rows=(n for n in range(3)))) is None  # cannot be compared


@dataclass
class Aging:
    """Counts in `self` the questions that each job has seen, and lets the oldest in first."""

    seen: dict[int, int] = field(default_factory=dict)

    def batch(self, view: View) -> tuple[Slice, ...]:
        for job in view.serving:
            self.seen[job.job_id] = self.seen.get(job.job_id, 0) + 1
        oldest = sorted(view.serving, key=lambda job: -self.seen[job.job_id] % 5)
        jobs = [*oldest, *view.waiting[: 4 - len(view.serving)]]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)


@dataclass
class Remembers:
    """Keeps in `self` what it has found of each job: nothing moves once it knows them."""

    rank: dict[int, int] = field(default_factory=dict)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        for job in jobs:
            self.rank.setdefault(job.job_id, job.prompt_tokens)
        jobs.sort(key=lambda job: self.rank[job.job_id])
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)


@seen
@pytest.mark.parametrize(("scheduling", "is_spared"), [(Aging(), False), (Remembers(), True)])
def test_a_policy_that_keeps_state_is_asked_while_that_moves(
    scheduling: Scheduling, is_spared: bool
) -> None:
    requests = [Request(i, 0, 20 + i, 60) for i in range(6)]
    given = {"pages": 400, "host_pages": 0, "depth": 1, "host_ns": 0}
    fast, slow = check(scheduling, "paged_restart", requests=requests, **given)
    assert isinstance(fast, Engine) and isinstance(slow, Engine)
    assert (fast.asked < 0.5 * slow.asked) if is_spared else (fast.asked == slow.asked)


@dataclass
class KeepsJobs:
    """Serves jobs in the order in which it has first seen them, and keeps the jobs."""

    order: list[Job] = field(default_factory=list)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        self.order = [job for job in self.order if job in jobs]
        self.order += [job for job in jobs if job not in self.order]
        return tuple(Slice(job, job.remaining_tokens) for job in self.order)


@dataclass
class ByPredictions:
    """The shortest predicted outputs first; with a clock, the longer a job waits the sooner."""

    count: int
    reads_clock: bool

    def __post_init__(self) -> None:
        self.predicted = {number: number * 7919 % 1000 for number in range(self.count)}

    def batch(self, view: View) -> tuple[Slice, ...]:
        now_ns = view.now_ns if self.reads_clock else 0
        waiting = [(self.predicted[j.job_id] - (now_ns - j.arrival_ns), j) for j in view.waiting]
        jobs = [*view.serving, *(job for _, job in sorted(waiting, key=lambda pair: pair[0]))]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs[:8])


LARGE = 200_000  # predictions


@seen
@pytest.mark.parametrize(
    ("scheduling", "most_taken", "is_spared"),
    [
        (KeepsJobs(), None, True),
        (ByPredictions(100, reads_clock=False), None, True),
        (ByPredictions(100, reads_clock=True), 0, False),
        (ByPredictions(LARGE, reads_clock=True), 0, False),
        (ByPredictions(LARGE, reads_clock=False), 1, False),  # too much to compare
    ],
)
def test_a_state_is_compared_where_all_else_lets_a_plan_stand_and_stays_small(
    scheduling: Scheduling,
    most_taken: int | None,
    is_spared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bytes | None] = []

    def taking(scheduling: object) -> bytes | None:
        taken.append(state_of(scheduling))
        return taken[-1]

    monkeypatch.setattr(reads, "state_of", taking)
    requests = [Request(i, i * 3_000_000, 20, 40) for i in range(40)]
    fast, slow = check(scheduling, "paged_restart", requests=requests, **GIVEN)
    assert isinstance(fast, Engine) and isinstance(slow, Engine)
    assert (fast.asked < 0.5 * slow.asked) if is_spared else (fast.asked == slow.asked)
    assert len(taken) <= (fast.asked if most_taken is None else most_taken)
    sizes = [len(state) for state in taken if state is not None]
    assert max(sizes, default=0) < 4096 < MOST_STATE_BYTES


@seen
def test_a_state_is_compared_behind_the_whole_answer() -> None:
    """A memory policy may change it, behind the batch."""
    scheduling, seen_reads = SimpleNamespace(is_tight=False), SeenReads()

    def holds(change: Callable[[], None] = lambda: None) -> bool:
        seen_reads.begin({}, ())
        seen_reads.shown(replace(states.view([], []), reads=seen_reads))
        seen_reads.slices((), scheduling)
        change()
        return seen_reads.hold(Plan(), ())

    assert [holds(), holds(), holds(lambda: setattr(scheduling, "is_tight", True))] == [0, 1, 0]
    assert holds()
    seen_reads.begin({}, ())  # a question whose answer was not carried out
    assert [holds(), holds()] == [0, 1]


class BothHalves:
    """Reverses the jobs once memory is tight, as its memory half has noted."""

    traits = Traits(kv_growth="page")

    def __init__(self) -> None:
        self.is_tight: list[bool] = []

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting[: 4 - len(view.serving)]]
        if self.is_tight:
            jobs.reverse()
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        PagedRestart().fit(batch, view, plan)
        if plan.room((Tier.GPU, view.device)) < 60 * view.page.nbytes:
            self.is_tight[:] = [True]


def one_object() -> Composed:
    half = BothHalves()
    return Composed(half, half)


def one_list() -> Composed:
    halves = BothHalves(), BothHalves()
    halves[0].is_tight = halves[1].is_tight
    return Composed(*halves)


@pytest.mark.parametrize("made", [one_object, one_list])
def test_halves_that_share_state_are_asked_at_each_step(made: Callable[[], Composed]) -> None:
    requests = [Request(i, 0, 20 + i, 60) for i in range(4)]
    fast, slow = (run(made(), requests, fast, **GIVEN | {"pages": 90}) for fast in (True, False))
    assert isinstance(fast, Engine) and isinstance(slow, Engine)
    check_equal(fast, slow)
    assert fast.asked == slow.asked
