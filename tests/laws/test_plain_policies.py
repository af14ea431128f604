"""Law 15 of policies that promise nothing: spared questions would have had the same answers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import Compute, Plan, Slice
from engine.contract.policy import PlanBuilder, Scheduling
from engine.contract.rules import BrokenLaw
from engine.contract.view import View
from engine.fast_forward import reads
from engine.fast_forward.reads import (
    STEADY_IN_DECODE,
    SeenJob,
    SeenReads,
    SeenView,
    can_be_seen,
)
from engine.laws.check_policy import check_policy
from engine.loop.engine import Engine, Stalled
from engine.memory.dry_run import DryRunPlanBuilder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from tests.support.jumps import Shaped, check_equal, simulated
from tests.support.prefixes import alike_or_not
from tests.support.schedulings import Drawn, going_by, remembering, schedulings
from tests.support.strategies import room, traces
from traces.serving.request import Request

pytestmark = pytest.mark.ci

MEMORY: dict[str, Any] = {
    "paged_restart": PagedRestart(),
    "paged_swap": PagedSwap(),
    "max_reservation": MaxReservation(max_tokens=120),
    "kept_restart": PagedRestart(prefix_caching=True),
    "kept_swap": PagedSwap(prefix_caching=True),
    "passing_swap": PagedSwap(swapped_first=False),
}
MOST_LAUNCHES = 4000
Fault = Callable[[pytest.MonkeyPatch], None]
README = Path(__file__).resolve().parents[2] / "README.md"
seen = pytest.mark.skipif(not can_be_seen(), reason="reads of compiled classes are not noted")

drawn = {
    "scheduling": schedulings(),
    "memory": st.sampled_from([*MEMORY]),
    "requests": st.one_of(traces(12, 40), alike_or_not()),
    "host_ns": st.sampled_from([0, 900]),
    **room(160),
}


class TooLong(Exception):
    """Jobs preempt one another for ever."""


class Bounded(Shaped):
    """A cost of so many launches at most."""

    def __init__(self, host_ns: int) -> None:
        super().__init__(host_ns)
        self._left = MOST_LAUNCHES

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        self._left -= 1
        if not self._left:
            raise TooLong
        return super().shape_ns(tokens, contexts, samples)


def run(
    policy: Composed, requests: list[Request], fast: bool, host_ns: int, **setting: Any
) -> Engine | str:
    """A run, or how it stalls."""
    try:
        return simulated(policy, requests, fast, Bounded(host_ns), **setting)
    except Stalled as stalled:
        return str(stalled)


def check(scheduling: Scheduling, memory: str, **given: Any) -> tuple[Engine | str, Engine | str]:
    """With the questions that are spared, and step by step. Each run has its own scheduling."""
    slow_policy = Composed(deepcopy(scheduling), MEMORY[memory])
    try:
        slow = run(slow_policy, fast=False, **given)
    except TooLong:
        assume(False)
    fast = run(Composed(deepcopy(scheduling), MEMORY[memory]), fast=True, **given)
    if isinstance(fast, str) or isinstance(slow, str):
        assert fast == slow
    else:
        check_equal(fast, slow)
        assert fast.asked <= slow.asked
    return fast, slow


def drawn_cases(count: int, *phases: Phase) -> settings:
    """The first `count` random cases: the same ones in each run of a test."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, *phases],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class EveryOtherMs(ChunkedPrefill):
    """A subclass that leaves the last job out in every second millisecond."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        batch = super().batch(view)
        return batch[:-1] if view.now_ns // 1_000_000 % 2 and len(batch) > 1 else batch


@dataclass(frozen=True)
class SparesPages(PagedRestart):
    """A subclass that takes fewer slices in every second millisecond."""

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        is_odd = view.now_ns // 1_000_000 % 2 and len(batch) > 1
        super().fit(batch[:-1] if is_odd else batch, view, plan)


@pytest.mark.parametrize(
    "policy",
    [
        Composed(EveryOtherMs(), PagedRestart()),
        Composed(ChunkedPrefill(), SparesPages()),
        Composed(EveryOtherMs(), MaxReservation(max_tokens=120)),
    ],
    ids=["scheduling", "memory", "reservation"],
)
def test_a_subclass_that_answers_otherwise_is_asked_as_one_without_promises(
    policy: Composed,
) -> None:
    requests = [Request(i, i * 300_000, 20, 60) for i in range(4)]
    how: dict[str, Any] = {"pages": 400, "host_pages": 0, "depth": 1}
    fast, slow = (simulated(policy, requests, fast, Bounded(0), **how) for fast in (True, False))
    check_equal(fast, slow)


@dataclass
class Tally:
    """What random policies were asked, with questions that are spared and step by step."""

    policies: int = 0
    stalled: int = 0
    spared: int = 0  # policies that were spared a question
    remember: int = 0
    remember_spared: int = 0
    asked: int = 0
    steps: int = 0

    def add(self, scheduling: Scheduling, fast: Engine | str, slow: Engine | str) -> None:
        self.policies += 1
        if isinstance(fast, str) or isinstance(slow, str):
            self.stalled += 1
            return
        is_spared, remembers = fast.asked < slow.asked, not isinstance(scheduling, Drawn)
        self.spared += is_spared
        self.remember += remembers
        self.remember_spared += remembers and is_spared
        self.asked += fast.asked
        self.steps += slow.asked


def tried(count: int) -> Tally:
    """Checks so many random policies."""
    tally = Tally()

    @given(**drawn)
    @drawn_cases(count, Phase.shrink)
    def each(**given: Any) -> None:
        tally.add(given["scheduling"], *check(**given))

    each()
    return tally


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_policy_that_promises_nothing_is_asked_where_its_answer_may_change(count: int) -> None:
    found = tried(count)
    print(found)
    assert found.policies >= count and found.stalled < 0.1 * count
    if can_be_seen():
        assert found.spared >= 0.25 * count, "else their tables are equal without a question spared"


# ---- it is about something
def trees(*trees: Any) -> Drawn:
    return Drawn(0, *trees, token_budget=24, max_jobs=8)


@seen
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    ("scheduling", "is_spared"),
    [
        (trees(1, 0, 0), True),
        (trees(("or", "is_prefilling", 1), ("-", 0, "prompt_tokens"), 0), True),
        (trees(1, ("+", "num_serving", "arrival_ms"), ("or", "remaining_tokens", 1)), True),
        (trees(1, "known_tokens", 0), False),
        (trees(1, 0, ("and", 0, "time")), True),  # a branch that is not taken reads nothing
        (trees(1, 0, ("and", "time", 0)), False),
        (trees(1, "free_pages", 0), False),
    ],
)
def test_whether_questions_are_spared_goes_by_what_is_read(
    scheduling: Drawn, is_spared: bool, memory: str
) -> None:
    requests = [Request(i, 0, 20 + i, 60) for i in range(6)]
    given = {"pages": 400, "host_pages": 0, "depth": 1, "host_ns": 0}
    fast, slow = check(scheduling, memory, requests=requests, **given)
    assert isinstance(fast, Engine) and isinstance(slow, Engine)
    if is_spared:
        assert fast.asked < 0.5 * slow.asked
    else:
        assert fast.asked > 0.8 * slow.asked


@dataclass(frozen=True)
class Turns:
    """Prompts in odd half milliseconds; in even ones decodes, in reverse while a job waits."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        if view.waiting and view.now_ns // 500_000 % 2:
            return tuple(Slice(job, job.remaining_tokens) for job in view.waiting)
        jobs = view.serving or view.waiting
        order = reversed(jobs) if view.waiting else jobs
        return tuple(Slice(job, job.remaining_tokens) for job in order)


