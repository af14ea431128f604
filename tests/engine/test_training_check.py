"""Hostile plans of training: each breaks one rule, is refused in one line, and changes nothing."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.layout import Layout, Mode
from engine.contract.plan import (
    HOST_LANE,
    Compute,
    Copy,
    Free,
    Grow,
    Plan,
    Slice,
)
from engine.contract.progress import advance_training, check_order
from engine.contract.regions import (
    GATHERED,
    INPUT_GRADIENT,
    NORM,
    TIED_GRADIENT,
    UNREDUCED,
    WORKSPACE,
    Kind,
    Place,
    Region,
    Work,
    gathered,
    gradient,
    hidden,
    input_gradient,
    kv_place,
    norm,
    optimizer,
    saved,
    tied_gradient,
    unreduced,
    weight,
)
from engine.contract.rules import ContractError, Rule
from engine.contract.training_check import TrainingContract, _Reading
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.planners.unit_chunks import UnitChunks
from policies.training.all_on_device import AllOnDevice
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from policies.training.zero_offload import ZeroOffload
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of
from tests.engine.lying_training import (
    CLIPPED,
    CLIPS,
    DEVICE,
    GPU,
    GROUP,
    HOST,
    OFFLOADING,
    RECOMPUTING,
    REUSING,
    REUSING_GROUP,
    STAYING,
    TWICE,
    UNITS,
    B,
    F,
    Fault,
    Lying,
    Ops,
    U,
    World,
    at,
    before,
    behind,
    books_of,
    gathers,
    is_task,
    less,
    never,
    other,
    piece,
    refused,
    without,
)
from tests.support.offload import MEMORIES, NO_PAGES, ROOMY, job_of, shape_of
from tests.support.replays import Replay, ToyExecutor
from tests.support.strategies import cases
from tests.training.training_faults import Faulty, check_meaning
from tests.training.trainings import SMALL
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

ACT, BUF = Kind.ACTIVATION, Kind.BUFFER

NAMELESS: dict[str, tuple[World, Fault]] = {
    "bare forward": (DEVICE, at(F, 0, lambda op: (other(op, reads=(), writes=()),))),
    "bare update": (DEVICE, at(U, 0, lambda op: (other(op, reads=(), writes=()),))),
    "forward, weights": (DEVICE, at(F, 1, without(Kind.WEIGHT))),
    "forward, input": (DEVICE, at(F, 2, without(ACT, low=UNITS + 2, high=UNITS + 3))),
    "forward, output": (DEVICE, at(F, 2, without(ACT, low=UNITS + 3, high=UNITS + 4))),
    "forward, saved": (DEVICE, at(F, 2, without(ACT, high=UNITS))),
    "forward, workspace": (DEVICE, at(F, 1, without(BUF, WORKSPACE))),
    "again, saved": (RECOMPUTING, at(F, 2, without(ACT, high=UNITS), again=True)),
    "backward, weights": (DEVICE, at(B, 2, without(Kind.WEIGHT))),
    "backward, gradients": (DEVICE, at(B, 2, without(Kind.GRADIENT))),
    "backward, saved": (OFFLOADING, at(B, 2, without(ACT, high=UNITS))),
    "backward, input": (DEVICE, at(B, 2, without(ACT, low=UNITS))),
    "backward, incoming": (DEVICE, at(B, 2, without(BUF, INPUT_GRADIENT, 3, 4))),
    "backward, outgoing": (DEVICE, at(B, 2, without(BUF, INPUT_GRADIENT, 2, 3))),
    "backward, tied, made": (TWICE, at(B, UNITS - 1, without(BUF, TIED_GRADIENT), k=1)),
    "backward, tied, read": (TWICE, at(B, 0, without(BUF, TIED_GRADIENT), k=1)),
    "backward, norm": (CLIPPED, at(B, 0, without(BUF, NORM))),
    "update, gradients": (World(), at(U, 1, without(Kind.GRADIENT))),
    "update, optimizer": (World(), at(U, 1, without(Kind.OPTIMIZER))),
    "update, weights": (World(), at(U, 1, without(Kind.WEIGHT))),
    "update, norm": (CLIPPED, at(U, 1, without(BUF, NORM))),
    "group, gathered": (GROUP, at(F, 1, without(BUF, GATHERED))),
    "group, unreduced": (GROUP, at(B, 1, without(BUF, UNREDUCED))),
    "reused, weights": (REUSING, at(B, 2, without(Kind.WEIGHT))),
    "reused, gathered": (REUSING_GROUP, at(B, 2, without(BUF, GATHERED))),
    "too few bytes, input": (DEVICE, less(hidden(0, 2, UNITS, 0))),
    "too few bytes, gradients": (DEVICE, less(gradient(0, 2))),
    "too few bytes, input gradient": (DEVICE, less(input_gradient(0, 2))),
    "another's KV": (DEVICE, at(F, 1, lambda op: (Grow(kv_place(5), 0), _also(op, kv_place(5))))),
    "two tasks": (DEVICE, at(F, 1, lambda op: (other(op, slices=op.slices * 2),))),
    "no slice of its own": (DEVICE, at(F, 1, behind(Compute((), writes=(weight(0, 1),))))),
}


# Told by a rule of its own, before the layout is asked.
NAMELESS_OTHERWISE = {"another's KV": Rule.JOB, "no slice of its own": Rule.ANSWER}


def _also(op: Compute, *places: Place) -> Compute:
    return other(op, writes=(*op.writes, *places))


@pytest.mark.parametrize("name", NAMELESS)
def test_a_launch_names_what_its_task_needs(name: str) -> None:
    error = refused(*NAMELESS[name])
    assert error.rule is NAMELESS_OTHERWISE.get(name, Rule.TRAINING_PLACES), error
    assert name in NAMELESS_OTHERWISE or error.job_id == 0


def frozen(op: Compute) -> Sequence[Any]:
    """An update of a chunk that does not train."""
    job = op.slices[0].job
    assert job.training is not None and job.training.layout is not None
    chunks = job.training.layout.chunks
    c = next(c for c, chunk in enumerate(chunks) if not chunk.trains)
    return piece(op, layers=range(c, c + 1))


def ahead_of_time(work: Work, part: int, now: Work, at_part: int) -> Fault:
    """A task's slice where another was due."""
    return at(now, at_part, lambda op: piece(op, work=work, layers=range(part, part + 1)))


