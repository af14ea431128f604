"""Ray and submitit as engines of a sweep: their options, their failures, and leftover processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.__main__ import main
from tandem.cli.errors import RunFailed
from tandem.sweeps.engines import on_ray, on_slurm
from tandem.sweeps.grid import grid_of
from tandem.sweeps.point import PointTask, points_in, task_of
from tandem.wiring.folder import status_of
from tests.support.fake_engines import FakeRay, FakeSubmitit, FakeTaskError

GRID = ["model=micro_llama", "limit=4", "seed=0,1,2"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def sweep(monkeypatch: pytest.MonkeyPatch, engine: str, fake: Any, *words: str) -> int:
    monkeypatch.setitem(sys.modules, engine, fake)
    return main(["sweep", *GRID, "--engine", engine, "--jobs", "2", "--out", "out", *words])


@pytest.mark.parametrize("engine", ["ray", "submitit"])
def test_every_point_is_run(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay() if engine == "ray" else FakeSubmitit()
    assert sweep(monkeypatch, engine, fake) == 0
    assert [status_of(Path("out") / key) for key in points_in(Path("out"))] == ["ok"] * 3


@pytest.mark.broad(4)
@pytest.mark.parametrize(
    ("engine", "option", "chosen"),
    [
        ("submitit", "timeout_min=60", {"timeout_min": 60}),
        ("submitit", "slurm_time=1:00:00", {"timeout_min": 1440, "slurm_time": "1:00:00"}),
        ("submitit", "mem_gb=1.5", {"timeout_min": 1440, "mem_gb": 1.5}),
        ("ray", "max_retries=7", {"max_retries": 7}),
        ("ray", "num_cpus=2", {"max_retries": 2, "num_cpus": 2}),
    ],
)
def test_options_reach_the_engine(
    engine: str, option: str, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = FakeRay() if engine == "ray" else FakeSubmitit()
    assert sweep(monkeypatch, engine, fake, "--option", option) == 0
    assert (fake.chosen if engine == "ray" else fake.options) == chosen


@pytest.mark.parametrize(
    ("engine", "option", "wanted"),
    [
        ("submitit", "partition=a", "submitit does not take it (NameError: Parameter 'partition'"),
        ("submitit", "timeout_min=long", "submitit does not take it (AssertionError: Parameter"),
        ("ray", "cpus=1", "ray does not take it (ValueError: Invalid option keyword cpus"),
        ("ray", "num_cpus=one", "ray does not take it (TypeError: The type of keyword"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    engine: str,
    option: str,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake: Any = FakeRay() if engine == "ray" else FakeSubmitit()
    assert sweep(monkeypatch, engine, fake, "--option", option) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert wanted in told[-1] and told[-1].startswith("tandem: --option")
    assert not list(Path("out").glob("*/status.json"))


def tasks_in(root: Path) -> list[PointTask]:
    return [task_of(point, root) for point in grid_of(GRID).points()]


def test_jobs_of_an_interrupted_sweep_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSubmitit(hangs=True)
    assert sweep(monkeypatch, "submitit", fake) == 130
    assert len(fake.jobs) == 2 and all(job.cancelled for job in fake.jobs)
    quiet = FakeSubmitit()
    monkeypatch.setitem(sys.modules, "submitit", quiet)
    assert len(list(on_slurm(tasks_in(tmp_path / "whole"), 2, {}))) == 3
    assert not any(job.cancelled for job in quiet.jobs), "they had ended"


def test_tasks_of_an_interrupted_sweep_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(hangs=True)
    assert sweep(monkeypatch, "ray", fake) == 130
    assert len(fake.cancelled) == 3 and not fake.is_up


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (FakeTaskError(KeyError("rate")), "Ray: KeyError: 'rate'"),
        (OSError("The worker died."), "Ray: OSError: The worker died., 3 times"),
    ],
)
def test_only_lost_workers_were_tried_several_times(
    fails: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(monkeypatch, "ray", FakeRay(fails=fails)) == 1
    found = [json.loads(path.read_text()) for path in Path("out").glob("*/status.json")]
    assert [status["error"].endswith(told) for status in found] == [True] * 3


def test_a_slurm_that_takes_no_job_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, "submitit", FakeSubmitit(refuses=True)) == 1
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.endswith("no job was taken (RuntimeError: sbatch: error: invalid partition "
                         "specified: no)")  # fmt: skip


def test_a_ray_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(broken="The current node timed out during startup.\nMore lines follow.")
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(RunFailed, match=r"did not start \(Exception: The current node timed out"):
        next(on_ray([], 2, {}))


@pytest.mark.parametrize(("engine", "extra"), [("ray", "ray"), ("submitit", "slurm")])
def test_an_engine_that_is_missing_says_how_to_get_it(
    engine: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(monkeypatch, engine, None) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"pip install -e '.[{extra}]'" in told  # not from an index: tandem there is another's


# ---- the real ones, where they are installed (`make claims` has an environment with both)
def test_the_real_submitit_refuses_options_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    for option in ({"queue": "a"}, {"timeout_min": "long"}, {"slurm_no": 1}):
        with pytest.raises(ValueError, match="submitit does not take it"):
            next(on_slurm(tasks_in(tmp_path), 2, option))


def test_the_real_ray_refuses_options_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for option in ({"cpus": 1}, {"num_cpus": "one"}):
        with pytest.raises(ValueError, match="ray does not take it"):
            next(on_ray(tasks_in(tmp_path), 2, option))


def test_a_cancelled_job_of_the_real_submitit_leaves_no_running_folder(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    grid = ["model=micro_llama", "backend=lockstep", "seed=0"]  # of seconds, so that it is caught
    [task] = [task_of(point, tmp_path) for point in grid_of(grid).points()]
    aside = task.folder.with_name(f"{task.folder.name}.running")

    def interrupted(job: Any) -> None:
        until = time.monotonic() + 60
        while not (aside / "status.json").is_file() and time.monotonic() < until:
            time.sleep(0.02)
        raise KeyboardInterrupt

    import submitit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submitit.LocalJob, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(on_slurm([task], 1, {}))
    assert not aside.exists()
    assert json.loads((task.folder / "status.json").read_text())["status"] == "interrupted"
