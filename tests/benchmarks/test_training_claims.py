"""The claims on training: their figures, and that wrong figures fail them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.fidelity import launch_peaks, training_fidelity, training_recipes
from benchmarks.fidelity.launch_peaks import Watched, watched
from benchmarks.fidelity.training_cases import check_unseen
from benchmarks.fidelity.training_fidelity import CASES, COLUMNS, STILL
from benchmarks.scale.largest_model import Size, judged, row
from runtime.measure.shapes import Microbatch
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tests.training.trainings import SMALL

MIB = 2**20
TINY = Size(64, 6 * MIB, 16 * MIB, 3, ("zero3_offload",))


def look(*words: str) -> Watched:
    return watched(composed([*SMALL, *STILL, "backend=lockstep", *words]))


@pytest.mark.broad(2)
@pytest.mark.parametrize("modes", ["keep", "recompute", "offload"])
def test_launches_take_their_booked_bytes(modes: str) -> None:
    found = look("policy=train_lru", f"planner.modes={modes}", "budget.device_bytes=900000")
    assert found.is_exact
    assert set(found.launches["work"]) >= {"forward", "backward"}
    assert ("again" in set(found.launches["work"])) == (modes == "recompute")
    assert found.transient_errors.abs().quantile(0.9) < 0.05


def test_wrong_books_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = launch_peaks._predicted
    monkeypatch.setattr(launch_peaks, "_predicted", lambda op: int(1.2 * predicted(op)))
    found = look("policy=zero3_offload")
    assert found.transient_errors.abs().quantile(0.9) > 0.1
    lost = found.memory.assign(measured_bytes=found.memory["measured_bytes"] + 10_000)
    assert not found._replace(memory=lost).is_exact
    with pytest.raises(AssertionError, match="rows read: gpu"):
        unread = found.memory["measured_bytes"].mask(found.memory["tier"].eq("gpu"))
        assert found._replace(memory=found.memory.assign(measured_bytes=unread)).is_exact


def test_no_judged_microbatch_is_calibrated() -> None:
    check_unseen([*CASES, *training_recipes.CASES])
    with pytest.raises(AssertionError):
        check_unseen([replace(CASES[0], shape=Microbatch(4, 64))])


def test_a_bar_of_nothing_allows_nothing() -> None:
    rows = [("a", "step_s", 1.0, -0.04, 0.2, 0.05), ("a", "pace", 1.0, 0.3, 0.3, np.nan)]
    rows += [("a", "steady_reruns", 5.0, 0.0, np.nan, 0.0)]
    table = training_fidelity.judged(pd.DataFrame(rows, columns=COLUMNS))
    assert table["used"].max() == pytest.approx(0.8)
    few = pd.DataFrame([("a", "steady_reruns", 4.0, -0.2, np.nan, 0.0)], columns=COLUMNS)
    assert training_fidelity.judged(few)["used"].max() == np.inf


@pytest.mark.slow
def test_the_largest_model_trains_as_planned_and_the_next_is_refused(tmp_path: Path) -> None:
    found = row(TINY, "zero3_offload", Path("null"), tmp_path)
    assert found.wrong in ("", "loss"), "three steps on random words may end anywhere"
    assert found.layers > 1 and found.num_steps == 3
    assert 0 < found.measured_bytes < found.peak_bytes == found.predicted_peak_bytes <= 6 * MIB
    folder = tmp_path / f"zero3_offload-{found.layers}"
    other = composed(
        [*TINY.settings("zero3_offload"), "backend=sim", "training.sequence_tokens=96"]
    )
    wrong = judged(
        replace(TINY, num_steps=4, arena_bytes=1000), "zero3_offload", found.layers,
        plan_run(other, 1), folder, ("", ""),
    ).wrong  # fmt: skip
    assert "3 steps, " in wrong and wrong.endswith("beyond the arena, peak, refusal")