def _update_of(op: Compute, chunk: int) -> Sequence[Any]:
    task = op.slices[0]._replace(work=U, tokens=1, layers=range(chunk, chunk + 1))
    return (Compute((task,), (), (weight(0, chunk),)), op)


ORDERLESS: dict[str, tuple[World, Fault]] = {
    "forward before that below": (DEVICE, at(F, 1, lambda op: piece(op, layers=range(2, 3)))),
    "forward twice": (DEVICE, at(F, 1, lambda op: (op, other(op)))),
    "backward before forward": (DEVICE, ahead_of_time(B, 4, F, 3)),
    "backward before that above": (DEVICE, at(B, 3, lambda op: piece(op, layers=range(2, 3)))),
    "backward twice": (DEVICE, at(B, 3, lambda op: (op, other(op)))),
    "backward of the second first": (TWICE, at(B, 4, lambda op: piece(op, microbatch=1))),
    "update too early": (DEVICE, at(B, 1, lambda op: _update_of(op, 1))),
    "update twice": (DEVICE, at(U, 1, lambda op: (op, other(op)))),
    "update of what is frozen": (World(AllOnDevice(), adapters=True), at(U, 2, frozen)),
    "update before all, clipped": (CLIPPED, at(B, 0, lambda op: _update_of(op, 3))),
    "the next step's microbatch": (DEVICE, at(F, 1, lambda op: piece(op, microbatch=1))),
    "no microbatch": (DEVICE, at(F, 1, lambda op: piece(op, microbatch=-1))),
    "a later version": (DEVICE, at(F, 1, lambda op: piece(op, version=1))),
    "an update of a later version": (DEVICE, at(U, 1, lambda op: piece(op, version=1))),
    "half a microbatch": (DEVICE, at(F, 1, lambda op: piece(op, tokens=4))),
    "no token": (DEVICE, at(F, 1, lambda op: piece(op, tokens=0))),
    "tokens of a kind": (DEVICE, at(F, 1, lambda op: piece(op, tokens=8.0))),
    "an update of many tokens": (DEVICE, at(U, 1, lambda op: piece(op, tokens=8))),
    "all units": (DEVICE, at(F, 1, lambda op: piece(op, layers=None))),
    "two units": (DEVICE, at(F, 1, lambda op: piece(op, layers=range(1, 3)))),
    "no unit": (DEVICE, at(F, 1, lambda op: piece(op, layers=range(UNITS, UNITS + 1)))),
    "a unit by number": (DEVICE, at(F, 1, lambda op: piece(op, layers=1))),
    "unknown work": (DEVICE, at(F, 1, lambda op: piece(op, work="sideways"))),
    "work by name": (DEVICE, at(F, 1, lambda op: piece(op, work="forward"))),
    "again, what is kept": (DEVICE, at(F, 1, lambda op: (op, other(op, again=True)))),
    "again, before it was": (RECOMPUTING, at(F, 1, lambda op: (other(op, again=True), op))),
    "again, an update": (DEVICE, at(U, 1, lambda op: (other(op, again=True),))),
}


