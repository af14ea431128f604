"""Sweeps: equal results on every engine, through failing points and killed workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tandem.cli.__main__ import main
from tandem.cli.collect import collect
from tandem.cli.terminal import PointTold, best, points_table
from tandem.config.compose import composed
from tandem.sweeps import workers
from tandem.sweeps.grid import grid_of
from tandem.sweeps.point import PointTask, folder_label, point_key, points_in, run_point, task_of
from tandem.wiring.folder import run_folder, sole_user, status_of, write_status

SMALL = ["model=micro_llama", "limit=4"]
TABLES = ("requests", "steps", "memory", "plans")
DEADLY = """
import os, signal
from pathlib import Path
from policies.scheduling.chunked_prefill import ChunkedPrefill

class Deadly(ChunkedPrefill):
    def batch(self, view):
        graves = Path(os.environ["GRAVES"]) / str(self.token_budget)
        died = len(list(graves.parent.glob(f"{graves.name}-*")))
        if died < self.token_budget - 100:
            Path(f"{graves}-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(view)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def sweep(out: str, *words: str) -> int:
    return main(["sweep", *SMALL, *words, "--out", out])


def folders(root: str) -> dict[tuple[str, ...], Path]:
    """Run folders by their overrides."""
    return {tuple(words): Path(root) / key for key, words in points_in(Path(root)).items()}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["arrival.rat=1,2"], "did you mean arrival.rate"),
        (["policy=chunked_restart,chunked_restrat"], "did you mean chunked_restart"),
        (["seed=1,2", "--option", "a=1"], "has no options"),
        (["seed=1,2", "--option", "a=["], "--option a=[: not YAML at line 1, column 2"),
        (["seed=1,,2"], "seed"),
        (["seed=interval(0,1)"], "seed=interval(0,1): a sweep takes a list, choice(), range()"),
        (["seed=range(0)"], "seed=range(0): there is no value in it"),
        (["seed=range(0,4,0)"], "seed=range(0,4,0): a sweep takes"),
        (["policy=glob(no_such_*)"], "policy=glob(no_such_*): there is no value in it"),
        (["seed=glob(*)"], "seed=glob(*): there is no value in it"),
        (["seed=1,2", "--jobs", "0"], "at least one"),
    ],
)
def test_a_mistake_in_the_grid_is_told_before_anything_runs(
    words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("out", *words) == 2
    assert wanted in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(Path("out").glob("*/status.json"))


def test_a_glob_takes_the_options_that_match_also_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "static_mine.yaml").touch()
    [axis] = grid_of(["policy=glob(static_*,exclude=*_swap)"], "conf").axes
    wanted = ["static_mine", "static_reservation", "static_restart"]
    assert sorted(axis.words) == [f"policy={name}" for name in wanted]
    [axis] = grid_of(["policy=glob([static_*,orca])"]).axes
    assert "policy=orca" in axis.words and "policy=static_mine" not in axis.words


def test_serial_and_parallel_sweeps_give_equal_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["policy=chunked_restart,static_swap", "arrival.rate=2,8", "record=all"]
    assert sweep("serial", *words, "--engine", "serial") == 0
    assert sweep("parallel", *words, "--jobs", "2") == 0
    told = capsys.readouterr()
    assert "4 points (policy 2 x arrival.rate 2)" in told.err
    assert "best of each metric" in told.out and "tandem report parallel" in told.out
    one, two = folders("serial"), folders("parallel")
    assert one.keys() == two.keys() and len(one) == 4
    for words_of_point, folder in one.items():
        assert folder.name == two[words_of_point].name  # the key says nothing of where it lies
        for name in (*(f"{table}.parquet" for table in TABLES), "metrics.json", "config.yaml"):
            other = two[words_of_point] / name
            assert (folder / name).read_bytes() == other.read_bytes()


def test_folders_are_named_by_what_varies_with_the_hash_behind(tmp_path: Path) -> None:
    words = ["policy=chunked_restart,orca", "arrival.rate=2,8.5", "seed=3", "--engine", "serial"]
    assert sweep("out", *words) == 0
    for own, folder in folders("out").items():
        values = dict(word.split("=") for word in own)
        label = f"policy@{values['policy']}+arrival.rate@{values['arrival.rate']}"
        assert re.fullmatch(rf"{re.escape(label)}-[0-9a-f]{{16}}", folder.name)
        assert status_of(folder) == "ok"
        [word] = [f"replayed={folder.resolve()}"]
        assert composed([word, "policy=recorded"]).config["replayed"] == str(folder.resolve())


