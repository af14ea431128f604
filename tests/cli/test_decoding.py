"""Settings of sampling and of what ends a request reach every backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.run import Run, load
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tests.support.short_trace import write_short

pytestmark = pytest.mark.usefixtures("short_probes")
SMALL = ("model=micro_llama", "limit=3", "arrival=all_at_once", "trace=file")


def run(folder: Path, *settings: str) -> Run:
    trace = f"trace.path={write_short(folder.parent)}"
    run_experiment(composed([*SMALL, trace, *settings]), folder)
    return load(folder)


def test_seeded_sampling_repeats_itself_and_differs_from_greedy(tmp_path: Path) -> None:
    warm = ("backend=cpu", "sampling.temperature=1.0")
    runs = [run(tmp_path / "a", *warm), run(tmp_path / "b", *warm, "policy=continuous_restart")]
    greedy = run(tmp_path / "greedy", "backend=cpu")
    ids = [[list(row) for row in r.requests["output_ids"]] for r in (*runs, greedy)]
    assert ids[0] == ids[1], "a draw depends on the batch"
    assert ids[0] != ids[2]


def test_a_sampled_end_of_sequence_ends_requests_early(tmp_path: Path) -> None:
    forced = run(tmp_path / "forced", "backend=cpu")
    row = list(forced.requests["output_ids"].iloc[0])
    ends = int(row[len(row) // 2])
    settings = ("backend=cpu", "lengths=sampled", f"eos_ids=[{ends}]", "depth=1")
    sampled = run(tmp_path / "sampled", *settings)
    assert sampled.requests["output_tokens"].iloc[0] <= row.index(ends) + 1
    assert (sampled.requests["output_tokens"] <= forced.requests["output_tokens"]).all()


def test_lengths_that_cannot_be_sampled_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eos_ids"):
        run(tmp_path / "a", "lengths=sampled", "depth=1")
    with pytest.raises(ValueError, match="no token of"):
        run(tmp_path / "b", "lengths=sampled", "depth=1", "eos_ids=[999999]")
    with pytest.raises(ValueError, match="set depth=1"):
        run(tmp_path / "c", "lengths=sampled", "eos_ids=[5]")
    with pytest.raises(ValueError, match="forced or sampled"):
        run(tmp_path / "d", "lengths=guessed")
