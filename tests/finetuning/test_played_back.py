"""Measured runs that finetune, played back: the simulator does what their plan logs say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.run import load
from engine.results.schema import read_table
from tandem.cli.compare import replay_of
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tests.finetuning.test_co_serving_runs import SMALL
from tests.finetuning.test_feedback_runs import WORDS
from tests.finetuning.test_record_runs import STALE
from tests.finetuning.test_record_runs import WORDS as RECORDS

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_probes")]


def operations(folder: Path) -> list[list[Any]]:
    """By plan, what it does; frees are written where the engine gave memory back itself."""
    rows = read_table(folder / "plans.parquet").to_pylist()
    whole = [[*json.loads(row["grows"]), *json.loads(row["body"])["ops"]] for row in rows]
    return [[op for op in ops if op[0] != "free"] for ops in whole]


@pytest.mark.parametrize("words", [WORDS, RECORDS, STALE], ids=["recompute", "records", "stale"])
def test_a_measured_run_is_played_back(words: Sequence[str], tmp_path: Path) -> None:
    """Its samples have come in an order of their own, which the log is played back with."""
    run_experiment(composed([*words, "backend=cpu"]), tmp_path / "measured")
    run_experiment(composed([*words]), tmp_path / "predicted")
    measured, predicted = load(tmp_path / "measured"), load(tmp_path / "predicted")
    replay_of(predicted, measured, tmp_path / "replayed", [], [])
    logs = [operations(tmp_path / name) for name in ("measured", "replayed")]
    assert logs[0] == logs[1]
    samples = read_table(tmp_path / "measured/samples.parquet").to_pylist()
    assert {row["status"] for row in samples} == {"finished"}
    assert all(row["released_ns"] <= row["start_ns"] for row in samples)


@pytest.mark.parametrize("policy", ["coserve_slo", "llm_station"])
def test_a_measured_log_of_durations_is_played_back(policy: str, tmp_path: Path) -> None:
    """Policies that plan by durations: what these were is in the log alone."""
    small = [word for word in SMALL if not word.startswith(("policy", "scheduling"))]
    words = [*small, f"policy={policy}", "scheduling.slo_s=0.02"]
    run_experiment(composed([*words, "backend=cpu"]), tmp_path / "measured")
    run_experiment(composed(words), tmp_path / "predicted")
    measured, predicted = load(tmp_path / "measured"), load(tmp_path / "predicted")
    replay_of(predicted, measured, tmp_path / "replayed", [], [])
    logs = [operations(tmp_path / name) for name in ("measured", "replayed")]
    assert logs[0] == logs[1]
    for run in (measured, load(tmp_path / "replayed")):
        assert (run.requests["status"] == "finished").all()