def test_a_folders_label_is_safe_and_bounded() -> None:
    label = folder_label(
        ["trace.path=/a b/c,d.jsonl", "+x.y='{a: 1}'", "z=1e9"], {"trace.path", "x.y", "z"}
    )
    assert label == "trace.path@c_d.jsonl+x.y@_a_1_+z@1000000000"
    many = [f"some.long.key{number}=value" for number in range(40)]
    label = folder_label(many, {word.partition("=")[0] for word in many})
    assert label.startswith("some.long.key0@value+some.long.key1@value") and len(label) <= 100


def test_folders_of_earlier_names_are_found_again() -> None:
    """A hash alone, as earlier versions named them, or a label of other axes."""
    assert sweep("out", "seed=0", "depth=1,2", "--engine", "serial") == 0
    (first, one), (second, two) = folders("out").items()
    bare = one.rename(one.with_name(one.name[-16:]))
    text = Path("out/sweep.json").read_text().replace(one.name, bare.name)
    Path("out/sweep.json").write_text(text)
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*.parquet")}
    assert sweep("out", "seed=0,1", "depth=1,2", "--engine", "serial") == 0
    found = folders("out")
    assert (found[first].name, found[second].name) == (bare.name, two.name) and len(found) == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_terminal_has_a_row_per_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("out", "slo=chat", "seed=0,1", "depth=1,0", "--engine", "serial") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["seed", "depth", "tokens/s", "requests/s"]
    assert {"ttft", "tpot", "slo", "goodput"} <= set(lines[0].split())
    rows = [line.split() for line in lines[1:5]]
    assert [row[:2] for row in rows] == [["0", "1"], ["0", "0"], ["1", "1"], ["1", "0"]]
    for row, seed in ((rows[0], "seed=0"), (rows[2], "seed=1")):
        [folder] = [f for own, f in folders("out").items() if {seed, "depth=1"} <= set(own)]
        metrics = json.loads((folder / "metrics.json").read_text())
        assert row[2] == f"{metrics['output_throughput']:.4g}"
        assert f"{metrics['p99_ttft_s'] * 1e3:.2f}" in row
    assert rows[1][2] == rows[3][2] == "rejected"


def test_steps_of_training_have_columns_of_their_own() -> None:
    trained = {
        "mean_train_step_s": 0.25,
        "train_tokens_per_s": 800.0,
        "peak_gpu0_used_bytes": 2**31,
    }
    points = [
        PointTold({"depth": "1"}, "ok", trained),
        PointTold({"depth": "2"}, "does_not_fit", {}),
        PointTold({"depth": "3"}, "ok", trained),
    ]
    head, one, two, more = points_table(points, most_rows=2).splitlines()
    assert head.split() == ["depth", "train", "tok/s", "train", "step", "steps/s", "peak", "used"]
    assert one.split() == ["1", "800", "250.00", "ms", "4", "2.00", "GiB"]
    assert two.split() == ["2", "does_not_fit"] and more == "... and 1 more: see the report"


def test_a_failing_point_is_recorded_and_other_points_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sweep("out", "depth=1,0,2", "--engine", "serial") == 1
    told = capsys.readouterr()
    assert "depth=0: depth=0: it must be at least 1" in told.err
    assert (
        "2 of 3 points finished, 0 failed, 1 rejected" in told.out
        and "to go on: tandem sweep" in told.out
    )
    found = {words[-1]: status_of(folder) for words, folder in folders("out").items()}
    assert found == {"depth=1": "ok", "depth=0": "rejected", "depth=2": "ok"}


def test_a_sweep_without_a_finished_point_offers_no_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sweep("out", "depth=0,-1", "--engine", "serial") == 1
    told = capsys.readouterr().out
    assert "0 of 2 points finished" in told and "report" not in told


def test_points_that_run_again_have_their_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.sweeps import point

    assert sweep("out", "seed=0,1", "--engine", "serial") == 0
    assert sweep("out", "seed=0,1", "--engine", "serial") == 0
    assert "changed" not in capsys.readouterr().err
    monkeypatch.setattr(point, "code_version", lambda: "other code")
    assert sweep("out", "seed=0,1,2", "--engine", "serial") == 0
    assert "code, trace or yaml changed since 2 of them ran" in capsys.readouterr().err


