"""What a command leaves behind: folders of runs, also of failed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.results.schema import OPTIONAL, TABLES
from policies.training.out_of_memory import DoesNotFit
from tandem.cli.__main__ import main
from tandem.cli.errors import RunFailed
from tandem.wiring.folder import run_folder, write_status

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def runs(root: Path) -> list[Path]:
    """Folders of runs, in the order of their names."""
    return sorted(path.parent for path in root.rglob("status.json"))


def test_a_run_writes_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    [folder] = runs(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == str(folder.relative_to(tmp_path))
    names = {path.name for path in folder.iterdir()}
    tables = {f"{name}.parquet" for name in TABLES if name not in OPTIONAL}
    others = {"config.yaml", "provenance.json", "metrics.json"}
    assert names == tables | others | {"status.json", "hashes.json"}
    sealed = json.loads((folder / "hashes.json").read_text())
    assert sealed.keys() == tables | others, "the status changes until the end"
    provenance = json.loads((folder / "provenance.json").read_text())
    for key in ("commit", "dirty", "versions", "host", "backend", "seed", "trace_hash", "depth"):
        assert key in provenance
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["num_finished"] == 4 and metrics["cost_form"] == "roofline"


def test_one_seed_gives_equal_bytes_twice(tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["run", *SMALL, "arrival=poisson"]) == 0
    first, second = runs(tmp_path)
    for path in first.glob("*.parquet"):
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_a_sweep_gives_every_point_a_folder_and_outlives_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-m", *SMALL, "depth=1,0,2"]) == 2
    assert "at least 1" in capsys.readouterr().err
    states = {f.name: json.loads((f / "status.json").read_text())["status"] for f in runs(tmp_path)}
    assert states == {"0": "ok", "1": "rejected", "2": "ok"}


def test_a_failed_run_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "scheduling").mkdir(parents=True)
    (tmp_path / "conf" / "scheduling" / "broken.yaml").write_text("_target_: broken.Broken\n")
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def batch(self, view):\n        raise RuntimeError('out of ideas')\n"
    )
    assert main(["run", "--config-dir", "conf", "scheduling=broken", *SMALL]) == 1
    told = capsys.readouterr().err.strip()
    assert "out of ideas" in told
    assert len(told.splitlines()) == 1
    [folder] = runs(tmp_path)
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed"
    assert "broken.py" in status["traceback"]


def test_a_run_that_does_not_fit_says_what_plan_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why, and the least budget that would do; a sweep does not look for that."""
    job = ["trace=none", "training=random", "model=micro_llama", "training.sequence_tokens=32"]
    job += ["policy=zero3_offload", "budget.host_bytes=1000000"]
    assert main(["plan", "--no-largest", *job]) == 1
    why, least = capsys.readouterr().out.splitlines()
    assert why.startswith("does not fit: host:0") and least.startswith("fits from: budget.host_")
    for words in (["backend=cpu"], ["backend=sim"], ["-m", "backend=sim"]):
        assert main(["run", *job, *words]) == 1
        *_, told = capsys.readouterr().err.splitlines()
        assert told.startswith(f"tandem: {why} (told in ")
        assert told.endswith(f"; {least}") is (words[0] != "-m")
    states = {json.loads((f / "status.json").read_text())["status"] for f in runs(tmp_path)}
    assert states == {"does_not_fit"} and len(runs(tmp_path)) == 3


def test_beside_served_requests_no_min_budget_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["policy=time_shared", "training=random", "model=micro_llama", "limit=2"]
    words += ["training.sequence_tokens=32", "budget.host_bytes=1000000"]
    assert main(["plan", "--no-largest", *words]) == 1
    assert "fits from" not in capsys.readouterr().out


def test_a_killed_run_never_looks_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with run_folder(folder) as aside:
        assert not folder.exists()
        assert json.loads((aside / "status.json").read_text())["status"] == "starting"
    assert folder.is_dir()
    assert not aside.exists()


@pytest.mark.parametrize(
    ("error", "at", "wanted", "told"),
    [
        (ValueError, "starting", "rejected", ValueError),
        (ValueError, "running", "failed", RunFailed),  # a policy's, say: no setting is wrong
        (OSError, "starting", "failed", RunFailed),
        (DoesNotFit, "running", "does_not_fit", RunFailed),
        (KeyboardInterrupt, "starting", "interrupted", KeyboardInterrupt),
        (KeyboardInterrupt, "running", "interrupted", KeyboardInterrupt),
    ],
)
def test_a_run_that_ended_badly_says_how(
    error: type[BaseException],
    at: str,
    wanted: str,
    told: type[BaseException],
    tmp_path: Path,
) -> None:
    with pytest.raises(told), run_folder(tmp_path / "run") as aside:
        write_status(aside, at)
        raise error("out of it")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == wanted and "out of it" in status["traceback"]


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requests.parquet").write_text("precious")
    with pytest.raises(ValueError, match="never overwritten"), run_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "requests.parquet").read_text() == "precious"
