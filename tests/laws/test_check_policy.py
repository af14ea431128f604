"""`check_policy` counts the questions of a good policy, and tells each fault in one line."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest

from engine.contract.plan import Compute, Plan, Slice
from engine.contract.policy import Traits
from engine.contract.regions import Tier
from engine.contract.rules import BrokenLaw, ContractError, Rule, defined_at
from engine.contract.view import View
from engine.laws.check_policy import check_policy, requests
from engine.loop.profile import EngineProfile
from engine.memory.ledger import NOTHING
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from tests.support.offload import ROOMY, job_of, laid_out, shape_of

GOOD = Composed(ChunkedPrefill(), PagedRestart())
TRAINS = Composed(TrainingOrder(), PatrickStar())


class Wrapper:
    """Answers by a function of a good policy's plan and of how often it was asked before."""

    def __init__(self, answer: Callable[[Plan, int], Any], traits: Traits | None = None) -> None:
        self._answer, self._asked = answer, 0
        self.traits = traits or Traits()

    def plan(self, view: View) -> Any:
        self._asked += 1
        return self._answer(GOOD.plan(view), self._asked - 1)


@dataclass(frozen=True)
class Alternates:
    """A scheduling that reverses the jobs in service at every second step."""

    traits = Traits(repeats=True)

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*(reversed(view.serving) if view.issued % 2 else view.serving), *view.waiting]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)


def without_pages(plan: Plan, asked: int) -> Plan:
    return Plan(tuple(op for op in plan.ops if isinstance(op, Compute)))


def with_none(plan: Plan, asked: int) -> Plan:
    return Plan((*plan.ops, None))  # type: ignore[arg-type]


TOLD = f"policy Wrapper ({defined_at(Wrapper.plan)}), step 0, device 0"
FAULTS: dict[str, tuple[Any, type[Exception], str]] = {
    "remembers": (
        Wrapper(lambda plan, asked: Plan() if asked % 2 else plan),
        BrokenLaw,
        "law 8: equal views, other plans",
    ),
    "None at times": (
        Wrapper(lambda plan, asked: None if asked == 5 else plan),
        BrokenLaw,
        "law 8: equal views, other plans",
    ),
    "takes no pages": (
        Wrapper(without_pages),
        ContractError,
        f"{TOLD}, job 0: KV of job 0 on gpu:0 is not held (rule: own KV)",
    ),
    "traits that do not hold": (
        Composed(Alternates(), PagedRestart()),
        BrokenLaw,
        "law 15: the traits of Alternates with PagedRestart do not hold: with the questions that "
        "they spare, a replay at run-ahead 1 differs",
    ),
    "None": (
        Wrapper(lambda plan, asked: None),
        ContractError,
        f"{TOLD}: None is no plan: return a Plan (rule: answer)",
    ),
    "a tuple": (
        Wrapper(lambda plan, asked: plan.ops),
        ContractError,
        f"{TOLD}: a tuple is no plan: return a Plan (rule: answer)",
    ),
    "no operation": (
        Wrapper(with_none),
        ContractError,
        f"{TOLD}: None is no operation of a plan (rule: answer)",
    ),
}


def test_a_good_policy_is_told_by_its_questions() -> None:
    plain = Composed(replace(ChunkedPrefill(), max_jobs=3), PagedRestart())
    for policy in (GOOD, plain):
        at_each_depth = [check_policy(policy, depths=[depth]) for depth in (1, 2)]
        assert check_policy(policy) == sum(at_each_depth)
        assert min(at_each_depth) > len(requests())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_line(fault: str) -> None:
    policy, error, line = FAULTS[fault]
    with pytest.raises(error) as caught:
        check_policy(deepcopy(policy))
    assert str(caught.value) == line


# ---- the profile
def check_training(meddle: Callable[[View], Any]) -> int:
    """Checks a policy that trains one job and does something once a step is complete."""

    class Meddles:
        traits = TRAINS.traits

        def plan(self, view: View) -> Plan:
            if view.training and view.profile.moments(0):
                meddle(view)
            return TRAINS.plan(view)

    shape = shape_of(random.Random(16), layers=3)
    capacity = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
    return check_policy(
        Meddles(), [job_of(shape)], capacity_bytes=capacity, layout=laid_out(shape), depths=[1]
    )


def profile_of(view: View) -> EngineProfile:
    """The engine's own profile, behind what a view shows."""
    return view.profile.moments.__self__  # type: ignore[attr-defined, no-any-return]


MEDDLING: dict[str, Callable[[View], Any]] = {
    "moments": lambda view: profile_of(view).completed_step(0),
    "moment": lambda view: profile_of(view).issued(Compute(()), 0, NOTHING),
    "mean_ns": lambda view: profile_of(view)._sums.clear(),
}


@pytest.mark.parametrize("what", MEDDLING)
def test_a_profile_that_changes_is_seen(what: str) -> None:
    with pytest.raises(BrokenLaw, match="law 8: the policy changed what it was shown"):
        check_training(MEDDLING[what])


def test_what_a_profile_shows_of_places_cannot_be_written_to() -> None:
    shown = []
    assert check_training(lambda view: shown.append(view.profile.uses(0)))
    assert all(isinstance(uses, MappingProxyType) for uses in shown)
    assert {type(launches) for uses in shown for launches in uses.values()} == {tuple}
    with pytest.raises(ContractError) as caught:
        check_training(lambda view: view.profile.uses(0).update({}))  # type: ignore[attr-defined]
    assert caught.value.rule is Rule.READ_ONLY