@pytest.mark.parametrize("memory", MEMORY)
def test_what_was_read_for_a_batch_that_finds_no_room_counts_too(memory: str) -> None:
    """Composed asks again for a view without waiting jobs, for which no clock is read."""
    requests = [Request(0, 0, 40, 80), Request(1, 0, 40, 80), Request(2, 1_000_000, 80, 40)]
    given = {"requests": requests, "pages": 65, "host_pages": 0, "depth": 1, "host_ns": 0}
    fast, slow = check(Turns(), memory, **given)
    assert isinstance(fast, Engine) and isinstance(slow, Engine)
    orders = {tuple(s.job.job_id for s in plan.ops[-1].slices) for *_, plan in slow.recorder.plans}  # type: ignore[union-attr]
    assert {(0, 1), (1, 0)} <= orders, "the clock decides"


# ---- reads that are not noted
def forgets(field: str) -> Fault:
    """A read of a field of the view is not noted."""
    return lambda patch: patch.setattr(SeenView, field, vars(View)[field])


def forgets_of_jobs(field: str) -> Fault:
    """A read of a field of a job is not noted."""
    own = property(lambda job: getattr(job.real, field))
    return lambda patch: patch.setattr(SeenJob, field, own)


def shows_the_engines_jobs_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Operations in flight have other job objects than those in service."""
    patch.setattr(SeenView, "in_flight", reads._noted("in_flight"))


def forgets_prompts(patch: pytest.MonkeyPatch) -> None:
    """A prompt under way is taken to stand still, too."""
    hold = SeenReads.hold

    def holds(self: SeenReads, plan: Plan, waiting: Sequence[Job]) -> bool:
        self._of_jobs = {(i, name) for i, name in self._of_jobs if name not in STEADY_IN_DECODE}
        return hold(self, plan, waiting)

    patch.setattr(SeenReads, "hold", holds)


def forgets_admissions(patch: pytest.MonkeyPatch) -> None:
    """A plan that admits a job stands like any other."""
    hold = SeenReads.hold
    patch.setattr(SeenReads, "hold", lambda self, plan, waiting: hold(self, plan, ()))


def forgets_state(patch: pytest.MonkeyPatch) -> None:
    """What a scheduling holds is not looked at."""
    patch.setattr(reads, "state_of", lambda scheduling: b"")


def is_steady(name: str) -> Fault:
    """A fact that moves in decodes is taken for one that does not."""
    return lambda patch: patch.setattr(reads, "STEADY_IN_DECODE", STEADY_IN_DECODE | {name})


FAULTS: dict[str, tuple[Fault, list[str]]] = {  # and the facts by which schedulings go
    "now_ns": (forgets("now_ns"), ["time", "waited_ms"]),
    "issued": (forgets("issued"), ["issued"]),
    "free_bytes": (forgets("free_bytes"), ["free_pages"]),
    "held_bytes": (forgets("held_bytes"), ["held_pages"]),
    "written": (forgets("written"), ["written"]),
    "used": (forgets("used"), ["used"]),
    "in_flight": (forgets("in_flight"), ["num_in_flight"]),
    "jobs in flight": (shows_the_engines_jobs_in_flight, ["slices_in_flight"]),
    "known_tokens": (forgets_of_jobs("known_tokens"), ["known_tokens", "most_known_tokens"]),
    "generated_tokens": (forgets_of_jobs("generated_tokens"), ["generated_tokens"]),
    "computed_tokens": (forgets_of_jobs("computed_tokens"), ["computed_tokens"]),
    "other jobs": (forgets_of_jobs("known_tokens"), ["other_known_tokens"]),
    "prompts": (forgets_prompts, ["remaining_tokens", "other_remaining_tokens"]),
    "steady known_tokens": (is_steady("known_tokens"), ["known_tokens"]),
    "steady computed_tokens": (is_steady("computed_tokens"), ["computed_tokens"]),
    "admissions": (forgets_admissions, ["num_waiting", "num_serving"]),
    "state": (forgets_state, ["job_id", "prompt_tokens"]),
}


LONG = ("admissions", "in_flight", "steady computed_tokens")  # to find a policy that shows them


@pytest.mark.broad(4)
@seen
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in FAULTS]
)
def test_a_read_that_is_not_noted_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, facts = FAULTS[name]
    fault(monkeypatch)
    pure = going_by(facts)
    policies = remembering(pure) if name == "state" else pure

    @given(**drawn | {"scheduling": policies, "requests": traces(12, 40, 8)})
    @drawn_cases(1000)
    def whole(**given: Any) -> None:
        check(**given)

    with pytest.raises(AssertionError):
        whole()


# ---- what a policy is asked that admits, records, or looks past the view that notes
@dataclass(frozen=True)
class ByTheQueue:
    """A token of a prompt while it waits, three of it in service: it reads no fact of a job."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        if view.waiting:
            return (Slice(view.waiting[0], 1),)
        return tuple(Slice(job, min(3, job.remaining_tokens)) for job in view.serving)


