"""`check_policy` counts the questions of a good policy, and tells each fault in one line."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import getsourcelines
from types import MappingProxyType
from typing import Any

import pytest

from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.rules import BrokenLaw, ContractError, Rule, defined_at, file_line
from engine.contract.view import View
from engine.fast_forward.reads import can_be_seen
from engine.laws.check_policy import PAGE, ROOMY, check_policy, requests
from engine.laws.differences import of_plans, of_runs
from engine.loop.engine import Stalled
from engine.loop.profile import EngineProfile
from engine.memory.ledger import NOTHING
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.earliest_deadline import EarliestDeadline
from policies.scheduling.orca import Orca
from policies.scheduling.order import fill
from policies.scheduling.shortest_job import PromptShare, ShortestJob
from policies.scheduling.static_batching import StaticBatching
from policies.scheduling.vllm_v1 import VllmV1
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from tests.support.offload import ROOMY as ROOMY_BYTES
from tests.support.offload import job_of, laid_out, shape_of
from tests.support.states import job

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


@dataclass(frozen=True)
class CountsTwice:
    """A memory policy that counts what a restart gives, and not what is taken behind it."""

    traits = Traits(kv_growth="page")

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        pool = (Tier.GPU, view.device)
        running = [job for job in view.serving if plan.holds(kv_place(job.job_id, *pool))]
        room, restarted, slices, places = view.room(pool), set[int](), list[Slice](), []
        for piece in batch:
            job, place = piece.job, kv_place(piece.job.job_id, *pool)
            need = view.page.bytes_for(job.computed_tokens + piece.tokens) - plan.held(place)
            while need > room and job in running and running[-1] is not job:
                last = kv_place(running[-1].job_id, *pool)
                room += plan.held(last)
                plan.free(last)
                plan.restart(running[-1])
                restarted.add(running.pop().job_id)
            if job.job_id in restarted:
                continue
            if need > room:
                break
            plan.grow(place, need)
            room -= 0 if restarted else need
            slices.append(piece)
            places.append(place)
        plan.compute(slices, places)


class Naps:
    """A policy that plans nothing for jobs that have just come, and asks for a moment later."""

    def plan(self, view: View) -> Plan:
        if not view.serving and [job for job in view.waiting if job.arrival_ns == view.now_ns]:
            return Plan(wake_ns=view.now_ns + 5_000)
        return GOOD.plan(view)


class NeedsMuch:
    """A policy that plans nothing while less than 40 pages are free, and refuses nothing."""

    def plan(self, view: View) -> Plan:
        has_room = view.free_bytes[Tier.GPU, 0] >= 40 * view.page.nbytes
        return GOOD.plan(view) if has_room or view.serving else Plan()


def without_pages(plan: Plan, asked: int) -> Plan:
    return Plan(tuple(op for op in plan.ops if isinstance(op, Compute)))


def with_none(plan: Plan, asked: int) -> Plan:
    return Plan((*plan.ops, None))  # type: ignore[arg-type]


SOURCE, FIRST = getsourcelines(CountsTwice.fit)
GROWS = file_line(__file__, FIRST + SOURCE.index("            plan.grow(place, need)\n"))
TOLD = f"policy Wrapper ({defined_at(Wrapper.plan)}), step 0, device 0"
FAULTS: dict[str, tuple[Any, type[Exception], str]] = {
    "remembers": (
        Wrapper(lambda plan, asked: Plan() if asked % 2 else plan),
        BrokenLaw,
        "law 8: policy Wrapper, step 0, device 0: equal views, other plans: tokens of job 0: 195 "
        "at first, none then; plan by the view alone",
    ),
    "None at times": (
        Wrapper(lambda plan, asked: None if asked == 5 else plan),
        BrokenLaw,
        "law 8: policy Wrapper, step 2, device 0: equal views, other plans: the answer: a Plan at "
        "first, None then; plan by the view alone",
    ),
    "takes no pages": (
        Wrapper(without_pages),
        ContractError,
        f"{TOLD}, job 0: KV of job 0 on gpu:0 is not held (rule: own KV)",
    ),
    "traits that do not hold": (
        Composed(Alternates(), PagedRestart()),
        BrokenLaw,
        "law 15: policy Alternates with PagedRestart, run-ahead 1, step 2, device 0: the order of "
        "jobs: [0, 1] asked at each step, [1, 0] asked less; leave out what does not hold of "
        "Traits(repeats, kv_growth=page)",
    ),
    "naps": (
        Naps(),
        BrokenLaw,
        "law 9: policy Naps, step 0, device 0: it planned nothing at 20000000 ns for jobs [0, 1], "
        "and time passed with nothing in flight: plan what fits, and refuse what never will",
    ),
    "counts room twice": (
        Composed(ChunkedPrefill(), CountsTwice()),
        ContractError,
        f"policy ChunkedPrefill with CountsTwice ({GROWS}), step 142, "
        "device 0, job 8: gpu:0 is 327680 bytes short for KV of job 8 on gpu:0: ask plan.room() "
        "before (rule: room)",
    ),
    "needs more than the tight pool": (
        NeedsMuch(),
        Stalled,
        "policy NeedsMuch: the policy plans nothing although nothing is in flight: waiting [0, 1, "
        "2, 3, 4, 5, 6, 7] and 16 more; free bytes {'gpu:0': 1572864, 'host:0': 6291456} (a pool "
        "of 24 pages)",
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


class NoPolicy:
    """It has neither `plan` nor a half's `batch` or `fit`."""


