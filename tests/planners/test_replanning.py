"""A job goes on between steps by another of its layouts: the planner's choice for less or more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from analysis.run import Run, load
from engine.contract.job import Job
from engine.contract.layout import TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder
from engine.contract.progress import check_stages
from engine.contract.rules import ContractError, Rule
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from engine.laws.check_policy import WatchedPolicy
from engine.loop.engine import Stalled
from engine.results.plan_log import encode
from policies.planners.protrain import ProTrainLayout
from policies.training.out_of_memory import OutOfMemory
from policies.training.protrain import ProTrain
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of, run_experiment
from tandem.wiring.run_spec import run_spec_of
from tests.support.pressure import CLIP, DROPOUT, JOB, LORA, TIED, Words
from tests.training.trainings import differing, plain, run_spec, state_bytes, train

pytestmark = pytest.mark.ci

LEVELS = "planner.levels=12"
STEPS = "training.num_steps=6"
RECIPES: dict[str, Words] = {
    "full": (),
    "lora": (LORA, DROPOUT),
    "clip": (CLIP, TIED),
    "accumulate": ("training.microbatches=3", DROPOUT),
}


def each_in_turn(self: ProTrain, job: Job, view: View, plan: PlanBuilder) -> int | None:
    """Another layout at every step, from the one that needs most to the one that needs least."""
    training, layouts = job.training, view.layout.alternatives[job.job_id]
    assert training is not None
    number = training.step % len(layouts)
    is_there = not training.begins_step or training.layout == layouts[number]
    return None if is_there else number


@pytest.mark.broad(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_job_that_is_laid_out_anew_at_each_step_trains_as_plain_torch(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and every backend decides alike: a layout says where numbers are, not which."""
    words = (*JOB, "policy=protrain", LEVELS, *RECIPES[recipe], STEPS)
    words = (*words, whole(*words))
    monkeypatch.setattr(ProTrain, "_other_layout", each_in_turn)
    runs = {name: train(name, *words) for name in ("sim", "lockstep", "cpu")}
    layouts = runs["sim"].setting.room.layout.alternatives
    assert min(map(len, layouts.values())) >= 3
    changes = [body for body in runs["sim"].log if '"relaid"' in body]
    assert len(changes) >= 4
    expected = plain("policy=train_on_device", *JOB, *RECIPES[recipe], STEPS)
    for name in ("lockstep", "cpu"):
        assert not differing(runs[name].result, expected)
        assert runs[name].log == runs["sim"].log, f"{name} decides otherwise"


def test_alternatives_need_less_and_less() -> None:
    """Each is the fastest in its memory, and a job that is alone keeps the fastest of all."""
    words = (*JOB, "policy=protrain", LEVELS, STEPS)
    words = (*words, whole(*words))
    found = train("sim", *words)
    (layouts,) = found.setting.room.layout.alternatives.values()
    peaks = [layout.peak_bytes for layout in layouts]
    assert peaks == sorted(set(peaks), reverse=True) and peaks[-1] > 0
    assert found.setting.room.layout.training == {0: layouts[0]}
    assert not any(['"relaid"' in body for body in found.log])


def begins(job: Job) -> bool:
    assert job.training is not None
    return job.training.begins_step


