"""Figures of a run that learns from feedback: records, and what launches waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.metrics import summary
from analysis.pages.training_tables import training_table
from analysis.run import Run, load
from analysis.training import record_summary, stall_shares
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_probes")]

WORDS = (
    *("policy=alchemist", "training=feedback", "training.publish=a0", "adapters.count=1"),
    *("model=micro_llama", "trace=random", "trace.requests=40", "trace.input_tokens=200"),
    *("trace.output_tokens=60", "arrival=poisson", "arrival.rate=300"),
    *("training.sequence_tokens=512", "training.data.delay_s=0.05", "training.data.chance=0.8"),
    *("training.microbatches=4", "scheduling.record=all", "budget.kv_pages=420", "backend=sim"),
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("learned") / "run"
    run_experiment(composed(WORDS), folder)
    return load(folder)


def test_a_record_that_was_lost_with_its_sample_is_no_hit(learned: Run) -> None:
    found = record_summary(learned)
    rows = pd.read_parquet(learned.folder / "records.parquet")
    is_hit = rows["status"].eq("used")
    assert rows["status"].eq("lost").any() and is_hit.any(), "the run has both"
    assert found["record_hit_rate"] == pytest.approx(is_hit.mean())
    assert found["reused_tokens"] == rows.loc[is_hit, "used_tokens"].sum()
    assert found["record_wasted_bytes"] == rows.loc[~is_hit, "kept_bytes"].sum()
    ages_s = (rows["used_ns"] - rows["made_ns"])[is_hit].astype(float) / 1e9
    assert found["mean_record_age_s"] == pytest.approx(ages_s.mean())


def test_the_time_of_the_host_is_no_wait_of_a_launch(tmp_path: Path) -> None:
    """What the lane of a measured run waits, counted by hand."""
    words = [word for word in WORDS if not word.startswith(("trace.requests", "backend"))]
    run_experiment(composed([*words, "trace.requests=8", "backend=cpu"]), tmp_path / "run")
    rows = (run := load(tmp_path / "run")).steps
    host_ns = rows.groupby("step")["host_ns"].transform("sum")
    own = rows[rows["lane"].eq("compute")].sort_values("start_ns")
    before_ns = np.concatenate([[-1], own["end_ns"].to_numpy()[:-1]])

    def waited(ready: pd.Series) -> float:
        waits = own["start_ns"].to_numpy() - np.maximum(ready.to_numpy(), before_ns)
        span_ns = own["end_ns"].max() - own["start_ns"].min()
        return float(waits.clip(min=0).sum() / span_ns)

    found = sum(stall_shares(run).values())
    assert found == pytest.approx(waited(own["issue_ns"] + host_ns[own.index]))
    assert found < waited(own["issue_ns"]), "of what the lane rests a part is the host's"


def test_the_page_tells_of_samples_and_records(learned: Run) -> None:
    metrics = summary(learned)
    rows = {row[0].text: row[1].text for row in training_table(metrics).rows}
    assert rows["samples that are through"] == f"{metrics['finetune_samples']:,}"
    assert int(rows["samples begun anew, for requests to have their memory"].replace(",", "")) > 0
    assert rows["records that a sample has used"].endswith(" %")
    assert float(rows["steps per second"]) == pytest.approx(
        1 / float(metrics["mean_train_step_s"]), rel=1e-3
    )
    assert "of that for no sample" in rows and rows["updates that they were behind, mean"] == "0"
    assert rows["age of records when they were used, mean"].endswith("s")


@pytest.mark.parametrize("fused", [True, False])
def test_windows_beside_prompts_are_no_misses_of_the_prefix_cache(
    fused: bool, tmp_path: Path
) -> None:
    """No request began anew here, so the share is that of all prompts."""
    words = ("policy=coserve", "training=finetune", "training.sequence_tokens=256", "limit=20")
    more = ("training.data.mean_tokens=128", "trace=sessions", "model=micro_llama")
    cached = ("memory.serving.prefix_caching=true", f"memory.fused={str(fused).lower()}")
    run_experiment(composed([*words, *more, *cached]), tmp_path / "run")
    run = load(tmp_path / "run")
    rows = run.requests
    assert not rows["restarts"].any() and rows["cached_tokens"].sum() > 0
    share = rows["cached_tokens"].sum() / rows["prompt_tokens"].sum()
    assert summary(run)["prefix_hit_rate"] == pytest.approx(share)
