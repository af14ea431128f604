"""What was written is what is read: hashes of tables, profiles and plan logs, faults in them."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.run import load
from benchmarks.correctness.bit_flips import QUICK, RIGHT, outcomes
from engine.contract.job import Job
from engine.results.plan_log import decode, read_plans
from engine.results.schema import OPTIONAL, TABLES, read_table, write_tables
from tandem.cli.__main__ import main
from tandem.cli.compare import replay_of
from tandem.cli.errors import Usage
from traces import files
from traces.files import NAME, atomically, checked_bytes, is_sealed, naming, seal, write_text

ROOT = Path(__file__).resolve().parents[2]
KEPT = [name for name in TABLES if name not in OPTIONAL]
SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    files._warn_of.cache_clear()
    yield


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1, told
    return told


def ran(folder: str = "run", *words: str) -> Path:
    """A small run."""
    assert main(["run", *SMALL, f"hydra.run.dir={folder}", *words]) == 0
    return Path(folder)


def flip(path: Path, at: int = -20) -> None:
    """Changes one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_of_some_flips_none_gives_other_figures_in_silence(tmp_path: Path) -> None:
    found = outcomes(tmp_path, QUICK, seed=1)
    assert {outcome for _, outcome in found} == {*RIGHT}, found
    readers = {"collect", "kernels", "load", "playback", "profile", "vidur"}
    assert {reader for reader, _ in found} == readers
    assert sum(found.values()) >= QUICK


@pytest.mark.slow
def test_a_flip_that_nothing_checks_would_be_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_hash", lambda content: "all the same")
    found = outcomes(tmp_path, 8, seed=1)
    assert {outcome for _, outcome in found} - {*RIGHT}


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", [*KEPT, "config", "provenance", "metrics"])
def test_a_file_that_was_changed_is_refused_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = ran()
    [path] = run.glob(f"{name}.*")
    flip(path)
    capsys.readouterr()
    if name != "metrics":
        assert main(["report", "run"]) == 2
        assert f"{path.resolve()} is damaged, or was changed" in line(capsys)
    if name not in TABLES:
        assert main(["collect", "."]) == 0
        assert "1 runs (1 damaged)" in capsys.readouterr().out
        assert f"left out: {path} is damaged" in caplog.text
    if name == "plans":
        assert main(["run", *SMALL, "policy=recorded", "replayed=run"]) == 2
        assert "plans.parquet is damaged, or was changed" in line(capsys)


def test_changed_samples_of_a_finetuning_job_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["policy=coserve", "training=finetune", "training.sequence_tokens=64"]
    run = ran("run", *words, "training.data.mean_tokens=32", "training.num_steps=2")
    flip(run / "samples.parquet")
    capsys.readouterr()
    assert main(["report", "run"]) == 2
    assert f"{(run / 'samples.parquet').resolve()} is damaged" in line(capsys)


def test_a_table_without_a_hash_is_read_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = ran()
    before = load(run)
    (run / NAME).unlink()
    with caplog.at_level(logging.WARNING):
        after = load(run)
        assert before.steps.equals(after.steps)
    assert [f"{run.resolve()} keeps no {NAME}" in record.message for record in caplog.records] == [
        True
    ]
    caplog.clear()
    main(["collect", "."])
    [record] = caplog.records
    assert "1 of 1 runs keep no hashes of their files" in record.message


def test_a_file_that_a_sealed_folder_does_not_name_is_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    seal(tmp_path, "a")
    write_text(tmp_path / "b", "two")
    assert checked_bytes(tmp_path / "a") == b"one" and is_sealed(tmp_path)
    with pytest.raises(ValueError, match=r"b: .*hashes\.json has no hash of it"):
        checked_bytes(tmp_path / "b")
    for content in ("{", "[]", "\ud800", "[" * 100_000):
        (tmp_path / NAME).write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(ValueError, match=r"hashes\.json is damaged"):
            checked_bytes(tmp_path / "a")


def test_a_hash_is_taken_once_for_each_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(tmp_path, {"a": pa.table({"x": [1, 2]}), "b": pa.table({"x": [3]})})
    taken, hashed = list[int](), files._hash
    monkeypatch.setattr(files, "_hash", lambda content: [taken.append(1), hashed(content)][1])
    assert read_table(tmp_path / "a.parquet", ["x"])["x"].to_pylist() == [1, 2]
    assert len(taken) == 1


# ---- foreign profiles
def vidurs(path: Path) -> Path:
    """Tables as Vidur keeps them, all times a tenth of a millisecond."""
    from sim.foreign.vidur import BY_SHAPE, NORMS, ONCE

    flat = {f"{name}_ms": np.full(64, 0.1) for name in (*ONCE, *NORMS, BY_SHAPE[0])}
    np.savez(path, **flat, **{f"{name}_ms": np.full((8, 200), 0.1) for name in BY_SHAPE[1:]})
    return path