NO_POLICIES: dict[str, tuple[Any, str]] = {
    "a scheduling": (
        ChunkedPrefill(),
        "ChunkedPrefill is a scheduling: give Composed(ChunkedPrefill(...), MEMORY), a policy",
    ),
    "a memory policy": (
        PagedRestart(),
        "PagedRestart is a memory policy: give Composed(SCHEDULING, PagedRestart(...))",
    ),
    "a class": (Composed, "Composed is a class: give an object, Composed(...)"),
    "a class of a half": (
        Composed(ChunkedPrefill, PagedRestart()),  # type: ignore[arg-type]
        "ChunkedPrefill is a class: give an object, ChunkedPrefill(...)",
    ),
    "no policy": (NoPolicy(), "a NoPolicy is no policy: give an object with plan(view)"),
}


@pytest.mark.parametrize("what", NO_POLICIES)
def test_what_is_no_policy_is_told_with_what_to_give_instead(what: str) -> None:
    policy, line = NO_POLICIES[what]
    with pytest.raises(ValueError) as caught:
        check_policy(policy)
    assert str(caught.value) == line


@dataclass(frozen=True)
class AdmitsAtTimes:
    """A memory policy whose KV grows by pages, and that admits in every tenth plan alone."""

    traits = Traits(kv_growth="page")

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        if view.issued % 10 and view.serving:
            batch = tuple(piece for piece in batch if piece.job.computed_tokens)
        PagedRestart().fit(batch, view, plan)