@pytest.mark.parametrize("name", ORDERLESS)
def test_work_goes_in_the_order_of_the_chain(name: str) -> None:
    error = refused(*ORDERLESS[name])
    assert error.rule is Rule.TRAINING_ORDER, error


FREED: dict[str, tuple[World, Fault]] = {
    "weights": (World(), at(F, 0, before(Free(weight(0, 3, HOST))))),
    "frozen weights": (
        World(Zero3Offload(), adapters=True),
        at(F, 0, before(Free(weight(0, 0, HOST)))),
    ),
    "optimizer states": (World(), at(F, 0, before(Free(optimizer(0, 3, HOST))))),
    "new weights on the device": (DEVICE, at(U, 1, behind(Free(weight(0, 1))))),
    "new weights on the host": (
        World(ZeroOffload()),
        lambda plan, view: _freed_behind_update(plan, weight(0, 1, HOST)),
    ),
    "gradients": (DEVICE, at(B, 2, behind(Free(gradient(0, 2))))),
    "gradients between microbatches": (TWICE, at(F, 1, before(Free(gradient(0, 2))), k=1)),
    "saved": (DEVICE, at(F, 2, behind(Free(saved(0, 2, 0))))),
    "saved, sent": (OFFLOADING, at(F, 3, before(Free(saved(0, 2, 0, HOST))))),
    "saved again": (RECOMPUTING, at(F, 2, behind(Free(saved(0, 2, 0))), again=True)),
    "input": (DEVICE, at(F, 2, behind(Free(hidden(0, 2, UNITS, 0))))),
    "output": (DEVICE, at(F, 2, behind(Free(hidden(0, 3, UNITS, 0))))),
    "input gradient": (DEVICE, at(B, 2, behind(Free(input_gradient(0, 2))))),
    "tied gradient": (TWICE, at(B, 4, behind(Free(tied_gradient(0))), k=1)),
    "norm": (CLIPPED, at(B, 0, behind(Free(norm(0))))),
    "unreduced": (
        World(Zero3Offload(), tied=True, ranks=4),
        at(B, 4, behind(Free(unreduced(0, 0)))),
    ),
}


def _freed_behind_update(plan: Plan, place: Place) -> Ops | None:
    """An update on the host is not fetched before the host's own copy goes."""
    for i, op in enumerate(plan.ops):
        if is_task(op, U, place.region.part):
            return [*plan.ops[: i + 1], Free(place)]
    return None


@pytest.mark.parametrize("name", FREED)
def test_nothing_goes_before_its_last_use(name: str) -> None:
    error = refused(*FREED[name])
    assert error.rule is Rule.TRAINING_FREED, error
    assert "the only copy as new" in error.what


def held(plan: Plan, view: View, place: Place, is_meant: Callable[[Any], bool]) -> Ops | None:
    """A plan without some operations, once a place is held."""
    return never(is_meant)(plan, view) if place in view.held_bytes else None


def fetches(op: Any, chunk: int) -> bool:
    return isinstance(op, Copy) and op.src == weight(0, chunk, HOST)


def begins_instead(plan: Plan, view: View) -> Ops | None:
    """The norm on the host begins there, but is not copied there."""
    away = norm(0, HOST)
    ops = [Grow(away, 4) if isinstance(op, Copy) and op.dst == away else op for op in plan.ops]
    return ops if ops != [*plan.ops] else None


def out(place: Place) -> Copy:
    return Copy(place, place._replace(tier=HOST))


def begun_anew(place: Place) -> Callable[[Compute], Sequence[Any]]:
    """What another tier has as new is not copied from there."""
    return before(Free(place), Grow(place, 999))