def test_a_plan_that_admits_a_job_does_not_stand() -> None:
    given = {"pages": 60, "host_pages": 0, "depth": 1, "host_ns": 0}
    check(ByTheQueue(), "paged_restart", requests=[Request(0, 0, 40, 5)], **given)


@dataclass(frozen=True)
class InOnePart:
    """A policy with the traits of its memory that decides by the engine's own view."""

    traits = MEMORY["paged_restart"].traits

    def plan(self, view: View) -> Plan:
        jobs = [*view.serving, *view.waiting]
        if view.now_ns // 100_000 % 2:
            jobs.reverse()
        plan = DryRunPlanBuilder(view)
        batch = tuple(Slice(job, job.remaining_tokens) for job in jobs)
        MEMORY["paged_restart"].fit(batch, view, plan)
        return plan.plan()


def test_a_policy_that_reads_the_engines_own_view_is_asked_at_each_step() -> None:
    requests = [Request(i, 0, 20, 60) for i in range(4)]
    given = {"pages": 400, "host_pages": 0, "depth": 1}
    fast, slow = (simulated(InOnePart(), requests, f, Bounded(0), **given) for f in (True, False))
    check_equal(fast, slow)
    assert fast.asked == slow.asked


@dataclass(frozen=True)
class First:
    """The first jobs, so many of them."""

    count: int

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting][: self.count]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)


MANY, FEW = (Composed(First(count), MEMORY["paged_restart"]) for count in (8, 2))