# When a job may not go on by another layout: by whether a step begins, and a launch is in flight.
MOMENTS: dict[str, Callable[[bool, bool], bool]] = {
    "within a step": lambda begins, in_flight: not begins and not in_flight,
    "while its first launch is in flight": lambda begins, in_flight: begins and in_flight,
    "with its first launch in the plan": lambda begins, in_flight: begins and not in_flight,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_new_layout_in_a_step_is_refused(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that lie where the old layout says would be sought where the new one says."""
    launches = moment == "with its first launch in the plan"
    waits = moment == "within a step"  # else a launch is always in flight there
    fit = ProTrain.fit

    def with_layout(
        self: ProTrain, batch: tuple[Slice, ...], view: View, plan: PlanBuilder
    ) -> None:
        job, is_due = batch[0].job, MOMENTS[moment]
        if is_due(begins(job), view.is_in_flight(job)):
            plan.relay(job, 0)
            if not launches:
                return
        if not waits or begins(job):
            fit(self, batch, view, plan)

    monkeypatch.setattr(ProTrain, "fit", with_layout)
    words = (*JOB, "policy=protrain", LEVELS, STEPS)
    words = (*words, whole(*words))
    with pytest.raises(ContractError, match="a new layout in a step, or with a launch"):
        train("sim", *words)


def relaid(number: Any) -> Callable[[PlanBuilder, Job], None]:
    return lambda plan, job: plan.relay(job, number)


def twice(plan: PlanBuilder, job: Job) -> None:
    plan.relay(job, 0)
    plan.relay(job, 1)


def refused(plan: PlanBuilder, job: Job) -> None:
    plan.refuse(job)
    plan.relay(job, 0)


WRONG: dict[str, tuple[Callable[[PlanBuilder, Job], None], str]] = {
    "below all": (relaid(-1), r"layout -1 of \d+"),
    "above all": (relaid(99), r"layout 99 of \d+"),
    "a truth": (relaid(True), r"layout True of \d+"),
    "twice": (twice, "two new layouts of a job"),
    "of a job that leaves": (refused, "a new layout of no job that trains"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_layout_that_is_none_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps, with nothing in flight: no other reason is there to refuse it."""
    write, told = WRONG[wrong]

    def with_layout(
        self: ProTrain, batch: tuple[Slice, ...], view: View, plan: PlanBuilder
    ) -> None:
        assert begins(batch[0].job) and not view.is_in_flight(batch[0].job)
        write(plan, batch[0].job)

    monkeypatch.setattr(ProTrain, "fit", with_layout)
    words = (*JOB, "policy=protrain", LEVELS, STEPS)
    words = (*words, whole(*words))
    with pytest.raises(ContractError, match=told) as caught:
        train("sim", *words)
    assert caught.value.rule is Rule.RELAID


def test_a_job_that_is_laid_out_again_and_again_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 10: a new layout is no progress."""

    def another(self: ProTrain, job: Job, view: View, plan: PlanBuilder) -> int | None:
        assert job.training is not None
        layouts = view.layout.alternatives[job.job_id]
        return int(job.training.layout == layouts[0]) if job.training.begins_step else None

    monkeypatch.setattr(ProTrain, "_other_layout", another)
    monkeypatch.setattr("engine.loop.engine.FRUITLESS", 100)
    words = (*JOB, "policy=protrain", LEVELS, STEPS)
    words = (*words, whole(*words))
    with pytest.raises(Stalled, match="last 100 plans hold no operation"):
        train("sim", *words)


def without_last(layout: TrainingLayout, name: str) -> TrainingLayout:
    changed: dict[str, Any] = {name: getattr(layout, name)[:-1]}
    return replace(layout, **changed)


UNLIKE: dict[str, Callable[[TrainingLayout], TrainingLayout]] = {
    "chunks": lambda layout: without_last(layout, "chunks"),
    "units": lambda layout: without_last(layout, "units"),
    "ranks": lambda layout: replace(layout, ranks=layout.ranks + 1),
    "versions": lambda layout: replace(layout, versions=layout.versions + 1),
    "chunks of a unit": lambda layout: replace(
        layout, units=(replace(layout.units[0], chunks=layout.units[1].chunks), *layout.units[1:])
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_alternatives_are_of_equal_chunks_units_and_order(what: str) -> None:
    words = (*JOB, "policy=protrain", LEVELS, STEPS)
    words = (*words, whole(*words))
    found = run_spec(*words)
    (layouts,) = found.room.layout.alternatives.values()
    training = TrainingProgress(found.trainees[0].job, layouts[0])
    check_stages(training, layouts)
    with pytest.raises(ContractError, match="layout 1 has other chunks, units or stages"):
        check_stages(training, (layouts[0], UNLIKE[what](layouts[1])))
    with pytest.raises(ContractError, match="without an order of tasks"):
        check_stages(TrainingProgress(training.spec), layouts)


def test_a_job_begins_by_the_least_layout_where_its_share_holds_none() -> None:
    words = (*JOB, "policy=protrain", LEVELS, STEPS)
    least = min([one.peak_bytes for one in alternatives(*words)])
    share = f"planner.device_share={0.5 * least / (2 * state_bytes(run_spec(*words))):.3f}"
    with pytest.raises(OutOfMemory, match="short for the nearest of the configurations"):
        run_spec(*JOB, "policy=protrain", STEPS, share, whole(*words))
    found = run_spec(*words, share, whole(*words)).room.layout
    (layouts,) = found.alternatives.values()
    assert found.training == {0: layouts[-1]} and len(layouts) > 1


def test_a_configuration_that_is_given_has_its_peak() -> None:
    """So that it is relaid to nothing that needs as much."""
    knobs = [f"planner.{name}={n}" for name, n in (("persistent", 1), ("buffers", 1),
                                                   ("swaps", 0), ("checkpoints", 1))]  # fmt: skip
    (layout,) = alternatives(*JOB, "policy=protrain", LEVELS, STEPS, *knobs)
    assert layout.peak_bytes > 0 and layout.persistent


def whole(*words: str) -> str:
    return f"budget.device_bytes={2 * state_bytes(run_spec(*words))}"


def alternatives(*words: str) -> tuple[TrainingLayout, ...]:
    (found,) = run_spec(*words, whole(*words)).room.layout.alternatives.values()
    return found


@pytest.mark.parametrize("levels", [-1])
def test_levels_are_at_least_none(levels: int) -> None:
    with pytest.raises(ValueError, match="levels is -1, not at least 0"):
        ProTrainLayout(levels=levels)


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_a_headroom_leaves_something(headroom: float) -> None:
    with pytest.raises(ValueError, match="headroom"):
        ProTrain(headroom=headroom)


ELASTIC = ("policy=elastic_protrain", "planner.levels=24", "memory.training.headroom=0.05")
WORK = (
    "model=micro_llama",
    "model.num_layers=6",
    "training=random",
    "training.sequence_tokens=32",
    "training.num_steps=40",
    "limit=60",
    "arrival=gamma",  # bursts, in a memory that they fill
    "arrival.rate=60",
    "arrival.burstiness=0.05",
    "device.memory_bytes=24000000",
)


def carried_out(folder: Path, *words: str) -> Run:
    run_experiment(composed([*WORK, *words]), folder)
    return load(folder)


def chosen(run: Run) -> list[int]:
    """The layouts by which the job went on, in their order."""
    bodies = [json.loads(body) for body in run.plans["body"]]
    return [number for body in bodies for _, number in body.get("relaid", ())]


def test_a_job_gives_way_to_requests_and_comes_back(tmp_path: Path) -> None:
    """Fewer bytes while keys and values hold them, and more once these are gone."""
    run = carried_out(tmp_path / "run", *ELASTIC, "backend=sim")
    assert (run.requests["status"] == "finished").all() and len(run.training) == 40
    numbers = chosen(run)
    assert len(numbers) >= 2
    assert any([later > before for before, later in pairwise(numbers)])
    assert any([later < before for before, later in pairwise(numbers)])


def test_the_policy_is_pure_and_keeps_its_traits() -> None:
    """Laws 6, 8 and 9, at each question of such a run."""
    point = composed([*WORK, *ELASTIC, "backend=sim"])
    found = run_spec_of(point)
    watched = WatchedPolicy(found.policy)
    with backend_of(found, point.config["backend"]) as backend:
        engine = engine_of(replace(found, policy=watched), backend)
        engine.replay(found.work)
    assert watched.asked and any(['"relaid"' in encode(row[-1]) for row in engine.recorder.plans])


@pytest.mark.slow
def test_lockstep_and_a_log_decide_as_the_simulator(tmp_path: Path) -> None:
    """On a larger device, for which the planner would choose other layouts."""
    runs = {n: carried_out(tmp_path / n, *ELASTIC, f"backend={n}") for n in ("sim", "lockstep")}
    assert runs["sim"].plans["body"].tolist() == runs["lockstep"].plans["body"].tolist()
    again = ("policy=recorded", f"replayed={tmp_path / 'sim'}", "backend=lockstep")
    played = carried_out(tmp_path / "played", *again, "device.memory_bytes=100000000")
    assert chosen(played) == chosen(runs["sim"])
    assert played.training["loss"].tolist() == runs["lockstep"].training["loss"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["service", "wall"])
def test_losses_are_those_of_training_alone(clock: str, tmp_path: Path) -> None:
    alone = carried_out(tmp_path / "alone", "policy=protrain", "trace=none", "backend=lockstep")
    run = carried_out(tmp_path / "run", *ELASTIC, "backend=cpu", f"backend.clock={clock}")
    assert run.training["loss"].tolist() == alone.training["loss"].tolist()
    assert (run.requests["status"] == "finished").all()
