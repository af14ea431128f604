"""Calibrating training: from microbatches through the whole engine to a profile that predicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.fit.errors import ALL
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tandem.wiring import profile
from tandem.wiring.backends import with_reference
from tandem.wiring.profile import calibrate_training

SMALL = ("model=micro_llama", "training=random", "training.sequence_tokens=64", "backend=sim")


@pytest.mark.slow
def test_a_profile_of_the_simulator_predicts_what_its_roofline_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the rows that were measured a roofline's shares bend, by less than 1 % over a
    doubling; what is predicted is another depth, policy and microbatch."""
    monkeypatch.setattr(profile, "HELD", 2)
    table = calibrate_training(composed(SMALL), tmp_path / "profile")
    assert table.loc[ALL, "mape"] < 0.01
    assert {"layer again", "layer backward", "update cpu", "update compute"} <= set(table.index)
    other = [*SMALL, "trace=none", "policy=zero3_offload", "model.num_layers=5"]
    other += ["training.sequences=2", "training.sequence_tokens=40"]
    predicted = plan_run(composed([*other, f"profile={tmp_path / 'profile'}"]))
    assert predicted.run_spec.cost.form == "table"
    assert predicted.step_s == pytest.approx(plan_run(composed(other)).step_s, rel=0.02)
    with pytest.raises(ValueError, match="there is something in it already"):
        calibrate_training(composed(SMALL), tmp_path / "profile")


@pytest.mark.slow
def test_a_profile_of_adapters_knows_what_whole_units_take_on_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters themselves are copied in less time than any link's latency."""
    monkeypatch.setattr(profile, "HELD", 2)
    small = (*SMALL, "training/recipe=lora")
    calibrate_training(composed(small), tmp_path / "profile")
    other = [*small, "trace=none", "policy=fsdp2_offload", "planner.modes=offload"]
    other += ["training.sequences=2", "training.sequence_tokens=40"]
    predicted = plan_run(composed([*other, f"profile={tmp_path / 'profile'}"]))
    assert predicted.step_s == pytest.approx(plan_run(composed(other)).step_s, rel=0.02)


def test_a_clock_of_reference_works_is_kept_by_all_shapes() -> None:
    """Found once, before the first of them is measured."""
    point = with_reference(composed([*SMALL, "backend=cpu"]).config, (7, 9))
    made = replace(composed([*SMALL, "backend=cpu"]), config=point)
    shaped = profile._shaped(made, 2, 32, *profile.STACKS[0])
    assert shaped.config["backend"]["reference_ns"] == [7, 9]
    assert shaped.config["training"]["sequence_tokens"] == 32


def test_calibration_without_a_training_job_is_refused(tmp_path: Path) -> None:
    point = composed(["backend=sim"])
    with pytest.raises(ValueError, match="nothing to train: choose a job with training="):
        calibrate_training(point, tmp_path / "profile")