def test_going_on_repeats_nothing_that_is_finished() -> None:
    assert sweep("out", "seed=0,1", "--engine", "serial") == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*/*.parquet")}
    assert sweep("out", "seed=0,1,2", "--engine", "serial") == 0
    assert len(folders("out")) == 3
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_what_a_killed_sweep_left_is_run_again() -> None:
    assert sweep("whole", "seed=0,1", "--engine", "serial") == 0
    points = folders("whole")
    half = Path("whole") / next(iter(points.values())).name
    half.rename(half.with_name(f"{half.name}.running"))
    (half.with_name(f"{half.name}.running") / "steps.parquet").write_bytes(b"PAR1 cut off")
    assert sweep("whole", "seed=0,1", "--engine", "serial") == 0
    assert [status_of(folder) for folder in points.values()] == ["ok", "ok"]
    assert not list(Path("whole").glob("*.running"))


def test_the_key_follows_what_the_result_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.sweeps import point

    sample = Path(str(composed([]).config["trace"]["path"]))
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        content = sample.read_bytes() + (b"x" if name == "other" else b"")
        (tmp_path / name / "t.parquet").write_bytes(content)

    def key(*words: str) -> str:
        return task_of(composed(words), tmp_path).key

    traces = {n: key("trace=file", f"trace.path={tmp_path}/{n}/t.parquet") for n in ("one", "same")}
    assert (
        traces["one"]
        == traces["same"]
        != key("trace=file", f"trace.path={tmp_path}/other/t.parquet")
    )
    for name, rest in (("path", []), ("tokenizer", ["training.data.path=/a.txt"])):
        text = ["trace=none", "training=text", *rest, f"training.data.{name}={tmp_path}"]
        one, same, other = (key(*text[:-1], f"{text[-1]}/{n}") for n in ("one", "same", "other"))
        assert one == same != other, name
    assert key() == key("cache=/elsewhere") != key("seed=1")
    before = key()
    monkeypatch.setattr(point, "code_version", lambda: "other code")
    assert key() != before


def test_the_key_follows_all_that_metrics_are_made_by() -> None:
    """What analysis.metrics imports of analysis, and what that imports."""
    import analysis
    from tandem.sweeps.point import MEASURES

    found, ahead = set[str](), ["metrics"]
    while ahead:
        found.add(name := ahead.pop())
        text = (Path(analysis.__path__[0]) / f"{name}.py").read_text(encoding="utf-8")
        assert "from analysis import" not in text, "names of modules are read off `from`"
        ahead += set(re.findall(r"^ *from analysis\.(\w+) import", text, re.MULTILINE)) - found
    assert {f"{name}.py" for name in found} == set(MEASURES)


@pytest.mark.slow
def test_results_of_earlier_code_are_no_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    from analysis.figures.sweep_points import by_x, points_of
    from tandem.cli.report import sweep_report
    from tandem.sweeps import point

    def runs() -> dict[str, int]:
        sweep_report(Path("out"), None, {})
        table = pd.read_csv("out/report/points.csv")
        rows = by_x(points_of(table), "request_throughput")
        return dict(zip(rows["series"], rows["runs"], strict=True))

    words = ["policy=chunked_restart,static_swap", "seed=0,1", "--engine", "serial"]
    assert sweep("out", *words) == 0
    before = points_in(Path("out"))
    own = point.code_version()
    monkeypatch.setattr(point, "code_version", lambda: "other code")
    assert sweep("out", *reversed(words[:2]), *words[2:]) == 0
    assert runs() == {"chunked_restart": 2, "static_swap": 2}
    status = collect(Path("out")).set_index("run")["status"]
    assert dict(status.value_counts()) == {"ok": 4, "superseded": 4}
    assert set(status.index[status.eq("superseded")]) == set(before)
    monkeypatch.setattr(point, "code_version", lambda: own)  # the old code again: its results too
    assert sweep("out", "policy=chunked_restart", *words[1:]) == 0
    status = collect(Path("out")).set_index("run")["status"]
    now = {key for key, own_words in before.items() if "policy=chunked_restart" in own_words}
    assert set(status.index[status.eq("ok")]) & set(before) == now
    assert runs() == {"chunked_restart": 2, "static_swap": 2}


def test_a_changed_policy_of_the_users_own_is_another_point(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    (tmp_path / "mine.py").write_text("a = 1\n")
    first = point_key({}, (conf,))
    (tmp_path / "mine.py").write_text("a = 20\n")
    assert point_key({}, (conf,)) != first


def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A scheduling that kills its process (token_budget - 100) times: words that choose it."""
    (tmp_path / "conf" / "scheduling").mkdir(parents=True)
    (tmp_path / "deadly.py").write_text(DEADLY)
    text = "_target_: deadly.Deadly\ntoken_budget: 100\n"
    (tmp_path / "conf" / "scheduling" / "deadly.yaml").write_text(text)
    (tmp_path / "graves").mkdir()
    monkeypatch.setenv("GRAVES", str(tmp_path / "graves"))
    return ["--config-dir", "conf", "scheduling=deadly"]


@pytest.mark.slow
def test_a_killed_workers_point_is_tried_again_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "ATTEMPTS", 2)
    words = [*deadly(tmp_path, monkeypatch), "scheduling.token_budget=100,101,110,90"]
    assert sweep("out", *words, "--jobs", "2") == 1
    found = {words[-1].partition("=")[2]: folder for words, folder in folders("out").items()}
    states = {budget: status_of(folder) for budget, folder in found.items()}
    assert states == {"100": "ok", "101": "ok", "110": "failed", "90": "ok"}
    deaths = sorted(path.name for path in (tmp_path / "graves").iterdir())
    assert deaths == ["101-0", "110-0", "110-1"]
    assert "killed by SIGKILL" in capsys.readouterr().err
    status = json.loads((found["110"] / "status.json").read_text())
    assert "SIGKILL, 2 times" in status["error"]
    assert (found["110"] / "config.yaml").is_file()
    assert not list(Path("out").glob("*.running"))


@pytest.mark.ci
@pytest.mark.broad(2)
@pytest.mark.parametrize(
    "how",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_interrupted_sweep_leaves_finished_points_and_goes_on(
    how: signal.Signals, tmp_path: Path
) -> None:
    words = ["sweep", *SMALL, "seed=range(30)", "--jobs", "1", "--out", "out"]
    # A job in the background of a shell, as CI may be, starts with Ctrl-C ignored: listen to it.
    listening = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from tandem.cli.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    child = subprocess.Popen([sys.executable, "-c", listening, *words], env=_env())
    while len({*Path("out").glob("*/metrics.json")} - {*Path("out").glob("*.running/*")}) < 3:
        assert child.poll() is None
        time.sleep(0.02)
    left = psutil.Process(child.pid).children(recursive=True)
    assert left
    child.send_signal(how)
    is_killed = how is signal.SIGKILL
    assert child.wait(timeout=60) == (-how if is_killed else 128 + how)
    while any(worker.is_running() for worker in left):
        time.sleep(0.02)
    done = [f for f in Path("out").iterdir() if status_of(f) == "ok" and f.suffix != ".running"]
    assert 3 <= len(done) < 30
    assert is_killed or Path("out/runs.parquet").is_file()
    again = next(iter(folders("out").items()))
    assert run_point(PointTask(again[1].name, composed(again[0]), again[1])).error is None


def test_two_sweeps_may_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.cli.sweep import LOCK

    with sole_user(tmp_path / "out" / LOCK, "of this test"):
        assert sweep("out", "seed=0,1") == 2
    assert "another sweep is running there" in capsys.readouterr().err


@pytest.mark.broad(2)
@pytest.mark.parametrize("other", ["seed=1,2", "seed=3", "seed=0,1 depth=1,2"])
def test_another_sweep_in_the_folder_is_refused(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("out", "seed=0,1", "--engine", "serial") == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert sweep("out", *other.split(), "--engine", "serial") == 2
    told = capsys.readouterr().err.strip()
    assert "another sweep is in it, of 2 points such as limit=4 model=micro_llama seed=0;" in told
    assert len(told.splitlines()) == 1
    after = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert after == before


def test_a_part_of_a_sweep_may_be_run_again() -> None:
    assert sweep("out", "seed=0,1", "--engine", "serial") == 0
    assert sweep("out", "seed=1", "--engine", "serial") == 0
    assert len(folders("out")) == 2


def test_the_best_point_is_told_with_those_that_tie() -> None:
    runs = [("depth=1", {"goodput": 2.0}), *((f"depth={n}", {"goodput": 3.0}) for n in (2, 3))]
    assert best(runs).splitlines()[1].endswith("3 requests/s  depth=2 (and 1 more)")
    assert best(runs[:2]).endswith("3 requests/s  depth=2")


def test_the_best_point_is_that_with_the_best_mean_over_seeds() -> None:
    """The luckiest seed is of depth=1: 9, but its mean is 5."""
    values = {"depth=1": (1.0, 9.0), "depth=2": (6.0, 7.0)}
    runs = [(name, {"p99_ttft_s": v, "goodput": v}) for name, own in values.items() for v in own]
    first, goodput, ttft = best(runs, ", means over seeds").splitlines()
    assert first == "best of each metric, means over seeds:"
    assert goodput.split() == ["goodput", "6.5", "requests/s", "depth=2"]
    assert ttft.split() == ["p99", "TTFT", "5.000", "s", "depth=1"]


def test_a_sweep_over_seeds_and_settings_offers_a_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sweep("out", "seed=0,1", "depth=1,2", "--engine", "serial") == 0
    told = capsys.readouterr().out
    assert "best of each metric, means over seeds:" in told
    assert "\ncompare:  tandem compare out\n" in told
    rows = told.split("over seeds:\n")[1]
    assert "seed=" not in rows and "depth=" in rows
    assert sweep("out2", "depth=1,2", "--engine", "serial") == 0
    told = capsys.readouterr().out
    assert "compare:" not in told and "best of each metric:" in told


def test_a_finished_run_is_never_cleared(tmp_path: Path) -> None:
    from tandem.sweeps.point import clear

    with run_folder(tmp_path / "run") as aside:
        write_status(aside, "ok")
    with pytest.raises(AssertionError):
        clear(tmp_path / "run")


def _env() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
