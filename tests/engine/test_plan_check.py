"""Plans that look right and are not: what a review has found, each refused in its words."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.policy import Fleet, PlanBuilder, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.rules import ContractError, Rule, defined_at, file_line, name_of
from engine.contract.view import View
from engine.loop.engine import Stalled
from engine.memory.dry_run import DryRunPlanBuilder
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.orca import Orca
from tests.support.replays import PAGE, composed, random_requests, replay
from traces.serving.request import Request

HONEST = composed("chunked", "restart")
Lie = Callable[[View, Plan], Plan | None]


class Liar:
    """Answers as an honest policy, but for one lie."""

    traits: ClassVar[Traits] = HONEST.traits

    def __init__(self, lie: Lie, asked: int = 3) -> None:
        self._lie, self._left, self._told = lie, asked, False

    def plan(self, view: View) -> Plan:
        plan, self._left = HONEST.plan(view), self._left - 1
        if self._told or self._left >= 0 or not plan.ops:
            return plan
        lie = self._lie(view, plan)
        self._told = lie is not None
        return plan if lie is None else lie


def refused(lie: Lie, **given: Any) -> ContractError:
    with pytest.raises(ContractError) as caught:
        replay(Liar(lie), random_requests(3, 8), **given)
    error = caught.value
    assert error.policy == "Liar" and error.step is not None and "\n" not in str(error)
    return error


def relaunched(plan: Plan, **fields: Any) -> Plan:
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    names = ("slices", "reads", "writes", "device", "on", "again", "after")
    given = {name: getattr(launch, name) for name in names} | fields
    return replace(plan, ops=(*plan.ops[:-1], Compute(**given)))


# ---- plans
@pytest.mark.parametrize("has_gap", [True, False])
def test_a_record_has_no_gap_and_a_job_that_learns_from_it(has_gap: bool) -> None:
    def lie(view: View, plan: Plan) -> Plan | None:
        jobs = [job for job in view.waiting if job.prompt_tokens > 3]
        if not jobs:
            return None
        place = kv_place(jobs[0].job_id)
        records = (True, False, True) if has_gap else (False, True, True)
        slices = [Slice(jobs[0], 1, record=record) for record in records]
        launches = [Compute((piece,), writes=(place,)) for piece in slices]
        return Plan((Grow(place, PAGE.nbytes), *launches))

    assert refused(lie).rule is (Rule.TOKENS if has_gap else Rule.RECORD)


@pytest.mark.parametrize("wrong", [["no tuple"], "device"])
def test_types_are_looked_at_in_plans_of_the_usual_form(wrong: Any) -> None:
    def lie(view: View, plan: Plan) -> Plan:
        if wrong == "device":
            return relaunched(plan, device=0.0)
        return replace(plan, ops=list(plan.ops))

    assert refused(lie).rule in (Rule.ANSWER, Rule.DEVICE)


def test_a_plan_moves_nothing_between_other_devices() -> None:
    class Meddles:
        def __init__(self, copies: bool) -> None:
            self._copies = copies

        def plan(self, view: View) -> Plan:
            if view.device == 0:
                return HONEST.plan(view)
            held = [p for p in view.held_bytes if p.tier is Tier.GPU and p.device == 0]
            if not held:
                return Plan()
            if not self._copies:
                return Plan((Grow(held[0], PAGE.nbytes),))
            return Plan((Copy(held[0], kv_place(held[0].region.owner, Tier.HOST)),))

    for copies in (True, False):
        with pytest.raises(ContractError) as caught:
            replay(Meddles(copies), random_requests(3, 8), devices=2)
        assert caught.value.rule is Rule.DEVICE


class GrowsTwice:
    """A memory policy that splits what it takes for a place into two."""

    traits: ClassVar[Traits] = PagedRestart().traits

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        fitted = DryRunPlanBuilder(view)
        PagedRestart().fit(batch, view, fitted)
        for op in fitted.plan().ops:
            if isinstance(op, Grow):
                plan.grow(op.place, op.nbytes - PAGE.nbytes)
                plan.grow(op.place, PAGE.nbytes)
            elif isinstance(op, Free):
                plan.free(op.place)
            else:
                assert isinstance(op, Compute)
                plan.launch(op)
        for job in fitted.plan().restart:
            plan.restart(job)


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_that_are_taken_in_two_parts_are_counted(depth: int) -> None:
    policy = Composed(HONEST.scheduling, GrowsTwice())
    run = replay(policy, random_requests(3, 8), depth=depth).check()
    assert run.rows("requests") == replay(HONEST, random_requests(3, 8), depth=depth).rows(
        "requests"
    )


# ---- halves
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda view: None, "batch returns None"),
        (lambda view: (s for s in ()), "batch returns a generator"),
        (
            lambda view: tuple(view.waiting),
            "batch returns a Job among its Slices: only Slices belong there",
        ),
    ],
)
def test_a_batch_that_is_none_is_told(answer: Callable[[View], Any], told: str) -> None:
    class Scheduling:
        def batch(self, view: View) -> Any:
            return answer(view)

    with pytest.raises(ContractError, match=f"Scheduling with PagedRestart.*{told}"):
        replay(Composed(Scheduling(), PagedRestart()), random_requests(3, 3))


@pytest.mark.parametrize("fast_forward", [False, True])
def test_a_batch_may_be_a_list(fast_forward: bool) -> None:
    class Listed(ChunkedPrefill):
        def batch(self, view: View) -> Any:
            return [*super().batch(view)]

    class Looks(PagedRestart):
        def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
            assert type(batch) is tuple
            super().fit(batch, view, plan)

    requests = random_requests(3, 8)
    logs = [
        replay(Composed(scheduling, Looks()), requests, fast_forward=fast_forward).log()
        for scheduling in (Listed(), ChunkedPrefill())
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("remaining", ""),
        ("prompt_token", "prompt_tokens, "),
        (
            "xyz",
            "adapter, arrival_ns, computed_tokens, device, generated_tokens, gets_feedback, "
            "is_prefilling, job_id, ",
        ),
    ],
)
def test_an_attribute_that_a_job_lacks_is_told_with_those_nearby(
    name: str, near: str, fast_forward: bool
) -> None:
    class Reads:
        def batch(self, view: View) -> list[Slice]:
            return [Slice(job, getattr(job, name)) for job in [*view.serving, *view.waiting]]

    policy = Composed(Reads(), PagedRestart())
    with pytest.raises(ContractError) as caught:
        replay(policy, random_requests(3, 3), fast_forward=fast_forward)
    assert caught.value.what.startswith(f"'Job' object has no attribute {name!r}; there is {near}")
    at = file_line(__file__, Reads.batch.__code__.co_firstlineno + 1)
    assert str(caught.value).startswith(f"policy Reads with PagedRestart ({at}), step 0, device 0:")


def test_a_policy_is_named_by_halves_that_are_halves() -> None:
    own = SimpleNamespace(scheduling={}, memory=[], plan=None)
    assert name_of(own) == "SimpleNamespace"
    assert name_of(Composed(ChunkedPrefill(), PagedRestart())) == "ChunkedPrefill with PagedRestart"


def by_its_own(view: View) -> Any:
    return Plan(repeats=2)  # type: ignore[call-arg]


EARLIER: dict[str, tuple[Callable[..., Any], str]] = {
    "trial": (
        lambda view, plan: view.trial,
        "'View' object has no attribute 'trial'; take view.kept_pages, or the `plan` of fit(",
    ),
    "decodes": (
        lambda view, plan: view.decodes.slices,
        "'View' object has no attribute 'decodes'; take view.running",
    ),
    "lead": (
        lambda view, plan: view.lead(()),
        "'View' object has no attribute 'lead'; take view.leading_decodes(slices)",
    ),
    "another": (
        lambda view, plan: view.free_byte,
        "'View' object has no attribute 'free_byte'; there is free_bytes",
    ),
    "grow_decodes": (
        lambda view, plan: plan.grow_decodes(()),
        "'PlanBuilder' object has no attribute 'grow_decodes'; take plan.grow_running(view.running",
    ),
    "repeats": (
        lambda view, plan: by_its_own(view),
        "Plan has no 'repeats'; the engine repeats plans by itself, where Traits promise that it",
    ),
    "until": (
        lambda view, plan: Plan().until(1),  # type: ignore[attr-defined]
        "'Plan' object has no attribute 'until'; the engine repeats plans by itself, where Traits",
    ),
    "too many bytes": (
        lambda view, plan: plan.grow(kv_place(0), 1 << 40),
        "gpu:0 is ",
    ),
}


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("fast_forward", [False, True])
def test_a_name_of_earlier_versions_is_told_with_policy_line_and_new_name(
    earlier: str, fast_forward: bool
) -> None:
    reads, told = EARLIER[earlier]

    class Fits:
        def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
            reads(view, plan)

    class Reads:
        def batch(self, view: View) -> tuple[Slice, ...]:
            if earlier not in ("grow_decodes", "too many bytes"):
                reads(view, None)
            return tuple([Slice(job, 1) for job in view.waiting[:1]])

    with pytest.raises(ContractError) as caught:
        replay(Composed(Reads(), Fits()), random_requests(3, 3), fast_forward=fast_forward)
    code = (by_its_own if earlier == "repeats" else reads).__code__
    lines = {file_line(__file__, code.co_firstlineno + i) for i in (0, 1)}
    assert caught.value.what.startswith(told) and caught.value.at in lines
    assert str(caught.value).startswith(f"policy Reads with Fits ({caught.value.at}), step 0,")
    assert "\n" not in str(caught.value) and "Seen" not in str(caught.value)


@pytest.mark.parametrize("fast_forward", [False, True])
def test_an_attribute_that_another_object_lacks_is_told_as_it_is(fast_forward: bool) -> None:
    class Reads:
        def batch(self, view: View) -> Any:
            return view.waiting.xyz  # type: ignore[attr-defined]

    policy = Composed(Reads(), PagedRestart())
    with pytest.raises(AttributeError, match=r"'ReadOnlyList' object has no attribute 'xyz'$"):
        replay(policy, random_requests(3, 3), fast_forward=fast_forward)


def test_a_memory_that_returns_a_plan_is_told() -> None:
    class Memory:
        def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> Any:
            return Plan()

    with pytest.raises(ContractError, match="fit returns a Plan: it writes to the plan"):
        replay(Composed(HONEST.scheduling, Memory()), random_requests(3, 3))


def test_a_memory_that_takes_no_plan_is_told() -> None:
    class Memory:
        def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
            return Plan()

    memory: Any = Memory()
    told = r"with Memory.*fit\(batch: .*, view: .*takes no plan: fit\(batch, view, plan\) writes"
    with pytest.raises(ContractError, match=told):
        replay(Composed(HONEST.scheduling, memory), random_requests(3, 3))


def test_a_type_error_of_a_memory_stays_what_it_is() -> None:
    class Memory:
        def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        replay(Composed(HONEST.scheduling, Memory()), random_requests(3, 3))


# ---- writes
def test_a_write_is_told_with_the_line_of_the_policy() -> None:
    def shuffles(view: View, plan: Plan) -> Plan:
        random.Random(0).shuffle(view.serving)  # type: ignore[arg-type]
        return plan

    assert "test_plan_check.py" in str(refused(shuffles, depth=1))


def test_a_write_past_the_class_of_a_list_is_told() -> None:
    def pops(view: View, plan: Plan) -> Plan | None:
        if not view.waiting:
            return None
        list.pop(view.waiting)  # type: ignore[arg-type]
        return plan

    assert refused(pops).rule is Rule.READ_ONLY


def test_a_router_that_writes_is_told_by_its_name() -> None:
    class Writes:
        def route(self, job: Job, fleet: Fleet) -> int:
            fleet.assigned[0] = 7
            return 0

    with pytest.raises(ContractError, match=r"policy Writes \(\S*test_plan_check.py:\d+\): "):
        replay(HONEST, random_requests(3, 3), devices=2, router=Writes())


def test_an_error_can_be_copied_and_sent() -> None:
    error = ContractError(Rule.JOB, "what", 3).located("P", 4, 0)
    placed = ContractError(Rule.JOB, "what").located("P", at="mine.py:3")
    assert str(pickle.loads(pickle.dumps(placed))) == "policy P (mine.py:3): what (rule: job)"
    assert placed.located("Q", at="other.py:4").at == "mine.py:3", "the first one is the nearest"
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error)), type(error)(*error.args)):
        assert str(other) == str(error) == "policy P, step 4, device 0, job 3: what (rule: job)"


# ---- the line of a policy
class TooMany:
    """A scheduling that wants a token more than remain."""

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting[: 0 if view.serving else 1]]
        return tuple(Slice(job, job.remaining_tokens + 1) for job in jobs)


class NoPages:
    """A memory policy that takes no pages."""

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        plan.compute(batch, ())


class FreesTwice:
    """A memory policy that the plan builder stops at a line of its own."""

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        place = kv_place(batch[0].job.job_id)
        plan.free(place)


class Answers:
    """A policy as a whole, and a scheduling, that answer with None."""

    def plan(self, view: View) -> Any:
        return None

    def batch(self, view: View) -> Any:
        return None


class PlansItself(Composed):
    """A policy in two halves with a plan of its own."""

    def plan(self, view: View) -> Any:
        return ()


TAKES_NO_PLAN: Any = type("TakesNoPlan", (), {"fit": lambda self, batch, view: None})()
TYPED: dict[str, Any] = {}
exec("class Typed:\n    def plan(self, view):\n        return None", TYPED)


@pytest.mark.parametrize(
    ("policy", "at"),
    [
        (Answers(), Answers.plan),
        (Composed(Answers(), PagedRestart()), Answers.batch),
        (Composed(TooMany(), PagedRestart()), TooMany.batch),
        (Composed(TooMany(), NoPages()), TooMany.batch),
        (Composed(HONEST.scheduling, NoPages()), NoPages.fit),
        (Composed(Orca(), NoPages()), NoPages.fit),
        (Composed(HONEST.scheduling, TAKES_NO_PLAN), TAKES_NO_PLAN.fit),
        (PlansItself(HONEST.scheduling, PagedRestart()), PlansItself.plan),
    ],
)
def test_a_refusal_tells_where_what_made_the_plan_is_defined(policy: Any, at: Any) -> None:
    with pytest.raises(ContractError) as caught:
        replay(policy, random_requests(3, 8))
    where = defined_at(at)
    assert re.fullmatch(r"\S*test_plan_check\.py:\d+", where) and caught.value.at == where
    assert str(caught.value).startswith(f"policy {name_of(policy)} ({where}), step 0")
    assert "\n" not in str(caught.value)


def test_a_line_at_which_the_plan_builder_stops_a_policy_is_told_itself() -> None:
    with pytest.raises(ContractError, match="not held") as caught:
        replay(Composed(HONEST.scheduling, FreesTwice()), random_requests(3, 3))
    lines = inspect.getsourcelines(FreesTwice.fit)
    assert caught.value.at.endswith(f"test_plan_check.py:{lines[1] + len(lines[0]) - 1}")


def test_a_policy_without_source_is_told_without_a_line() -> None:
    with pytest.raises(ContractError, match="policy Typed, step 0, device 0: None is no plan"):
        replay(TYPED["Typed"](), random_requests(3, 3))
    assert defined_at(len) == defined_at(None) == defined_at(TYPED["Typed"].plan) == ""


def test_a_path_is_told_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sub/mine.py"
    file.parent.mkdir()
    file.touch()
    assert file_line(str(file), 3) == f"{file}:3"
    monkeypatch.chdir(tmp_path)
    assert file_line(str(file), 3) == "sub/mine.py:3"
    monkeypatch.chdir(file.parent)
    assert file_line(str(file), 3) == "mine.py:3"
    assert file_line(str(tmp_path / "none.py"), 3) == file_line("<stdin>", 3) == ""


def test_a_router_that_names_no_replica_is_told_with_its_line() -> None:
    class Far:
        def route(self, job: Job, fleet: Fleet) -> int:
            return 7

    with pytest.raises(ValueError, match=r"router Far \(\S*test_plan_check.py:\d+\) sends"):
        replay(HONEST, random_requests(3, 3), devices=2, router=Far())


# ---- moments
def test_moments_before_a_far_arrival_are_not_asked_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.loop.engine.FRUITLESS", 100)

    class Waits:
        def plan(self, view: View) -> Plan:
            return Plan(wake_ns=view.now_ns + 1)

    far = [Request(0, 0, 5, 5), Request(1, 10_000_000_000, 5, 5)]
    with pytest.raises(Stalled, match="1,000 moments"):
        replay(Waits(), far)
