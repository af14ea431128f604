"""A run that trains and serves nothing: its screen, its report, its comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.compare import check_same_work, compare
from analysis.metric_names import KINDS, PARTS
from analysis.pages.report import as_dict, write_report, write_run_report
from analysis.pages.training_tables import compared_training
from analysis.run import Run, load
from analysis.verdicts import headline, table
from tandem.cli.terminal import brief, told
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.folder import provenance_in

pytestmark = pytest.mark.ci

WORDS = ("trace=none", "training=random", "model=micro_llama", "policy=zero3_offload")
WORDS += ("training.sequence_tokens=16", "training.num_steps=3", "budget.device_bytes=3000000")
OF_SERVING = ("num_", "request", "ttft", "kv_usage", "restarts", "output_", "goodput")


def trained(folder: Path, *words: str) -> tuple[Run, dict[str, float]]:
    metrics = run_experiment(composed([*WORDS, *words]), folder)
    return load(folder), metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    root = tmp_path_factory.mktemp("runs")
    backends = ("sim", "lockstep")
    sim, lockstep = (trained(root / name, f"backend={name}")[0] for name in backends)
    return sim, lockstep


def test_metrics_of_a_training_run_are_those_of_training(tmp_path: Path) -> None:
    run, metrics = trained(tmp_path / "run", "backend=sim")
    kept = [name for name in metrics if name != "num_plans" and name.startswith(OF_SERVING)]
    assert not kept and metrics["train_steps"] == metrics["train_steps_asked"] == 3
    for pool in ("gpu0", "host0"):
        parts = sum(metrics.get(f"fullest_{pool}_{part}_bytes", 0) for part in PARTS)
        assert parts == metrics[f"peak_{pool}_used_bytes"]
        assert 0 < metrics[f"mean_{pool}_used_bytes"] < parts
    held = metrics["mean_gpu0_used_bytes"] - metrics["mean_gpu0_pending_bytes"]
    assert held == pytest.approx(sum(metrics.get(f"mean_gpu0_{kind}_bytes", 0) for kind in KINDS))
    provenance = provenance_in(run.folder)
    assert provenance["kv_pages"] is provenance["memory_plan"] is None
    assert provenance["capacity_bytes"]["gpu:0"] == 3_000_000
    assert told(metrics, provenance).startswith("sim (roofline): 3 of 3 steps trained\ntraining: ")
    assert brief(metrics).startswith("3 of 3 steps, ")


def test_the_report_of_a_training_run_shows_training_alone(
    runs: tuple[Run, Run], tmp_path: Path, unrendered: None
) -> None:
    page = write_run_report(runs[1], tmp_path / "report")
    found = {path.stem for path in (tmp_path / "report" / "figures").glob("*.csv")}
    assert found == {"training", "memory", "lanes"}
    assert "3 of 3" in page.read_text() and "finished requests" not in page.read_text()


def test_a_comparison_tells_of_steps_and_losses(
    runs: tuple[Run, Run], tmp_path: Path, unrendered: None
) -> None:
    sim, lockstep = runs
    for prediction, wanted in (
        (sim, "a simulation computes none"),
        (lockstep, "3 steps are equal"),
    ):
        found = compare(prediction, lockstep)
        for said in (headline(found), table(found), compared_training(found).note):
            assert wanted in said
        assert "throughput" not in headline(found) and "after the first" in headline(found)
        assert "tokens/s after the first" in table(found)
        rows = table(found).rpartition("\n\n")[0].splitlines()  # the verdict ends the table
        steps = [row.partition("  ")[0] for row in rows if "step" in row[:27]]
        assert steps == ["mean step after the first", "first step, which warms up"]
        assert all(len(line) <= 80 for line in table(found).splitlines())
        assert len(as_dict(found)["training"]) == 3
    assert write_report(found, tmp_path / "report").is_file()
    other = lockstep.training.assign(loss=lockstep.training["loss"] + [0, 1e-9, 0])
    assert "differ in 1 of 3" in headline(compare(lockstep, replace(lockstep, training=other)))
    with pytest.raises(ValueError, match="train different jobs: 1 steps are in one only"):
        check_same_work(sim, replace(lockstep, training=other[:2]))


def test_a_job_that_ends_with_the_last_request_may_get_further_in_one_run(
    runs: tuple[Run, Run],
) -> None:
    """Its first steps must be in both, of equal sizes."""
    ends = {"training": {"until_served": True}}
    sim, lockstep = [replace(run, config=run.config | ends) for run in runs]
    check_same_work(sim, replace(lockstep, training=lockstep.training[:2]))
    with pytest.raises(ValueError, match="train different jobs: 1 steps are in one only"):
        check_same_work(sim, replace(lockstep, training=lockstep.training[1:]))
    larger = lockstep.training[:2].assign(tokens=1)
    with pytest.raises(ValueError, match=r"has [0-9]+ tokens in one, 1 in the other"):
        check_same_work(sim, replace(lockstep, training=larger))