CONTENTS: dict[str, tuple[World, Fault]] = {
    "old weights": (
        World(ZeroOffload()),
        lambda plan, view: held(plan, view, weight(0, 1), lambda op: fetches(op, 1)),
    ),
    "weights of nothing": (World(), at(F, 1, begun_anew(weight(0, 1)))),
    "weights that only begin": (World(), at(F, 1, behind(Grow(weight(0, 4), 999)))),
    "saved of nothing": (RECOMPUTING, never(lambda op: is_task(op, F, 2, again=True))),
    "saved, made up by another": (
        RECOMPUTING,
        at(F, 2, lambda op: (Grow(saved(0, 1, 0), 99), _also(op, saved(0, 1, 0)))),
    ),
    "saved, not fetched": (OFFLOADING, at(B, 2, begun_anew(saved(0, 2, 0)))),
    "gradients of the step before": (
        DEVICE,
        never(lambda op: isinstance(op, Free) and op.place == gradient(0, 2)),
    ),
    "sums left on the host": (
        TWICE,
        at(B, 2, lambda op: (out(gradient(0, 2)), *begun_anew(gradient(0, 2))(op)), k=1),
    ),
    "optimizer states left elsewhere": (
        World(),
        at(
            U,
            1,
            lambda op: (
                Copy(optimizer(0, 1, HOST), optimizer(0, 1)),
                *begun_anew(optimizer(0, 1, HOST))(op),
            ),
        ),
    ),
    "norm of nothing": (World(job={"recipe": CLIPS}), begins_instead),
    "old gathered weights": (
        STAYING,
        lambda plan, view: held(
            plan, view, gathered(0, 2), lambda op: gathers(op) and op.writes == (gathered(0, 2),)
        ),
    ),
    "unreduced of the microbatch before": (
        replace(GROUP, job={"microbatches": 2}),
        never(lambda op: isinstance(op, Free) and op.place == unreduced(0, 2)),
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_read_is_there_and_the_newest(name: str) -> None:
    error = refused(*CONTENTS[name])
    assert error.rule is Rule.TRAINING_CONTENTS, error


COPIED: dict[str, tuple[World, Fault]] = {
    "old weights over new ones": (World(ZeroOffload()), at(U, 1, behind(out(weight(0, 1))))),
    "onto another chunk": (DEVICE, at(F, 1, behind(Copy(weight(0, 1), weight(0, 2, HOST))))),
    "onto another job's": (DEVICE, at(F, 1, behind(Copy(weight(0, 1), weight(5, 1, HOST))))),
    "onto another kind": (DEVICE, at(F, 1, behind(Copy(weight(0, 1), gradient(0, 1))))),
    "onto itself": (DEVICE, at(F, 1, behind(Copy(weight(0, 1), weight(0, 1))))),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_keeps_its_region_and_replaces_nothing_newer(name: str) -> None:
    error = refused(*COPIED[name])
    assert error.rule is Rule.COPY, error


def forged(op: Compute) -> Sequence[Any]:
    job = op.slices[0].job
    assert job.training is not None
    return piece(op, job=Job.trains(job.training, 0))


REST: dict[str, tuple[World, Rule, Fault]] = {
    "a backward on the host": (
        DEVICE,
        Rule.LANE,
        at(B, 2, lambda op: (other(op, on=HOST_LANE),)),
    ),
    "an invented lane": (DEVICE, Rule.LANE, at(F, 2, lambda op: (other(op, on="second"),))),
    "another device": (DEVICE, Rule.DEVICE, at(F, 2, lambda op: (other(op, device=1),))),
    "a job made up": (DEVICE, Rule.JOB, at(F, 1, forged)),
    "no slice": (DEVICE, Rule.ANSWER, at(F, 1, lambda op: (other(op, slices=(None,)),))),
    "a restart": (
        DEVICE,
        Rule.RESTART,
        lambda plan, view: Plan(plan.ops, (view.training[0],)) if view.training else None,
    ),
    "a copy of what is not there": (
        DEVICE,
        Rule.HELD,
        at(F, 1, behind(Copy(optimizer(0, 99), optimizer(0, 99, HOST)))),
    ),
    "a free of what is not there": (DEVICE, Rule.HELD, at(F, 1, behind(Free(gradient(0, 99))))),
}


@pytest.mark.parametrize("name", REST)
def test_other_rules_hold_for_training_too(name: str) -> None:
    world, rule, fault = REST[name]
    assert refused(world, fault).rule is rule


def test_microbatches_go_backward_in_their_order() -> None:
    """Forwards may all come first, but for dropout; gradients flow down one by one."""
    shape = shape_of(random.Random(7))
    layout = UnitChunks().prepare({0: shape}, [job_of(shape)], {(GPU, 0): ROOMY, (HOST, 0): ROOMY})
    drops = job_of(shape, microbatches=2, recipe=Recipe(dropout=0.1))
    job, other = (
        Job.trains(TrainingProgress(x, layout.training[0]), 0)
        for x in (replace(drops, recipe=Recipe()), drops)
    )

    def slices(work: Work, k: int, units: Sequence[int], of: Job = job) -> list[Slice]:
        return [Slice(of, 8, work, range(u, u + 1), k) for u in units]

    up, down = range(UNITS), range(UNITS - 1, -1, -1)
    for pieces in zip(slices(F, 0, up), slices(F, 1, up), strict=True):
        for one in pieces:
            check_order(one, training_of(job))
            advance_training(one)
    with pytest.raises(ContractError, match="backward of microbatch 1 before that of 0 is done"):
        check_order(*slices(B, 1, [UNITS - 1]), training_of(job))
    for one in (*slices(B, 0, down), *slices(B, 1, down)):
        check_order(one, training_of(job))
        advance_training(one)
    advance_training(Slice(job, 1, U, range(1, 2), 1))
    with pytest.raises(ContractError, match="microbatch 2: the step has 0 to 1"):
        check_order(*slices(F, 2, [0]), training_of(job))
    advance_training(*slices(F, 0, [0], other))
    with pytest.raises(ContractError, match="dropout draws in their order"):
        check_order(*slices(F, 1, [0], other), training_of(other))


def training_of(job: Job) -> TrainingProgress:
    assert job.training is not None
    return job.training


@pytest.mark.parametrize("tasks", [0, 4])
@pytest.mark.parametrize(
    "case",
    [
        NAMELESS["backward, saved"],
        ORDERLESS["backward twice"],
        FREED["saved"],
        CONTENTS["saved of nothing"],
        COPIED["old weights over new ones"],
    ],
)
def test_a_plan_of_many_tasks_is_read_to_its_fault(case: tuple[World, Fault], tasks: int) -> None:
    """What stands before the fault is not booked either."""
    world, fault = case
    refused(replace(world, tasks=tasks), fault)


def test_what_an_ended_job_holds_may_go() -> None:
    """And before it has ended, or come at all, not."""
    engine, _, job = DEVICE.engine(lambda plan, view: None)
    contract = engine._training
    plan = Plan((Free(weight(0, 1, HOST)),))
    for come in (False, True):
        if come:
            contract.admit(Job.trains(TrainingProgress(job, engine.state.layout.training[0]), 0))
        with pytest.raises(ContractError, match="training freed"):
            contract.check(plan)
    refusing = Plan(plan.ops, refuse=(contract.jobs[0],))
    contract.check(refusing)
    contract.leave(0)
    contract.check(plan)


def test_what_others_hold_stays_too() -> None:
    """Resident weights that belong to no training job."""
    place = Place(Region(-1, Kind.WEIGHT), GPU)
    env = VirtualClock()
    engine = Engine(
        env, Composed(TrainingOrder(), AllOnDevice()), ToyExecutor(env), {(GPU, 0): 100},
        NO_PAGES, layout=Layout({place: 50}),
    )  # fmt: skip
    with pytest.raises(ContractError, match="weight chunk 0 on gpu:0, the only copy"):
        engine._training.check(Plan((Free(place),)))


def test_serving_is_no_concern() -> None:
    """Where nothing trains, launches, pages and swaps are not looked at."""
    contract = TrainingContract(Layout(), dict, {}, [(GPU, 0), (HOST, 0)], NO_PAGES)
    job = Job(1, 0, 8, 8)
    places = (kv_place(1), kv_place(1, HOST))
    launch = Compute((Slice(job, 8),), (), places[:1])
    ops = (Grow(places[0], 4000), launch, Copy(*places), Free(places[0]))
    assert not contract.concerns(Plan(ops))
    contract.check(Plan(ops))
    contract.admit(Job.trains(TrainingProgress(TrainingJob(7, 0, 3, 8)), 0))
    assert not contract.concerns(Plan(ops)), "beside training neither"
    assert contract.concerns(Plan((Compute((Slice(contract.jobs[7], 8),)),)))


def faulty(
    seed: int, name: str, mode: Mode, ranks: int, microbatches: int, tasks: int
) -> tuple[Engine, Faulty, TrainingJob]:
    """A small job under a policy that errs once."""
    rng = random.Random(seed)
    job: dict[str, Any] = {"microbatches": microbatches, "num_steps": 2}
    job["recipe"] = CLIPS if rng.random() < 0.4 else Recipe()
    memory: Any = MEMORIES.get(name)
    if memory is None:
        memory, job = REUSING.memory, REUSING.job | {"num_steps": 2}
    world = World(memory, mode, rng.random() < 0.4, ranks, rng.random() < 0.7, tasks, job=job)
    engine, lying, one = world.engine(lambda plan, view: None)
    policy = Faulty(lying.policy, rng, 0.1 if tasks == 1 else 0.6)
    engine._asking._policy = policy
    return engine, policy, one


def is_harmless(engine: Engine) -> bool:
    try:
        check_meaning(Replay(engine, engine.recorder, Journal(lambda: 0)))
    except AssertionError:
        return False
    return True


@cases(300)
@example(seed=1972, name="zero3_offload", mode=Mode.RECOMPUTE, ranks=1, microbatches=1, tasks=1)
@given(
    seed=st.integers(0, 1 << 20),
    name=st.sampled_from([*MEMORIES, "reusing"]),
    mode=st.sampled_from([*Mode]),
    ranks=st.sampled_from([1, 1, 4]),
    microbatches=st.sampled_from([1, 2]),
    tasks=st.sampled_from([0, 1, 3]),
)
def test_a_random_fault_is_refused_or_does_no_harm(
    seed: int, name: str, mode: Mode, ranks: int, microbatches: int, tasks: int
) -> None:
    engine, policy, job = faulty(seed, name, mode, ranks, microbatches, tasks)
    try:
        engine.replay([job])
    except ContractError as error:
        assert policy.told and "\n" not in str(error)
        engine.ledger.conserved()
    except AssertionError as error:  # of the dry run, behind the contract
        assert "dry_run.py" in str(traceback.extract_tb(error.__traceback__)[-1].filename)
    else:
        assert is_harmless(engine)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_forward_may_be_repeated_twice(name: str, step: int) -> None:
    """A step then has a launch more than a policy planned, and than the step before had."""
    memory, steps = MEMORIES[name], {"num_steps": 3}
    lying = at(F, 2, lambda op: (op, other(op)), again=True, k=step)
    told = list[Plan]()

    def once(plan: Plan, view: View) -> Ops | Plan | None:
        found = None if told else lying(plan, view)
        if found is not None:
            told.append(plan)
        return found

    engine, _, job = World(memory, Mode.RECOMPUTE, job=steps).engine(once)
    engine.replay([job])
    assert told and is_harmless(engine)


def test_the_oracle_knows_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where contents and frees are not looked at, harm is done, and found."""
    nothing = {"_check_read": None, "_use_of": ""}
    for name, found in nothing.items():
        monkeypatch.setattr(_Reading, name, lambda self, *given, found=found: found)
    fault = CONTENTS["old weights"][1]
    engine, policy, job = World(ZeroOffload()).engine(fault)
    engine.replay([job])
    assert policy.told and not is_harmless(engine)


# ---- in every world
WORLDS: dict[str, tuple[str, Rule, Fault]] = {
    "bare": ("train_on_device", Rule.TRAINING_PLACES, NAMELESS["bare forward"][1]),
    "old weights": ("zero_offload", Rule.TRAINING_CONTENTS, CONTENTS["old weights"][1]),
    "freed early": ("train_on_device", Rule.TRAINING_FREED, at(F, 2, behind(Free(saved(0, 2, 0))))),
    "updated twice": ("train_on_device", Rule.TRAINING_ORDER, ORDERLESS["update twice"][1]),
    "copied over": ("zero_offload", Rule.COPY, COPIED["old weights over new ones"][1]),
}


@pytest.mark.broad(4)
@pytest.mark.parametrize("backend", ["sim", "lockstep", "cpu"])
@pytest.mark.parametrize("name", WORLDS)
def test_no_world_carries_it_out(name: str, backend: str) -> None:
    policy, rule, fault = WORLDS[name]
    point = composed([*SMALL, f"policy={policy}", f"backend={backend}"])
    found = run_spec_of(point)
    lying = Lying(found.policy, fault)
    with backend_of(found, point.config["backend"]) as world:
        engine = engine_of(replace(found, policy=lying), world, Recorder(world.meter))
        with pytest.raises(ContractError) as caught:
            engine.replay(found.work)
        assert lying.books == books_of(engine, lying.books[-1])
        engine.ledger.conserved()
    assert caught.value.rule is rule, caught.value