@dataclass(frozen=True)
class Switch:
    """A wrapper with the traits of two policies that chooses one of them by a fact of the view."""

    chooses_few: Callable[[View], bool]
    traits = MANY.traits

    def plan(self, view: View) -> Plan:
        return (FEW if self.chooses_few(view) else MANY).plan(view)


class Derived(Composed):
    """A subclass that reads beside its scheduling."""

    def plan(self, view: View) -> Plan:
        return (FEW if view.issued % 20 < 10 else self._many()).plan(view)

    def _many(self) -> Composed:
        return Composed(self.scheduling, self.memory)


def by_the_plan(view: View) -> bool:
    """A job of the engine's own is read by way of a plan."""
    [launch] = [op for op in MANY.plan(view).ops if isinstance(op, Compute)] or [None]
    return launch is not None and launch.slices[0].job.known_tokens % 8 < 4


SWITCHES: dict[str, Any] = {
    "issued": Switch(lambda view: view.issued % 20 < 10),
    "now_ns": Switch(lambda view: view.now_ns // 3_000_000 % 2 == 0),
    "jobs": Switch(lambda view: any(job.known_tokens % 8 < 4 for job in view.serving)),
    "plan": Switch(by_the_plan),
    "subclass": Derived(First(8), MEMORY["paged_restart"]),
}


@pytest.mark.broad(3)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_policy_that_wraps_a_composed_one_is_asked_at_each_step(name: str) -> None:
    requests = [Request(i, 0, 20, 60) for i in range(6)]
    given = {"pages": 400, "host_pages": 0, "depth": 1}
    policy = SWITCHES[name]
    fast, slow = (simulated(policy, requests, f, Bounded(0), **given) for f in (True, False))
    check_equal(fast, slow)
    assert fast.asked == slow.asked
    plans = [plan for *_, plan in slow.recorder.plans]  # type: ignore[union-attr]
    sizes = {len(plan.ops[-1].slices) for plan in plans}
    assert {2, 6} <= sizes, "it switches"
    assert check_policy(policy)


@seen
def test_check_policy_tries_the_questions_that_a_composed_policy_is_spared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Composed(Turns(), MEMORY["paged_restart"])
    assert check_policy(policy)
    forgets("now_ns")(monkeypatch)
    with pytest.raises(BrokenLaw, match="law 15"):
        check_policy(policy)


# ---- the policy of the README
def pasted(folder: Path) -> list[str]:
    """Writes the README's policy where a reader would; returns the words of its sweep."""
    text = README.read_text("utf-8")
    section = text[text.index("## Your own policy") :]
    root = folder / "examples/shortest_prompt_first"
    for block in ("python", "yaml"):
        code = section.partition(f"```{block}\n")[2].partition("```")[0]
        path = root / code.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, "utf-8")
    command = section.partition("```shell\ntandem sweep ")[2].partition("\n```")[0]
    return shlex.split(command.replace("\\\n", " "))


def asked_in_sweep(folder: Path, fault: str = "") -> dict[str, int]:
    """Runs the README's sweep; returns the questions of each scheduling.

    `fault` is Python that each process of the sweep runs first.
    """
    words = ["sweep", *pasted(folder), "--out", "sweep"]
    (folder / "sitecustomize.py").write_text(fault, "utf-8")
    path = os.pathsep.join((str(folder), str(README.parent)))
    told = subprocess.run(
        [sys.executable, "-m", "tandem.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert told.returncode == 0, told.stderr
    asked = {}
    for found in (folder / "sweep").rglob("provenance.json"):
        notes = json.loads(found.read_text())
        [scheduling] = [word for word in notes["overrides"] if word.startswith("scheduling=")]
        asked[scheduling.removeprefix("scheduling=")] = notes["questions"]
        assert fault or notes["plans"] > 5 * notes["questions"]
    assert asked.keys() == {"shortest", "chunked_prefill"}
    return asked


def check_bar(asked: dict[str, int]) -> None:
    """The README's policy is asked at most twice as often as chunked_prefill."""
    print(asked)
    assert asked["shortest"] <= 2 * asked["chunked_prefill"]


@seen
@pytest.mark.slow
def test_the_readmes_sweep_asks_its_policy_at_most_twice_as_often_as_chunked_prefill(
    tmp_path: Path,
) -> None:
    check_bar(asked_in_sweep(tmp_path))


NO_PLAN_STANDS = """
from engine.fast_forward.reads import SeenReads
SeenReads.hold = lambda self, plan, waiting: False
"""


@seen
@pytest.mark.slow
def test_the_bar_of_the_readmes_sweep_is_broken_where_no_plan_of_its_policy_stands(
    tmp_path: Path,
) -> None:
    asked = asked_in_sweep(tmp_path, NO_PLAN_STANDS)
    with pytest.raises(AssertionError):
        check_bar(asked)
