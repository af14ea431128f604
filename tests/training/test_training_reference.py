"""The reference works of training: fixed, of two kinds, and chosen where nothing is served."""

from __future__ import annotations

import pytest
import torch

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.regions import Work
from models.spec import ModelSpec
from runtime.measure.reference import (
    WINDOW,
    TimedWork,
    TrainingClockPace,
    settled_ns,
    training_references,
)
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.run_spec import run_spec_of
from tests.training.trainings import SMALL
from traces.training.recipe import Recipe

SPEC = ModelSpec("tiny", "llama", 2, 64, 2, 2, 32, 128, 256, 512, dtype="float32")
Works = tuple[TimedWork, TimedWork]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def works(request: pytest.FixtureRequest) -> Works:
    return training_references(SPEC, Recipe(dtype=request.param))


def test_a_unit_gives_the_same_gradients_whenever_it_runs(works: Works) -> None:
    unit, _ = works
    first, again = unit.work(), unit.work()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # type: ignore
    assert len(first) > 5 and all(g.abs().sum() > 0 for g in first)  # type: ignore


def test_both_works_take_time_and_the_update_stays_finite(works: Works) -> None:
    assert min(settled_ns(works, rounds=3)) > 0
    _, update = works
    assert all(torch.isfinite(weight).all() for weight in update._weights)  # type: ignore


def test_launches_are_paced_by_the_unit_and_updates_by_the_update(works: Works) -> None:
    pace = TrainingClockPace((1000, 1000), works)
    for _ in range(WINDOW):
        pace._decode.note(2000)
        pace._prompt.note(1250)
    job = Job(0, 0)
    assert pace.factor == pace.factor_of(()) == 0.5
    assert pace.factor_of([Slice(job, 8, Work.BACKWARD)]) == 0.5
    assert pace.factor_of([Slice(job, 1, Work.UPDATE)]) == 0.8


def test_a_run_that_only_trains_has_its_own_pace() -> None:
    words = [*SMALL, "policy=zero3_offload", "backend=cpu"]
    point = composed([*words, "backend.reference_ns=[1000000,1000000]"])
    with backend_of(run_spec_of(point), point.config["backend"]) as world:
        assert isinstance(world.executor._pace, TrainingClockPace)  # type: ignore[attr-defined]
