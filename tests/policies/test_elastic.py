"""Training under keys and values that breathe: chunks leave for them and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.run import Run, load
from policies.kv.paged_restart import PagedRestart
from policies.sharing.elastic import ElasticMemory
from policies.training.all_on_device import AllOnDevice
from policies.training.patrickstar import PatrickStar
from tandem.cli.__main__ import main
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment

JOB = ("model=micro_llama", "training=random", "training.sequence_tokens=16")
JOB += ("training.num_steps=3",)
TRAINED = ("patrickstar", "zero3_offload", "fsdp2_offload", "demand_paging")


def carried_out(folder: Path, *words: str) -> Run:
    run_experiment(composed([*JOB, *words]), folder)
    return load(folder)


def test_a_policy_that_evicts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AllOnDevice evicts nothing .* or divide the memory"):
        ElasticMemory(PagedRestart(), AllOnDevice())  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_at_most_the_whole(share: float) -> None:
    with pytest.raises(ValueError, match="host_share"):
        ElasticMemory(PagedRestart(), PatrickStar(), share)


@pytest.mark.parametrize("training", TRAINED)
def test_requests_take_what_training_can_evict(training: str, tmp_path: Path) -> None:
    """In the simulator, where the device has room for the longest request and little more."""
    planner = "fixed_chunks" if training == "patrickstar" else "unit_chunks"
    words = (
        "policy=elastic",
        f"memory@memory.training={training}",
        f"planner={planner}",
        "limit=12",
    )
    run = carried_out(tmp_path / "run", *words, "arrival=all_at_once", "budget.fraction=0.045")
    assert (run.requests["status"] == "finished").all() and len(run.training) == 3
    evicted = run.steps["lane"].str.contains("gpu->host")
    assert evicted.any()


@pytest.mark.slow
def test_kept_pages_give_way_to_training(tmp_path: Path) -> None:
    """Turns of a dialogue find what earlier ones have left, the fewer the less memory there is."""
    words = ("policy=elastic", "memory.serving.prefix_caching=true", "trace=sessions", "limit=150")
    words += ("trace.think_s=0.001", "training.num_steps=200")
    found = dict[str, float]()
    for fraction in ("0.06", "1.0"):
        more = (f"budget.fraction={fraction}", "backend=sim")
        run = carried_out(tmp_path / fraction, *words, *more)
        assert (run.requests["status"] == "finished").all() and len(run.training) == 200
        found[fraction] = run.requests["cached_tokens"].sum()
    assert 0 < found["0.06"] < found["1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAINED[:2])
@pytest.mark.parametrize(
    "backend", [("lockstep",), ("cpu",), ("cpu", "backend.clock=wall")], ids="-".join
)
def test_training_under_keys_and_values_is_training_alone(
    backend: tuple[str, ...], training: str, tmp_path: Path
) -> None:
    planner = "fixed_chunks" if training == "patrickstar" else "unit_chunks"
    name, *words = backend
    alone = carried_out(tmp_path / "alone", f"policy={training}", "trace=none", "backend=lockstep")
    both = ("policy=elastic", f"memory@memory.training={training}", f"planner={planner}", "limit=8")
    run = carried_out(tmp_path / "run", *both, f"backend={name}", *words)
    assert run.training["loss"].tolist() == alone.training["loss"].tolist()
    assert (run.requests["status"] == "finished").all() and len(run.requests) == 8


@pytest.mark.slow
def test_lockstep_decides_as_the_simulator(tmp_path: Path) -> None:
    words = ("policy=elastic", "limit=12", "arrival=all_at_once", "budget.fraction=0.045")
    logs = [
        carried_out(tmp_path / name, *words, f"backend={name}").plans["body"].tolist()
        for name in ("sim", "lockstep")
    ]
    assert logs[0] == logs[1]


def test_a_host_share_that_is_too_small_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words: list[Any] = ["policy=elastic", *JOB, "limit=4", "memory.host_share=0.000001"]
    words += ["budget.fraction=0.045"]
    assert main(["run", *words]) == 1
    assert "memory.host_share" in capsys.readouterr().err
