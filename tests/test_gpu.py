"""What waits for a GPU, as far as a CPU tells: the steps of `make gpu`, the wiring of claims."""

from __future__ import annotations

import argparse
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.agreement import agreement
from analysis.run import Run, load
from benchmarks import gpu_aiconfigurator, gpu_fidelity, gpu_hybrid, gpu_training
from runtime.model import build_model
from tandem import gpu
from tandem.compose import composed
from tandem.experiment import run_experiment
from tests.hand_made import TINY
from tests.short_trace import write_short
from tests.synthetic import TWO, write
from tests.test_faults import profiled


# ---- make gpu
class Calls:
    """Steps by what they write and how long they take; stands in for time and subprocess."""

    TimeoutExpired = subprocess.TimeoutExpired
    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT

    def __init__(self, **steps: tuple[str, float]) -> None:
        self.steps, self.now_s = steps, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def run(self, command: list[str], timeout: float, **_: Any) -> Any:
        path, took_s = self.steps[command[0]]
        (gpu.WORK / path).parent.mkdir(parents=True, exist_ok=True)
        (gpu.WORK / path).write_text("made")
        self.now_s += min(took_s, timeout)
        if took_s > timeout:
            raise subprocess.TimeoutExpired(command, timeout, output=b"begun\n")
        return subprocess.CompletedProcess(command, 0, stdout=b"whole\n")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of results; work lies beside it."""
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def called(monkeypatch: pytest.MonkeyPatch, *words: str, **steps: tuple[str, float]) -> int:
    """`make gpu` with these steps."""
    calls = Calls(**steps)
    monkeypatch.setattr(gpu, "_steps", lambda chosen: {name: [name] for name in steps})
    monkeypatch.setattr(gpu, "subprocess", calls)
    monkeypatch.setattr(gpu, "time", calls)
    return gpu.main(words)


def archived(out: Path) -> list[str]:
    with tarfile.open(out / "results.tar.gz") as archive:
        return sorted(m.name for m in archive.getmembers() if m.isfile())


def test_a_call_ends_in_time_and_what_it_has_is_there(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"cached": ("cache/x", 60.0), "one": ("one", 60.0), "slow": ("half", 900.0)}
    assert called(monkeypatch, "--minutes", "9", **steps, late=("late", 1.0)) == 1
    told = capsys.readouterr().out
    assert "gpu: one done, 60 s" in told and "gpu: slow failed (124), 420 s" in told
    assert "gpu: late left out, no time is left" in told and "failed: slow, late" in told
    assert archived(out) == ["gpu/half", "gpu/one"], "also of a step that was cut, no cache"
    assert sorted(path.name for path in out.iterdir()) == ["gpu.log", "results.tar.gz"]
    assert (out / "gpu.log").read_text() == "whole\nwhole\nbegun\n"


def test_a_later_call_goes_on_where_one_had_no_time(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"one": ("one", 1.0), "report": ("report/report.html", 1.0)}
    assert called(monkeypatch, "one", **steps) == 0 and archived(out) == ["gpu/one"]
    assert called(monkeypatch, "report", **steps) == 0
    assert archived(out) == ["gpu/one", "gpu/report/report.html"]
    assert (out / "report.html").read_text() == "made"
    with pytest.raises(SystemExit):
        called(monkeypatch, "no_such_step", **steps)


def test_the_steps_are_there() -> None:
    chosen = argparse.Namespace(model="m", device="d", limit="3")
    for command in gpu._steps(chosen).values():
        module = command[2].replace(".", "/")
        assert command[2] == "pytest" or (gpu.ROOT / f"{module}.py").is_file()


# ---- fidelity
@pytest.fixture
def pair(tmp_path: Path) -> tuple[Run, Run]:
    """A measured run and a prediction that is equal to it."""

    def told(name: str, **changes: Any) -> Run:
        run = load(write(tmp_path / name, TWO, **changes))
        memory = pd.concat([run.memory, run.memory.assign(cause="issue")])
        return replace(run, memory=memory, steps=run.steps.assign(peak_bytes=7_000))

    plan = {"memory_plan": {"reserve_bytes": 900}, "probe_ratios": {"decode": 1.01}}
    measured = told("measured", backend="cuda", provenance=plan)
    memory = measured.memory.assign(measured_bytes=100_400.0)
    config = {"device": {"reserve_bytes": 500}}
    predicted = replace(told("predicted", provenance=plan), config=config)
    return replace(measured, memory=memory), predicted


def test_equal_runs_use_nothing_of_any_bar(pair: tuple[Run, Run]) -> None:
    measured, predicted = pair
    table = gpu_fidelity.judged("x", measured, predicted, predicted).set_index("figure")
    assert set(table["used"].dropna().index) == set(gpu_fidelity.BARS)
    assert table["used"].max() == 0
    assert table.loc["probes_moved", "error"] == pytest.approx(0.01)
    assert table.loc["allocator_peak_bytes", "measured"] == 107_400  # all of the room, graphs: 400


def test_bars_are_used_by_what_differs(pair: tuple[Run, Run]) -> None:
    measured, predicted = pair
    more = replace(predicted, memory=predicted.memory.assign(kv_pages=9))
    table = gpu_fidelity.judged("x", measured, predicted, more).set_index("figure")
    assert table.loc["kv_peak_pages_replayed", "used"] == np.inf
    larger = replace(predicted, steps=predicted.steps.assign(peak_bytes=10_222))
    table = gpu_fidelity.judged("x", measured, larger, predicted).set_index("figure")
    assert table.loc["allocator_peak_bytes", "used"] == pytest.approx(1.0)
    assert np.isnan(gpu_fidelity.used(0.5, np.nan))


def test_the_fidelity_claim_runs_whole_on_a_cpu(
    tmp_path: Path, short_probes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = tmp_path / "kept"
    keep.mkdir()
    profiled(keep / "profile")
    words = ["--backend", "cpu", "--device", "cpu", "--model", "micro_llama", "--requests", "6"]
    words += ["--trace", str(write_short(tmp_path)), "--loads", "0.5", "--keep", str(keep)]
    gpu_fidelity.main([*words, "--out", "table.csv"])  # a profile by hand: nobody knows how near
    table = pd.read_csv("table.csv").set_index("figure")
    assert table.loc["kv_peak_pages_replayed", "error"] == 0
    assert table.loc[[*gpu_fidelity.FIGURES], "measured"].gt(0).all()
    measured, replayed = (load(keep / "50%" / name) for name in ("measured", "replayed"))
    assert agreement(replayed, measured).divergence is None and len(measured.plans)


# ---- training
def test_the_training_claim_runs_whole_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another system over the same tokens has the same losses; who does not fit says so."""
    monkeypatch.chdir(tmp_path)
    words = ["--backend", "cpu", "--device", "cpu", "--model", "micro_llama"]
    words += ["--budget", "6000000", "--host", "400000000", "--sequences", "2", "--tokens", "16"]
    words += ["--steps", "3", "--policies", "zero3_offload", "train_on_device"]
    assert gpu_training.main([*words, "--keep", "kept", "--out", "table.csv"]) == 0
    table = pd.read_csv("table.csv").set_index("system")
    ours, beside = table.loc["zero3_offload"], table.loc["plain loop"]
    assert ours["last_loss"] == pytest.approx(beside["last_loss"], rel=1e-3)
    assert 0 < ours["peak_bytes"] <= 6_000_000 and ours["to_device_share"] > 0
    assert ours["predicted_step_s"] > 0 and ours["tokens_per_s"] == pytest.approx(
        32 / ours["step_s"], rel=1e-6
    )
    assert table.loc["train_on_device", "note"].startswith("does not fit")
    measured = load(Path("kept") / "zero3_offload" / "measured")
    assert measured.is_measured and len(measured.training) == 3
    assert capsys.readouterr().out.endswith("systems 0 pass\n")


