"""Law 15 of policies that promise nothing: spared questions would have had the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from engine.contract.plan import Slice
from engine.contract.policy import Scheduling
from engine.contract.view import View
from engine.fast_forward import reads
from engine.fast_forward.reads import STEADY_IN_DECODE, SeenReads, can_be_seen
from engine.loop.engine import Engine, Stalled
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of
from tests.support.jumps import Shaped, check_equal, simulated
from tests.support.schedulings import Drawn, schedulings
from tests.support.strategies import cases, room, traces
from traces.serving.request import Request

MEMORY = {
    "paged_restart": PagedRestart(),
    "paged_swap": PagedSwap(),
    "max_reservation": MaxReservation(max_tokens=120),
}
MOST_LAUNCHES = 4000
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/shortest_prompt_first/conf"
seen = pytest.mark.skipif(not can_be_seen(), reason="reads of compiled classes are not noted")

drawn = {
    "scheduling": schedulings(),
    "memory": st.sampled_from([*MEMORY]),
    "requests": traces(12, 40),
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
    """With the questions that are spared, and step by step."""
    policy = Composed(scheduling, MEMORY[memory])
    try:
        slow = run(policy, fast=False, **given)
    except TooLong:
        assume(False)
    fast = run(policy, fast=True, **given)
    if isinstance(fast, str) or isinstance(slow, str):
        assert fast == slow
    else:
        check_equal(fast, slow)
        assert fast.asked <= slow.asked
    return fast, slow


@given(**drawn)
@cases(1000)
def test_a_policy_that_promises_nothing_is_asked_where_its_answer_may_change(**given: Any) -> None:
    check(**given)


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
def forgets_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenReads, "read", lambda self: None)


def forgets_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenReads, "read_job", lambda self, job, name: None)


def forgets_prompts(patch: pytest.MonkeyPatch) -> None:
    """As if a prompt under way stood still, too."""
    hold = SeenReads.hold

    def holds(self: SeenReads, plan: Any) -> bool:
        self._of_jobs = {(i, name) for i, name in self._of_jobs if name not in STEADY_IN_DECODE}
        return hold(self, plan)

    patch.setattr(SeenReads, "hold", holds)


def holds_known_tokens_steady(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reads, "STEADY_IN_DECODE", STEADY_IN_DECODE | {"known_tokens"})


def holds_computed_tokens_steady(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reads, "STEADY_IN_DECODE", STEADY_IN_DECODE | {"computed_tokens"})


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    forgets_time,
    forgets_others,
    forgets_prompts,
    holds_known_tokens_steady,
    holds_computed_tokens_steady,
]


@seen
@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_is_not_noted_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    @given(**drawn)
    @settings(
        max_examples=600,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    def whole(**given: Any) -> None:
        check(**given)

    with pytest.raises(AssertionError):
        whole()


# ---- the policy of the README
def asked(scheduling: str) -> int:
    """Questions of a run as in README.md, section "Your own policy"."""
    words = (f"scheduling={scheduling}", "arrival.rate=16", "scheduling.max_jobs=16")
    point = composed(words, str(EXAMPLE))
    found = run_spec_of(point)
    with backend_of(found, point.config["backend"]) as world:
        engine = engine_of(found, world, Recorder(world.meter))
        engine.replay(found.work)
    return engine.asked


@seen
def test_the_example_is_asked_at_most_twice_as_often_as_a_policy_that_promises() -> None:
    assert asked("shortest") <= 2 * asked("chunked_prefill")
