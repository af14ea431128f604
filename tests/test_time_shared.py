"""Training in turn with serving on one device, carried out: it loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.run import Run, load
from tandem.compose import composed
from tandem.experiment import run_experiment

JOB = ("training=random", "model=micro_llama", "training.sequence_tokens=16")
JOB += ("training.num_steps=3",)


def carried_out(folder: Path, *words: str) -> Run:
    run_experiment(composed([*JOB, *words]), folder)
    return load(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return carried_out(folder, "policy=zero3_offload", "trace=none", "backend=lockstep")


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    "backend", [("lockstep",), ("cpu",), ("cpu", "backend.clock=wall")], ids="-".join
)
def test_training_beside_serving_is_training_alone(
    backend: tuple[str, ...], alone: Run, tmp_path: Path
) -> None:
    name, *words = backend
    run = carried_out(tmp_path / "run", "policy=time_shared", "limit=4", f"backend={name}", *words)
    assert len(alone.training) == 3
    assert run.training["loss"].tolist() == alone.training["loss"].tolist()
    assert (run.requests["status"] == "finished").all() and len(run.requests) == 4
