"""What waits for a GPU, as far as a CPU tells: the steps of `make gpu`, the wiring of claims."""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.run import Run, load
from benchmarks import gpu_aiconfigurator, gpu_fidelity, gpu_hybrid
from engine.planlog import read_plans
from runtime.model import build_model
from tandem import gpu
from tandem.compose import composed
from tandem.experiment import run_experiment
from tests.hand_made import TINY
from tests.short_trace import write_short
from tests.synthetic import TWO, write
from tests.test_faults import profiled


# ---- make gpu
@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of results; work lies beside it."""
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def steps(monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Steps that are these lines of Python."""
    head = f"from pathlib import Path; work = Path({str(gpu.WORK)!r}); "
    commands = {name: [sys.executable, "-c", head + body] for name, body in bodies.items()}
    monkeypatch.setattr(gpu, "_steps", lambda chosen: commands)


def archived(out: Path) -> list[str]:
    with tarfile.open(out / "results.tar.gz") as archive:
        return sorted(m.name for m in archive.getmembers() if m.isfile())


def test_a_call_ends_in_time_and_what_it_has_is_there(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = "(work / 'cache').mkdir(parents=True); (work / 'cache' / 'x').touch(); "
    slow = "(work / 'half').touch(); print('begun', flush=True); __import__('time').sleep(60)"
    steps(monkeypatch, one=f"{made}(work / 'one').touch()", slow=slow, late="print('late')")
    assert gpu.main(["--minutes", "0.04"]) == 1
    told = capsys.readouterr().out
    assert "gpu: one done" in told and "gpu: slow failed (124)" in told
    assert "gpu: late left out, no time is left" in told and "failed: slow, late" in told
    assert archived(out) == ["gpu/half", "gpu/one"], "also of a step that was cut, no cache"
    assert sorted(path.name for path in out.iterdir()) == ["gpu.log", "results.tar.gz"]
    assert (out / "gpu.log").read_text() == "begun\n"


def test_a_later_call_goes_on_where_one_had_no_time(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = "(work / 'report').mkdir(); (work / 'report' / 'report.html').write_text('page')"
    steps(monkeypatch, one="work.mkdir(); (work / 'one').touch()", report=report)
    assert gpu.main(["one"]) == 0
    assert gpu.main(["report"]) == 0
    assert archived(out) == ["gpu/one", "gpu/report/report.html"]
    assert (out / "report.html").read_text() == "page"
    with pytest.raises(SystemExit):
        gpu.main(["no_such_step"])


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
    logs = (read_plans(keep / "50%" / n / "plans.parquet") for n in ("measured", "replayed"))
    measured, replayed = ([plan.body for plan in log] for log in logs)
    assert measured == replayed and measured


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


@pytest.mark.parametrize("claim", [gpu_fidelity.main, gpu_aiconfigurator.main])
def test_without_a_gpu_the_claims_say_so(
    claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    empty: Sequence[str] = []
    assert claim(empty) == 0
    assert capsys.readouterr().out.startswith("skipped: no ")
