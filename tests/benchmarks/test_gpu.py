"""The steps of `make gpu` and the wiring of GPU claims, as far as a CPU can test them."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.agreement import agreement
from analysis.run import Run, load
from benchmarks import gpu_parts as gpu
from benchmarks.gpu import (
    gpu_aiconfigurator,
    gpu_decode_floor,
    gpu_fidelity,
    gpu_hybrid,
    gpu_sharing,
    gpu_training,
)
from runtime.serving.model import build_model
from tandem.config.compose import composed
from tandem.fidelity import protocol
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import spec_of
from tests.laws.test_faults import profiled
from tests.support.hand_made import TINY
from tests.support.short_trace import write_short
from tests.support.synthetic import TWO, write

pytestmark = pytest.mark.ci

TRAINED = "model=gpt2_shape model.num_layers=40"  # the model of benchmarks/gpu/gpu_training.py


# ---- make gpu
def script(text: str, **more: Any) -> gpu.GpuStep:
    """A step of some lines of Python, in the folder of work."""
    lines = ["import pathlib, sys, time", f"work = pathlib.Path({str(gpu.WORK)!r})", text]
    return gpu.GpuStep([sys.executable, "-c", "\n".join(lines)], 1.0, **more)


def writes(path: str) -> gpu.GpuStep:
    return script(
        f"path = work / {path!r}; path.parent.mkdir(parents=True, exist_ok=True)\n"
        "path.write_text('made'); print('whole')"
    )


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of results; work lies beside it."""
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu, "MIN_STEP_S", 0.1)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def called(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, dict[str, gpu.GpuStep]], *words: str
) -> int:
    """`make gpu` with these steps."""
    monkeypatch.setattr(gpu, "parts_of", lambda chosen: parts)
    return gpu.main(words)


def archived(out: Path) -> list[str]:
    with tarfile.open(out / "results.tar.gz") as archive:
        return sorted(m.name for m in archive.getmembers() if m.isfile())