class PromisesNothing:
    """All jobs that are shown, in their order."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        return tuple(Slice(job, job.remaining_tokens) for job in (*view.serving, *view.waiting))


class GoesByItsClass:
    """Reverses the jobs at every other ten questions, which a class counts."""

    asked = 0  # twice at each question of check_policy

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        if GoesByItsClass.asked // 20 % 2:
            jobs.reverse()
        GoesByItsClass.asked += 1
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)


class LastComesFirst(ChunkedPrefill):
    """Declares that prompts are in turn, and serves the one that came last before all others."""

    @property
    def traits(self) -> Traits:
        return super().traits

    def batch(self, view: View) -> tuple[Slice, ...]:
        decodes, begun = view.in_service()
        return fill([*reversed(view.waiting), *begun], self.token_budget, view, decodes)


OF_MEMORY = (
    "let the scheduling go by `self` and the view alone, and leave out what does not hold of the "
    "memory policy's Traits(kv_growth=page)"
)
REMEDIES: dict[str, tuple[Composed, str]] = {
    "memory": (
        Composed(ChunkedPrefill(), AdmitsAtTimes()),
        "leave out what does not hold of Traits(repeats, appends, step_tokens=512, max_jobs=256, "
        "kv_growth=page)",
    ),
    "memory beside a scheduling that promises nothing": (
        Composed(PromisesNothing(), AdmitsAtTimes()),
        OF_MEMORY,
    ),
    "prompts that are not in turn": (
        Composed(LastComesFirst(24), PagedRestart()),
        "leave out what does not hold of Traits(repeats, appends, step_tokens=24, max_jobs=256, "
        "kv_growth=page)",
    ),
    "a scheduling that promises nothing": (Composed(GoesByItsClass(), PagedRestart()), OF_MEMORY),
}


@pytest.mark.parametrize("what", REMEDIES)
def test_the_remedy_of_law_15_names_what_was_promised(what: str) -> None:
    policy, remedy = REMEDIES[what]
    if policy.traits.repeats or can_be_seen():
        with pytest.raises(BrokenLaw, match=r"^law 15: ") as caught:
            check_policy(policy)
        assert str(caught.value).endswith(f"; {remedy}")


def test_restarts_show_a_fault_that_a_roomy_pool_hides() -> None:
    roomy = {(Tier.GPU, 0): ROOMY * PAGE.nbytes, (Tier.HOST, 0): 96 * PAGE.nbytes}
    policy = Composed(ChunkedPrefill(), CountsTwice())
    assert check_policy(policy, capacity_bytes=roomy)
    with pytest.raises(ContractError, match="rule: room"):
        check_policy(policy)


@dataclass(frozen=True)
class Miscalls:
    """A memory policy that gives the plan builder a wrong type."""

    how: str

    def fit(self, batch: tuple[Slice, ...], view: View, plan: Any) -> None:
        here = kv_place(batch[0].job.job_id, Tier.GPU, view.device)
        if self.how == "job":
            plan.grow(batch[0].job, 16)
        elif self.how == "text":
            plan.grow(here, "16")
        elif self.how == "fraction":
            plan.grow(here, 1.5)
        else:
            plan.free(batch[0].job)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("job", "the call is plan.grow(place: Place, nbytes: int): "),
        ("text", "the call is plan.grow(place: Place, nbytes: int): "),
        ("fraction", "takes 1.5 bytes: not whole|the call is plan.grow"),  # compiled: the latter
        ("free", "the call is plan.free(place: Place): "),
    ],
)
def test_a_wrong_type_given_to_the_plan_builder_is_told_with_its_call(how: str, told: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_policy(Composed(ChunkedPrefill(64), Miscalls(how)))
    assert any(part in str(caught.value) for part in told.split("|"))
    assert str(caught.value).startswith("policy ChunkedPrefill with Miscalls (")


SHIPPED: dict[str, Composed] = {
    "static": Composed(StaticBatching(max_jobs=6), MaxReservation(304)),
    "continuous": Composed(ContinuousBatching(token_budget=128), PagedSwap()),
    "passing": Composed(ChunkedPrefill(64), PagedSwap(swapped_first=False)),
    "orca": Composed(Orca(max_jobs=8), PagedRestart(prompts="reserved", spare_pages=1)),
    "vllm_v1": Composed(VllmV1(token_budget=24), PagedRestart(prefix_caching=True)),
    "deadline": Composed(EarliestDeadline(token_budget=24), PagedSwap(prefix_caching=True)),
    "shortest": Composed(ShortestJob(PromptShare()), PagedRestart(0.0, gives_way=True)),
}


@pytest.mark.broad(3)
@pytest.mark.parametrize("name", SHIPPED)
def test_policies_of_ours_pass_also_where_jobs_restart(name: str) -> None:
    assert check_policy(SHIPPED[name])


# ---- what differs
def recorded(*plans: Plan) -> Recorder:
    """A recorder of plans that were issued."""
    found = Recorder()
    for step, plan in enumerate(plans):
        found.issued(step, 0, 10 * step, plan, ())
    return found


PIECES = [Slice(job(number, 10), 4) for number in range(3)]
LAUNCH = Plan((Compute((PIECES[0], PIECES[1])),))
DIFFERENT: dict[str, tuple[Plan, Plan, str]] = {
    "a job": (LAUNCH, Plan((Compute((PIECES[0],)),)), "tokens of job 1: 4 A, none B"),
    "an order": (
        LAUNCH,
        Plan((Compute((PIECES[1], PIECES[0])),)),
        "the order of jobs: [0, 1] A, [1, 0] B",
    ),
    "a restart": (
        LAUNCH,
        replace(LAUNCH, restart=(PIECES[2].job,)),
        "jobs to restart: [] A, [2] B",
    ),
    "a refusal": (Plan(), Plan(refuse=(PIECES[2].job,)), "jobs to refuse: [] A, [2] B"),
    "a moment": (Plan(wake_ns=5), Plan(), "wake_ns: 5 A, None B"),
    "an operation": (
        Plan((Grow(kv_place(0), 64),)),
        Plan((Free(kv_place(0)),)),
        "operation 0: Grow of KV of job 0 on gpu:0 by 64 bytes A, Free of KV of job 0 on gpu:0 B",
    ),
    "one operation more": (
        Plan(),
        Plan((Copy(kv_place(0), kv_place(0, Tier.HOST)),)),
        "operation 0: none A, Copy of KV of job 0 on gpu:0 to host:0 B",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_first_difference_of_plans_is_named(what: str) -> None:
    one, other, told = DIFFERENT[what]
    found = of_plans(one, other)
    assert found is not None and found.told("A", "B") == told
    assert of_plans(one, one) is None is of_plans(other, other)
    assert of_runs(recorded(LAUNCH, one), recorded(LAUNCH, other)).what == (
        f"step 1, device 0: {found.what}"
    )


def test_the_first_difference_of_runs_with_equal_plans_is_named() -> None:
    one, other = recorded(LAUNCH), recorded(LAUNCH, LAUNCH)
    assert of_runs(one, other).told("A", "B") == "the number of plans: 1 A, 2 B"
    late = Recorder()
    late.issued(0, 0, 7, LAUNCH, ())
    assert of_runs(one, late).what.endswith("in row 0 of plans")


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
    capacity = {(Tier.GPU, 0): ROOMY_BYTES, (Tier.HOST, 0): ROOMY_BYTES}
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
    with pytest.raises(BrokenLaw, match=r"^law 8: policy Meddles, .* shown, view.profile:"):
        check_training(MEDDLING[what])


def test_what_a_profile_shows_of_places_cannot_be_written_to() -> None:
    shown = []
    assert check_training(lambda view: shown.append(view.profile.uses(0)))
    assert all(isinstance(uses, MappingProxyType) for uses in shown)
    assert {type(launches) for uses in shown for launches in uses.values()} == {tuple}
    with pytest.raises(ContractError) as caught:
        check_training(lambda view: view.profile.uses(0).update({}))  # type: ignore[attr-defined]
    assert caught.value.rule is Rule.READ_ONLY


@dataclass(frozen=True)
class Unbounded:
    """A scheduling that takes more than its traits say."""

    traits: Traits

    def batch(self, view: View) -> tuple[Slice, ...]:
        return tuple(Slice(job, job.remaining_tokens) for job in (*view.serving, *view.waiting))


@pytest.mark.parametrize(
    ("traits", "told"),
    [
        (Traits(step_tokens=4), r"a batch of \d+ tokens, Traits\(step_tokens=4\)"),
        (Traits(prompt_tokens=8), r"prompts of \d+ tokens, Traits\(prompt_tokens=8\)"),
        (Traits(max_jobs=1), r"\d jobs in service, Traits\(max_jobs=1\)"),
    ],
    ids=["step_tokens", "prompt_tokens", "max_jobs"],
)
def test_a_bound_that_does_not_hold_is_told(traits: Traits, told: str) -> None:
    with pytest.raises(
        BrokenLaw, match=rf"^law 15: policy Unbounded with PagedRestart, step \d+.*{told}"
    ):
        check_policy(Composed(Unbounded(traits), PagedRestart()))
    assert check_policy(Composed(Unbounded(Traits()), PagedRestart())) > 0


class NoView:
    """A scheduling whose batch takes no view."""

    def batch(self) -> tuple[Slice, ...]:
        return ()


def test_halves_in_each_others_place_and_a_batch_without_a_view_are_told() -> None:
    halves: Any = (PagedRestart(), ChunkedPrefill())
    with pytest.raises(ValueError, match=r"^a PagedRestart has no batch\(view\): give Composed"):
        Composed(*halves)
    with pytest.raises(ValueError, match=r"None has no fit\(batch, view, plan\)"):
        Composed(ChunkedPrefill(), None)  # type: ignore[arg-type]
    wrong: Any = NoView()
    with pytest.raises(
        ContractError, match=r"batch\(\).* takes no view: write batch\(view\)"
    ) as told:
        check_policy(Composed(wrong, PagedRestart()))
    assert "test_check_policy.py:" in str(told.value)
