"""The verbs that measure: cpu runs beside their simulation, an outsider's policy, calibration."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.run import Run, load
from analysis.workspace import workspace_figures
from tandem.cli.__main__ import main
from tests.support.short_trace import PRESSED, SHORT, write_short

ROOT = Path(__file__).resolve().parents[2]
README, EXAMPLE = ROOT / "README.md", ROOT / "examples" / "shortest_prompt_first"
SMALL = ["model=micro_llama", "limit=6", "arrival=all_at_once", *SHORT]


@pytest.fixture(autouse=True)
def _elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_probes: None, unrendered: None
) -> None:
    monkeypatch.chdir(tmp_path)
    write_short(tmp_path)
    torch.set_num_threads(1)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip().splitlines()[-1]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The folder of a run of the command line."""
    assert main(["run", *SMALL, *words]) == 0
    return last_line(capsys)


def test_a_users_policy_is_simulated_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    mine = ["--config-dir", str(EXAMPLE / "conf"), "scheduling=shortest", "scheduling.max_jobs=1"]
    predicted, measured = (load(run(capsys, *mine, f"backend={b}")) for b in ("sim", "cpu"))
    for outcome in (predicted, measured):
        # the first two are taken before any other can be compared: depth is two
        order = outcome.requests.sort_values("scheduled_ns")["prompt_tokens"].tolist()
        assert order == sorted(order)
    assert predicted.plans["body"].tolist() == measured.plans["body"].tolist()


def test_the_outsiders_policy_is_short() -> None:
    source = (EXAMPLE / "shortest.py").read_text().splitlines()
    assert len(source) < 60
    assert len(list(EXAMPLE.rglob("*.yaml"))) == 1


def test_the_readmes_policy_is_the_example_and_runs_as_it_stands() -> None:
    """All but its docstrings and the future import, so that what a reader pastes has its names."""
    found = re.findall(r"```(python|yaml)\n(.*?)```", README.read_text(), re.DOTALL)
    blocks = dict(reversed(found))  # the first of each kind
    [yaml] = EXAMPLE.rglob("*.yaml")
    kept = [line for line in yaml.read_text().splitlines() if not line.startswith("#")]
    assert blocks["python"].startswith("# shortest.py\n")
    assert blocks["yaml"].splitlines()[1:] == kept
    assert bare(blocks["python"]) == bare((EXAMPLE / "shortest.py").read_text())


def bare(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    tree.body = [n for n in tree.body if getattr(n, "module", None) != "__future__"]
    return ast.dump(tree)


@pytest.mark.broad(2)
@pytest.mark.parametrize("clock", ["service", "wall"])
def test_compare_replays_what_was_measured(
    clock: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pressed = [PRESSED, "policy=chunked_swap", "limit=12"]
    predicted = run(capsys, *pressed, "backend=sim")
    real = ["backend=cpu", f"backend.clock={clock}", "backend.workspace_every=5"]
    measured = run(capsys, *pressed, *real)
    assert main(["compare", measured, predicted, "--out", "report"]) == 0
    assert last_line(capsys).endswith("report/report.html")
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {
        "report.html",
        "timeline.json.gz",
        "prediction.vllm.json",
        "measurement.vllm.json",
    } <= names
    replay, measurement = load(tmp_path / "report-replay"), load(measured)
    replayed, measured_memory = booked(replay), booked(measurement)
    pd.testing.assert_frame_equal(replayed, measured_memory)
    assert replayed["kv_pages"].max() > 13  # of 16: there was pressure
    assert replay.requests["swaps"].sum() == measurement.requests["swaps"].sum() > 0
    memory = pd.read_csv(tmp_path / "report" / "memory.csv").set_index(["pool", "kind", "stat"])
    own = workspace_figures(measurement, 0.0)  # as the run itself predicts its launches
    assert own["workspace_launches"] == -(-int(measurement.steps["lane"].eq("compute").sum()) // 5)
    peaks = [own[f"workspace_{name}_bytes"] for name in ("predicted", "measured")]
    found = memory.loc[("gpu:0", "workspace", "peak"), ["prediction", "measurement"]]
    assert found.tolist() == peaks and own["workspace_p90_error"] < 0.05
    assert memory.loc[("gpu:0", "process", "peak"), "measurement"] > 0


def test_one_run_has_a_report_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", run(capsys), "--out", "report"]) == 0
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report.html", "timeline.json.gz", "run.vllm.json"} <= names


def booked(run: Run) -> pd.DataFrame:
    """Bytes and pages after each booking."""
    columns = ["step", "tier", "kv_pages", "kv_bytes", "weight_bytes"]
    return run.memory[run.memory["cause"].eq("issue")][columns].reset_index(drop=True)


def test_backends_differ_in_nothing_but_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    backends = ("sim", "lockstep", "cpu")
    settings = [load(run(capsys, f"backend={b}", "limit=1")).config for b in backends]
    for config in settings:
        del config["backend"]
    assert settings[0] == settings[1] == settings[2]