def test_a_foreign_profile_is_held_against_its_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = vidurs(tmp_path / "mine.npz")
    words = [f"profile={path}", "cache=kept"]
    about = json.loads((ran("run", *words) / "provenance.json").read_text())
    assert len(about["profile_hash"]) == 64
    ran("again", *words)
    flip(path)
    capsys.readouterr()
    assert main(["run", *SMALL, *words]) == 2
    told = line(capsys)
    assert f"{path} is not the file that was imported first" in told
    [kept] = Path("kept/profiles").iterdir()
    assert told.endswith(f"remove {kept.resolve()}")


def test_a_cache_that_cannot_be_written_keeps_the_hash_in_the_provenance_alone(
    tmp_path: Path,
) -> None:
    path = vidurs(tmp_path / "mine.npz")
    Path("kept").write_text("a file, and no folder")
    run = ran("run", f"profile={path}", "cache=kept")
    assert "profile_hash" in json.loads((run / "provenance.json").read_text())
    assert json.loads((ran("other") / "provenance.json").read_text())["profile_hash"] is None


def test_a_replay_on_another_profile_than_the_predictions_is_refused(tmp_path: Path) -> None:
    path = vidurs(tmp_path / "mine.npz")
    run = load(ran("run", f"profile={path}", "cache=kept"))
    vidurs(path)  # other bytes: an archive has times
    flip(path, 12)
    with pytest.raises(Usage, match=r"mine\.npz is not what run was predicted with"):
        replay_of(run, run, tmp_path / "replay")


# ---- plan logs
GOOD = '{"ops":[],"restart":[],"refuse":[]}'
PLACE = "[1,1,0,0,0,0]"


@pytest.mark.parametrize(
    "body",
    [
        "garbage",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        GOOD.replace('"ops":[]', '"ops":3'),
        GOOD.replace('"ops":[]', '"ops":[["jump",1]]'),
        GOOD.replace('"ops":[]', '"ops":[[]]'),
        GOOD.replace('"ops":[]', '"ops":[["free",[1]]]'),
        GOOD.replace('"ops":[]', '"ops":[["free",[1,"x",0,0,0,0]]]'),
        GOOD.replace('"ops":[]', f'"ops":[["grow",{PLACE},"1",0,1]]'),
        GOOD.replace('"ops":[]', '"ops":[["compute",0,0,false,[[1,"x",0]],[],[]]]'),
        GOOD.replace('"restart":[]', '"restart":["x"]'),
        GOOD.replace('"restart":[]', '"restart":[[1]]'),
        GOOD.replace("}", ',"repeats":"x"}'),
        GOOD.replace("}", ',"later":[1]}'),
    ],
)
def test_a_plan_log_of_garbage_is_told_with_file_and_step(
    body: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("log").mkdir()
    rows = {"step": [0, 7], "device": [0, 0], "at_ns": [0, 1], "returned": [[], []]}
    table = pa.table({**rows, "body": [GOOD, body]})
    pq.write_table(table, "log/plans.parquet")
    assert main(["run", *SMALL, "policy=recorded", "replayed=log"]) == 2
    [told] = [t for t in capsys.readouterr().err.splitlines() if "keeps no hashes" not in t]
    assert "plans.parquet, step 7: the row holds no plan" in told and len(told) < 400


def test_a_plan_log_without_its_columns_and_of_another_trace_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ran()
    assert main(["run", "model=micro_llama", "limit=2", "policy=recorded", "replayed=run"]) == 2
    assert "plans.parquet, plan 0: job 2 is none of this run" in line(capsys)
    ran("again", "policy=recorded", "replayed=run")
    write_tables(run, {"plans": pa.table({"step": [1]})})
    assert main(["run", *SMALL, "policy=recorded", "replayed=run"]) == 2
    assert "plans.parquet" in line(capsys)


def test_what_a_run_logs_is_a_log() -> None:
    """Also without its hashes: every row of a run that serves and trains is looked at."""
    run = ran("run", "policy=time_shared", "training=random", "training.sequence_tokens=32")
    sealed = read_plans(run / "plans.parquet")
    (run / NAME).unlink()
    assert read_plans(run / "plans.parquet") == sealed
    jobs = {job_id: Job(job_id, 0) for logged in sealed for job_id in logged.job_ids}
    assert all(decode(logged.body, jobs) for logged in sealed)


# ---- a full disk
FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from tandem.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_with_its_path(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", FULL, "run", *SMALL, "hydra.run.dir=run"],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 1
    [told] = done.stderr.strip().splitlines()
    assert ".parquet" in told and "File too large" in told
    left = [path.name for path in tmp_path.rglob("*.parquet*")]
    assert not any(name.endswith(".tmp") for name in left)
    with pytest.raises(ValueError, match="did not finish"):
        load(tmp_path / "run")


def test_an_error_without_a_path_gets_the_one_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(OSError, match="No space left") as caught, atomically(path) as aside:
        aside.write_text("half")
        raise OSError(errno.ENOSPC, "Error writing bytes to file")
    assert caught.value.filename == str(path) and not list(tmp_path.iterdir())
    other: Any = OSError(errno.EACCES, "no", "elsewhere")
    with pytest.raises(OSError, match="elsewhere") as caught, naming(path):
        raise other
    assert caught.value is other