def test_a_part_ends_in_time_and_its_results_are_collected(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of a killed step is kept; the next part has time of its own."""
    slow = script(
        "import subprocess\n(work / 'half').write_text('')\nprint('begun')\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    parts = {
        "first": {"cached": writes("cache/x"), "one": writes("one"), "slow": slow},
        "second": {"late": writes("late")},
    }
    parts["first"]["never"] = writes("never")
    assert called(monkeypatch, parts, "--minutes", "0.03") == 1
    told = capsys.readouterr().out
    assert "gpu: first 4.0 (cached 1.0, one 1.0, slow 1.0, never 1.0)" in told
    assert "gpu: one done, 0 s" in told and "gpu: slow failed (124), " in told
    assert "gpu: never left out, no time is left" in told and "failed: slow, never" in told
    assert archived(out) == ["gpu/half", "gpu/late", "gpu/one"], "of the cut step too, no cache"
    assert sorted(path.name for path in out.iterdir()) == ["gpu.log", "results.tar.gz"]
    assert (out / "gpu.log").read_text() == "whole\nwhole\nbegun\nwhole\n"


def test_a_terminated_call_keeps_its_results(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"one": {"one": writes("one"), "slow": script("print('begun'); time.sleep(60)")}}
    killer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    killer.start()
    with pytest.raises(SystemExit, match="143"):
        called(monkeypatch, parts)
    assert archived(out) == ["gpu/one"] and (out / "gpu.log").read_text() == "whole\nbegun\n"


def test_a_later_call_resumes_an_earlier_one(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"one": {"one": writes("one"), "report": writes("report/report.html")}}
    assert called(monkeypatch, parts, "one") == 0
    assert archived(out) == ["gpu/one", "gpu/report/report.html"], "a part, all of it"
    shutil.rmtree(gpu.WORK)
    assert called(monkeypatch, parts, "report") == 0 and archived(out) == ["gpu/report/report.html"]
    assert (out / "report.html").read_text() == "made"
    with pytest.raises(SystemExit):
        called(monkeypatch, parts, "no_such_step")


def test_missing_libraries_are_named_before_a_step_runs(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PACKED", (*gpu.PACKED, "no_such_library"))
    assert called(monkeypatch, {}) == 1 and not out.exists()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "no no_such_library here; run `make gpu-site`" in told


def parts(*words: str) -> gpu.Parts:
    named = dict(model="m", device="d", limit="3", dry_run="--dry-run" in words)
    return gpu.parts_of(argparse.Namespace(**named))


def test_important_parts_come_first_and_each_part_fits_a_call() -> None:
    found = parts()
    assert [*found] == ["tests", "fidelity", "decode_floor", "hybrid", "training", "sharing"]
    assert {part: [*steps] for part, steps in found.items()} == {
        part: [*steps] for part, steps in parts("--dry-run").items()
    }
    for part, steps in found.items():
        assert 0 < sum(step.minutes for step in steps.values()) <= gpu.MINUTES, part
    assert found["training"]["training"].environment == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
    }, "it has a pool of memory per stream"
    assert pytest.approx(spec_of(composed(TRAINED.split())).parameters, rel=0.05) == gpu.TRAINED


def test_the_steps_are_there() -> None:
    for steps in (*parts().values(), *parts("--dry-run").values()):
        for step in steps.values():
            found = gpu.ROOT / step.command[2].replace(".", "/")
            files = found.with_suffix(".py"), found / "__main__.py"
            assert step.command[2] == "pytest" or any(path.is_file() for path in files)


def test_tests_of_a_gpu_are_all_named_and_no_warning_ends_them() -> None:
    """Other test files need libraries that may be missing; other versions have other warnings."""
    folder = gpu.ROOT / "tests"
    marked = {
        str(path.relative_to(gpu.ROOT))
        for path in folder.rglob("test_*.py")
        if re.search(r"^(gpu = |@)pytest\.mark\.gpu|^@gpu$", path.read_text(), re.MULTILINE)
    }
    assert {*gpu.TESTS} == marked
    for step in parts()["tests"].values():
        at = step.command.index("-W")
        assert step.command[at + 1] == "default" and "--timeout=150" in step.command


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


@pytest.mark.slow
def test_the_fidelity_claim_runs_whole_on_a_cpu(
    tmp_path: Path, short_probes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = tmp_path / "kept"
    keep.mkdir()
    profiled(keep / "profile")
    words = ["--backend", "cpu", "--device", "cpu", "--model", "micro_llama", "--requests", "6"]
    words += ["--trace", str(write_short(tmp_path)), "--loads", "0.5", "--keep", str(keep)]
    cut = keep / "50%" / "measured.running"  # a call that was killed
    cut.mkdir(parents=True)
    (keep / "capacity").mkdir()
    (keep / "capacity" / "status.json").write_text('{"status": "failed"}')
    gpu_fidelity.main([*words, "--out", "table.csv"])  # a synthetic profile: errors are arbitrary
    assert not cut.exists()
    table = pd.read_csv("table.csv").set_index("figure")
    assert table.loc["kv_peak_pages_replayed", "error"] == 0
    assert table.loc[[*gpu_fidelity.FIGURES], "measured"].gt(0).all()
    measured, replayed = (load(keep / "50%" / name) for name in ("measured", "replayed"))
    assert agreement(replayed, measured).divergence is None and len(measured.plans)
    began_ns = (keep / "50%" / "measured" / "status.json").stat().st_mtime_ns
    gpu_fidelity.main([*words, "--out", "again.csv"])
    assert (keep / "50%" / "measured" / "status.json").stat().st_mtime_ns == began_ns
    assert Path("again.csv").read_text() == Path("table.csv").read_text(), "nothing is done twice"


def test_a_run_of_other_settings_is_replaced_only_on_request(tmp_path: Path) -> None:
    folder, words = tmp_path / "run", ["limit=2", "model=micro_llama", f"cache={tmp_path}"]
    first = protocol.run(words, folder)
    assert protocol.run(words, folder).provenance == first.provenance
    with pytest.raises(ValueError, match="of other settings, code, yaml, trace or profile"):
        protocol.run([*words, "seed=3"], folder)
    other = protocol.run([*words, "seed=3"], folder, replaces=True)
    assert other.provenance["seed"] == 3 == load(folder).provenance["seed"]


# ---- sharing
def test_the_sharing_claim_runs_whole_on_a_cpu(
    tmp_path: Path, short_probes: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ["--backend", "cpu", "--device", "cpu", "--model", "micro_llama", "--requests", "6"]
    words += ["--tokens", "24", "--rates", "20", "60", "--kv-bytes", "60000000", "--delay-s", "1"]
    words += ["--host-bytes", "200000000"]
    assert gpu_sharing.main([*words, "--keep", "kept", "--out", "table.csv"]) == 0
    table = pd.read_csv("table.csv").set_index(["policy", "load"])
    assert len(table) == 7 and table["note"].isna().all()
    assert table[["trained_per_s", "training_s", "predicted_trained_per_s"]].gt(0).all(axis=None)
    assert table["device_peak_bytes"].le(table["memory_bytes"]).all()
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "gpu_sharing_wrong 0 runs 0 pass"
    assert re.fullmatch(r"alchemist: [\d.]+ times as fast behind records, TTFT .*%", told[-2])
    none = gpu_sharing.GpuSharingRow("x", "y", trained_per_s=0.0, device_peak_bytes=1.0)
    assert none.is_wrong and replace(none, trained_per_s=2.0, memory_bytes=0.5).is_wrong
    assert not replace(none, trained_per_s=2.0, memory_bytes=1.5).is_wrong


# ---- training
@pytest.mark.slow
def test_the_training_claim_runs_whole_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another system on equal tokens has equal losses; a system that does not fit is noted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_training, "LINK_BYTES", 1 << 20)
    words = ["--backend", "cpu", "--device", "cpu", "--model", "micro_llama"]
    words += ["--budget", "6000000", "--host", "400000000", "--sequences", "2", "--tokens", "16"]
    words += ["--steps", "3", "--policies", "zero3_offload", "train_on_device"]
    cut = Path("kept") / "zero3_offload" / "measured.running"  # a call that was killed
    cut.mkdir(parents=True)
    assert gpu_training.main([*words, "--keep", "kept", "--out", "table.csv"]) == 0
    assert not cut.exists()
    monkeypatch.setattr(gpu_training, "run_experiment", None)
    monkeypatch.setattr(gpu_training, "plain_loop", None)
    assert gpu_training.main([*words, "--keep", "kept", "--out", "again.csv"]) == 0
    assert Path("again.csv").read_text() == Path("table.csv").read_text(), "nothing is done twice"
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


def test_whatever_fails_beside_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a library of another version, or no NCCL."""
    words = "--backend cpu --device cpu --model micro_llama --budget 6000000 --host 400000000"
    monkeypatch.setattr(gpu_training, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_training, "plain_loop", lambda *_: [].no_such_name)
    noted = list[gpu_training.GpuTrainingRow]()
    monkeypatch.setattr(gpu_training, "say", lambda text: None)
    monkeypatch.setattr(
        gpu_training, "kept", lambda _, name, make: noted.append(make()) or noted[-1]
    )
    monkeypatch.setattr(gpu_training, "keep", lambda *_: None)
    assert gpu_training.main([*words.split(), "--policies"]) == 0
    assert noted[0].note.startswith("failed: AttributeError") and not noted[0].is_wrong


def test_what_the_allocator_reserved_and_how_often_it_had_to_try_again_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What copies free is not computing's: each stream has a pool."""
    stats = {"allocated_bytes.all.peak": 7, "reserved_bytes.all.peak": 9, "num_alloc_retries": 2}
    monkeypatch.setattr("torch.cuda.memory_stats", lambda: stats)
    row = gpu_training.with_peaks(gpu_training.GpuTrainingRow("x"))
    assert (row.peak_bytes, row.reserved_peak_bytes, row.retries) == (7, 9, 2)


def test_a_system_that_leaves_its_budget_or_fails_is_counted() -> None:
    fine = gpu_training.GpuTrainingRow(
        "x", peak_bytes=9, budget_bytes=10, first_loss=2, last_loss=1
    )
    assert not fine.is_wrong and replace(fine, peak_bytes=11).is_wrong
    assert replace(fine, last_loss=2).is_wrong and replace(fine, last_loss=np.nan).is_wrong
    assert replace(fine, note="does not fit: x").is_wrong
    assert not replace(fine, system=gpu_training.TOO_LARGE, note="does not fit: x").is_wrong


# ---- the decode step
def test_torchs_attention_may_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes last, and earlier measurements are kept."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no backend for it")

    monkeypatch.setattr(gpu_decode_floor, "step_ms", fail)
    assert gpu_decode_floor.main(["--device", "cpu"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2] == "sdpa: did not run (RuntimeError: no backend for it)"
    assert told[-1] == "gpu_decode_floor 0.0 % 60 tried", "a CPU gives no verdict"


# ---- hybrid steps, and the tables of AIConfigurator
def test_hybrid_steps_are_timed_by_kind() -> None:
    found = gpu_hybrid.measured(build_model(TINY, 1), TINY, 3, 20, 8, 2, device="cpu")
    assert min(found) > 0
    assert gpu_hybrid.Hybrid(2.0, 3.0, 4.0).share == pytest.approx(0.8)


@pytest.mark.slow
def test_measured_steps_are_compared_with_aiconfigurators_tables(
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
def test_without_a_gpu_the_claims_are_skipped(
    claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    empty: Sequence[str] = []
    assert claim(empty) == 0
    assert capsys.readouterr().out.startswith("skipped: no ")
