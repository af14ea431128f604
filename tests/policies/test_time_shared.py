"""Training in turn with serving on one device, carried out: it loses nothing, and law 11 holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.run import Run, load
from engine.contract.regions import Tier
from tandem.cli.__main__ import main
from tandem.cli.plan_choice import searched
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import run_spec_of
from tests.training.test_training_replays import booked, copies

BOTH = ("policy=time_shared", "limit=4")
JOB = ("training=random", "model=micro_llama", "training.sequence_tokens=16")
JOB += ("training.num_steps=3",)


def carried_out(folder: Path, *words: str) -> Run:
    run_experiment(composed([*JOB, *words]), folder)
    return load(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return carried_out(folder, "policy=zero3_offload", "trace=none", "backend=lockstep")


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [("lockstep",), ("cpu",), ("cpu", "backend.clock=wall")], ids="-".join
)
def test_training_beside_serving_is_training_alone(
    backend: tuple[str, ...], alone: Run, tmp_path: Path
) -> None:
    name, *words = backend
    run = carried_out(tmp_path / "run", *BOTH, f"backend={name}", *words)
    assert len(alone.training) == 3
    assert run.training["loss"].tolist() == alone.training["loss"].tolist()
    assert (run.requests["status"] == "finished").all() and len(run.requests) == 4


@pytest.mark.slow
def test_lockstep_decides_as_the_simulator(tmp_path: Path) -> None:
    """Serving's plans and training's, in one log."""
    logs = [
        carried_out(tmp_path / name, *BOTH, f"backend={name}").plans["body"].tolist()
        for name in ("sim", "lockstep")
    ]
    assert logs[0] == logs[1]
    assert any("update" in body for body in logs[0]) and any("kv" in body for body in logs[0])


@pytest.mark.slow
def test_a_measured_log_is_played_back(alone: Run, tmp_path: Path, short_probes: None) -> None:
    """To the same bytes, copies and losses.

    Training ends long before serving, whose plans then give its states back. Capacities differ: the
    most that steps of a log take is not known beforehand, and more is left for KV.
    """
    measured = carried_out(tmp_path / "a", *BOTH, "backend=cpu")
    replay = ("policy=recorded", "limit=4", f"replayed={tmp_path / 'a'}")
    played = carried_out(tmp_path / "b", *replay, "backend=lockstep")
    assert filled(played) == filled(measured)
    assert copies(played) == copies(measured) != []
    assert played.training["loss"].tolist() == alone.training["loss"].tolist()
    assert (played.requests["status"] == "finished").all()


def filled(run: Run) -> list[tuple[Any, ...]]:
    """Of what is booked all but the capacity."""
    return [(step, tier, *nbytes) for step, tier, _, *nbytes in booked(run)]


def test_training_that_its_share_cannot_hold_names_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["policy=time_shared", "training=random", "limit=4"]
    assert main(["run", *words, "memory.device_share=0.2"]) == 1
    told = capsys.readouterr().err
    assert "give training a larger share of it (memory.device_share, memory.host_share)" in told
    assert main(["run", *words]) == 0


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_protrain_plans_for_its_share_of_the_memory(share: float, tmp_path: Path) -> None:
    """Requests have the rest, and training stays below its share."""
    words = ["policy=time_shared_protrain", "training=random", "model=micro_llama", "limit=4"]
    words += ["training.sequence_tokens=32", "training.num_steps=3", "backend=sim"]
    point = composed([*words, f"memory.device_share={share}", "device.memory_bytes=60000000"])
    run_spec = run_spec_of(point)
    found = searched(point, run_spec)
    assert found is not None
    capacity = run_spec.room.capacity_bytes[Tier.GPU, 0]
    assert found.room.device_bytes == int(share * capacity)
    metrics = run_experiment(point, tmp_path / "run")
    assert metrics["num_finished"] == 4 and metrics["train_steps"] == 3
    rows = load(tmp_path / "run").memory
    trained = rows[["gradient_bytes", "optimizer_bytes", "activation_bytes"]].sum(axis=1)
    assert 0 < trained[rows["tier"].eq("gpu")].max() <= share * capacity


def test_a_share_of_serving_that_is_less_than_the_weights_fails_no_plan(tmp_path: Path) -> None:
    """The watermark of pages is a share of what the weights leave, and none where they leave none.

    Beside frozen weights that are counted as serving's, little or nothing is left for pages.
    """
    words = ["experiment=breathing_kv", "policy=time_shared_protrain", "training.num_steps=20"]
    metrics = run_experiment(
        composed([*words, "memory.device_share=0.7", "limit=12"]), tmp_path / "r"
    )
    assert metrics["train_steps"] == 20
    assert metrics["num_finished"] + metrics["num_refused"] == 12