def test_a_system_that_leaves_its_budget_or_fails_is_counted() -> None:
    fine = gpu_training.Row("x", peak_bytes=9, budget_bytes=10, first_loss=2, last_loss=1)
    assert not fine.is_wrong and replace(fine, peak_bytes=11).is_wrong
    assert replace(fine, last_loss=2).is_wrong and replace(fine, last_loss=np.nan).is_wrong
    assert replace(fine, note="does not fit: x").is_wrong
    assert not replace(fine, system=gpu_training.TOO_LARGE, note="does not fit: x").is_wrong


# ---- hybrid steps, and the tables of others
def test_hybrid_steps_are_timed_by_kind() -> None:
    found = gpu_hybrid.measured(build_model(TINY, 1), TINY, 3, 20, 8, 2, device="cpu")
    assert min(found) > 0
    assert gpu_hybrid.Hybrid(2.0, 3.0, 4.0).share == pytest.approx(0.8)


def test_measured_steps_are_held_against_the_tables_of_others(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = shared / "data" / "peers" / "aiconfigurator_h200"
    words = ["model=llama3_8b", "device=h200", "limit=6", "budget.kv_pages=2000"]
    words += [f"profile={tables}", f"cache={tmp_path / 'cache'}"]
    run_experiment(composed(words), tmp_path / "run")
    given = ["--run", str(tmp_path / "run"), "--tables", str(tables)]
    assert gpu_aiconfigurator.main(given) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "gpu_aiconfigurator 100.0 % 60 pass", "steps priced by the tables themselves"
    run = load(tmp_path / "run")
    took_ns = run.steps["end_ns"] - run.steps["start_ns"]
    slower = replace(run, steps=run.steps.assign(end_ns=run.steps["end_ns"] + took_ns))
    table = gpu_aiconfigurator.priced(slower, tables)
    assert float(table.loc["all launches", "total"]) == pytest.approx(-0.5, abs=1e-3)


@pytest.mark.parametrize("claim", [gpu_fidelity.main, gpu_aiconfigurator.main, gpu_training.main])
def test_without_a_gpu_the_claims_say_so(
    claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    empty: Sequence[str] = []
    assert claim(empty) == 0
    assert capsys.readouterr().out.startswith("skipped: no ")
