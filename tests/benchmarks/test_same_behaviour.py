"""Two checkouts are held against each other: every change is seen, nothing else is reported."""

from __future__ import annotations

import json
import subprocess
from math import inf, nextafter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import same_behaviour
from benchmarks.behaviour_runs import PLAYED, SCHEDULINGS, TRAINED, BehaviourRun, runs
from benchmarks.claims import scripts
from benchmarks.run_columns import ALL, LeftOut, differences, encoded, read_folder
from benchmarks.same_behaviour import HERE, LEFT_OUT, SHOWS, checkout_of, main

REQUESTS: dict[str, list[Any]] = {
    "request_id": [0, 1, 2],
    "status": ["finished", "finished", "refused"],
    "finish_ns": [70, 80, None],
    "token_ns": [[60, 70], [65, 75, 80], []],
}
TRAINING: dict[str, list[Any]] = {"step": [0, 1], "loss": [5.25, 5.125]}
METRICS = {"num_finished": 2, "peak_bytes": {"gpu": 12, "host": 0}, "mean_ttft_s": 0.5}


def write(
    folder: Path,
    requests: Any = REQUESTS,
    training: Any = TRAINING,
    metrics: dict[str, Any] = METRICS,
) -> Path:
    """A small run folder."""
    folder.mkdir()
    for name, columns in (("requests", requests), ("training", training)):
        if columns is not None:
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return folder


def found(
    tmp_path: Path,
    *,
    renamed: dict[tuple[str, str], str] | None = None,
    left_out: tuple[LeftOut, ...] = (),
    is_timed: bool = False,
    **changed: Any,
) -> list[str]:
    """What is reported of a run folder and one that is changed."""
    one, other = write(tmp_path / "before"), write(tmp_path / "after", **changed)
    folders = read_folder(one), read_folder(other)
    return [str(d) for d in differences(*folders, renamed or {}, left_out, is_timed)[1]]


def with_cell(column: str, row: int, value: Any) -> dict[str, list[Any]]:
    """The requests with another value in one place."""
    cells = list(REQUESTS[column])
    cells[row] = value
    return {**REQUESTS, column: cells}


def test_equal_folders_are_equal_in_every_column(tmp_path: Path) -> None:
    folders = read_folder(write(tmp_path / "a")), read_folder(write(tmp_path / "b"))
    assert differences(*folders, {}, ()) == (9, [])


def test_how_a_column_is_stored_is_nothing(tmp_path: Path) -> None:
    table = pa.table(REQUESTS)
    status = table.column("status").dictionary_encode()
    stored = table.set_column(1, "status", status).select([3, 2, 1, 0])
    write(tmp_path / "a")
    write(tmp_path / "b", requests=stored)
    pq.write_table(stored, tmp_path / "b" / "requests.parquet", compression=None, row_group_size=2)
    folders = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    assert differences(*folders, {}, ()) == (9, [])


@pytest.mark.parametrize(
    ("column", "row", "value", "told"),
    [
        ("request_id", 1, 3, "1: 1 != 3"),
        ("status", 2, "finished", "2: 'refused' != 'finished'"),
        ("finish_ns", 2, 0, "2: None != 0"),
        ("token_ns", 1, [65, 75, 81], "1: [65, 75, 80] != [65, 75, 81]"),
        ("token_ns", 0, [], "0: [60, 70] != []"),
        ("token_ns", 2, None, "2: [] != None"),
    ],
)
def test_a_changed_value_is_told_with_its_place(
    tmp_path: Path, column: str, row: int, value: Any, told: str
) -> None:
    requests = with_cell(column, row, value)
    assert found(tmp_path, requests=requests) == [f"requests.parquet {column} {told}"]


def test_a_loss_is_equal_to_the_bit(tmp_path: Path) -> None:
    near = nextafter(5.125, inf)
    training = {**TRAINING, "loss": [5.25, near]}
    assert found(tmp_path, training=training) == [f"training.parquet loss 1: 5.125 != {near}"]


def test_of_long_values_the_place_where_they_part_is_shown(tmp_path: Path) -> None:
    long, other = "x" * 500 + "a" + "y" * 500, "x" * 500 + "b" + "y" * 500
    write(tmp_path / "a", requests=with_cell("status", 0, long))
    write(tmp_path / "b", requests=with_cell("status", 0, other))
    folders = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    (only,) = differences(*folders, {}, ())[1]
    assert "xxa" in only.before and "xxb" in only.after and len(str(only)) < 200


def test_a_missing_table_is_told(tmp_path: Path) -> None:
    assert found(tmp_path, training=None) == ["training.parquet *: there != missing"]


def test_so_are_columns_of_one_side_alone(tmp_path: Path) -> None:
    requests = {**REQUESTS, "end_ns": REQUESTS["finish_ns"]}
    del requests["finish_ns"]
    assert found(tmp_path, requests=requests) == [
        "requests.parquet finish_ns: there != missing",
        "requests.parquet end_ns: missing != there",
    ]


def test_a_renaming_that_is_listed_is_none(tmp_path: Path) -> None:
    requests = {**REQUESTS, "end_ns": REQUESTS["finish_ns"]}
    del requests["finish_ns"]
    renamed = {("requests.parquet", "finish_ns"): "end_ns"}
    assert found(tmp_path, requests=requests, renamed=renamed) == []


def test_a_renamed_column_is_compared(tmp_path: Path) -> None:
    requests: dict[str, list[Any]] = {**REQUESTS, "end_ns": [70, 81, None]}
    del requests["finish_ns"]
    renamed = {("requests.parquet", "finish_ns"): "end_ns"}
    told = ["requests.parquet finish_ns 1: 80 != 81"]
    assert found(tmp_path, requests=requests, renamed=renamed) == told


def test_a_row_more_is_told(tmp_path: Path) -> None:
    training = {"step": [0, 1, 2], "loss": [5.25, 5.125, 5.0]}
    assert found(tmp_path, training=training) == [
        "training.parquet step 2: no row != 2",
        "training.parquet loss 2: no row != 5.0",
    ]


def test_another_type_is_told(tmp_path: Path) -> None:
    training = {**TRAINING, "step": pa.array([0, 1], pa.int32())}
    assert found(tmp_path, training=training) == ["training.parquet step: int64 != int32"]


def test_keys_of_json_files_are_compared(tmp_path: Path) -> None:
    metrics = {**METRICS, "num_finished": 3, "peak_bytes": {"host": 0, "gpu": 13}}
    assert found(tmp_path, metrics=metrics) == [
        "metrics.json num_finished 0: 2 != 3",
        "metrics.json peak_bytes 0: {'gpu': 12, 'host': 0} != {'host': 0, 'gpu': 13}",
    ]


@pytest.mark.parametrize("column", ["mean_ttft_s", "mean_*", ALL])
def test_what_is_left_out_is_not_compared(tmp_path: Path, column: str) -> None:
    left_out = (LeftOut("metrics.json", column, "a clock's"),)
    metrics = {**METRICS, "mean_ttft_s": 0.75}
    assert found(tmp_path, metrics=metrics, left_out=left_out) == []


def test_nothing_else_is_left_out(tmp_path: Path) -> None:
    left_out = (LeftOut("metrics.json", "mean_*", "a clock's"),)
    metrics = {**METRICS, "num_finished": 1}
    told = ["metrics.json num_finished 0: 2 != 1"]
    assert found(tmp_path, metrics=metrics, left_out=left_out) == told


def test_a_clock_may_order_rows_only_where_a_run_is_timed(tmp_path: Path) -> None:
    turned = {name: [cells[i] for i in (2, 0, 1)] for name, cells in REQUESTS.items()}
    turned["finish_ns"] = [None, 71, 83]
    left_out = (
        LeftOut("requests.parquet", "finish_ns", "a clock's", is_timed=True),
        LeftOut("requests.parquet", "token_ns", "a clock's", is_timed=True),
    )
    before, after = write(tmp_path / "a"), write(tmp_path / "b", requests=turned)
    folders = read_folder(before), read_folder(after)
    assert differences(*folders, {}, left_out, is_timed=True) == (7, [])
    assert len(differences(*folders, {}, left_out)[1]) == 4
    turned["status"] = ["refused", "refused", "finished"]
    worse = read_folder(before), read_folder(write(tmp_path / "c", requests=turned))
    (told,) = differences(*worse, {}, left_out, is_timed=True)[1]
    assert told.column == "status"


def test_encodings_differ_where_values_do() -> None:
    values: list[Any] = [
        None,
        True,
        False,
        1,
        0,
        -1,
        1.0,
        0.0,
        -0.0,
        "1",
        b"1",
        "",
        [],
        [1],
        [[1]],
        ["1"],
    ]
    values += [[1, 1], [11], ["1", "1"], ["11"], {}, {"1": 1}, {"1": "1"}, {"1": [1]}, "n", "i1;"]
    assert len({encoded(value) for value in values}) == len(values)
    assert encoded({"a": 1, "b": 2}) == encoded({"b": 2, "a": 1})
    assert encoded(float("nan")) == encoded(-float("nan"))


FAKE = """
import json, sys
from pathlib import Path

folder = Path("outputs/day/time-id")
folder.mkdir(parents=True)
played = [word.partition("=")[2] for word in sys.argv[2:] if word.startswith("replayed=")]
plans = json.loads((Path(played[0]) / "metrics.json").read_text())["plans"] if played else {plans}
facts = {{"plans": plans, "questions": 3}}
for name in ("metrics", "provenance"):
    (folder / f"{{name}}.json").write_text(json.dumps(facts))
(folder / "status.json").write_text(json.dumps({{"status": "ok", "words": sys.argv[1]}}))
sys.exit({code})
"""
FAKE_RUNS = (
    BehaviourRun("one", ("a=1",), ("plans unasked",)),
    BehaviourRun("again", (f"replayed={PLAYED}",), (), "one"),
)


def checkout(folder: Path, plans: int = 5, code: int = 0) -> str:
    """A checkout whose command line writes so many plans, or plays them back."""
    (folder / "tandem").mkdir(parents=True)
    (folder / "tandem" / "__init__.py").touch()
    main_module = folder / "tandem" / "__main__.py"
    main_module.write_text(FAKE.format(plans=plans, code=code), encoding="utf-8")
    return str(folder)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_behaviour, "runs", lambda: FAKE_RUNS)


@pytest.mark.usefixtures("fakes")
def test_checkouts_that_do_the_same_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = checkout(tmp_path / "a"), checkout(tmp_path / "b")
    assert main([*both, "--only", "again", "--keep", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("one ") and lines[0].endswith("6 columns equal, 2 plans unasked")
    assert lines[1].startswith("again ") and lines[1].endswith("6 columns equal")
    assert lines[-1] == "same_behaviour_different_of_2 0 runs 0 pass"
    assert not told.err, "quiet without a terminal"
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.json")}
    assert written == {"runs"}, "nothing is written into the checkouts"


@pytest.mark.usefixtures("fakes")
def test_a_fault_that_was_put_in_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([checkout(tmp_path / "a"), checkout(tmp_path / "b", plans=6)]) == 1
    said = capsys.readouterr().out
    assert said.count("    metrics.json plans 0: 5 != 6\n") == 2, "also where it is played back"
    assert said.endswith("same_behaviour_different_of_2 2 runs 0 fail\n")


@pytest.mark.usefixtures("fakes")
def test_a_run_that_shows_nothing_or_ends_otherwise_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = [checkout(tmp_path / name, plans=3) for name in "ab"]
    assert main([*three, "--only", "one"]) == 1
    assert "no plans unasked: the run does not show what it is for" in capsys.readouterr().out
    assert main([three[0], checkout(tmp_path / "c", code=1), "--only", "one"]) == 1
    assert "after: exit status 1, not 0" in capsys.readouterr().out


@pytest.mark.usefixtures("fakes")
def test_what_is_no_checkout_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither a folder nor a revision"):
        main(["no-such-revision"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="no Tandem can be run there"):
        main([checkout(tmp_path / "a"), str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match="no run begins with two; there are one, again"):
        main([str(tmp_path / "a"), "--only", "two"])


def test_a_revision_is_unpacked(tmp_path: Path) -> None:
    if subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True
    ).returncode:
        pytest.skip("no git checkout")
    found = checkout_of("HEAD", tmp_path, "before")
    assert found.out == tmp_path / "before" and found.out.is_dir()
    assert (found.code / "README.md").is_file() and found.code.parent == tmp_path
    found.check()


def test_the_runs_are_those_that_the_contract_names() -> None:
    every = {run.name: run for run in runs()}
    assert len(every) == len(runs()) >= 40
    memories = ("reservation", "restart", "swap")
    policies = [f"{first}_{second}" for first in SCHEDULINGS for second in memories]
    assert len(policies) == 9 and len(TRAINED) == 8
    for policy in (*policies, *TRAINED):
        for backend in ("sim", "lockstep"):
            run = every[f"{policy}/{backend}"]
            assert f"policy={policy}" in run.words
            assert ("backend=lockstep" in run.words) == (backend == "lockstep")
    assert {name for run in every.values() for name in run.shows} <= SHOWS.keys()
    shown = {name for run in every.values() for name in run.shows}
    assert shown == SHOWS.keys(), "restarts, swaps, shared pages, ... occur"


def test_a_run_is_behind_the_run_that_it_plays_back() -> None:
    names = [run.name for run in runs()]
    played = [run for run in runs() if run.plays]
    assert len(played) >= 3
    for run in played:
        assert names.index(run.plays) < names.index(run.name)
        assert any(PLAYED in word for word in run.words)


def test_tokens_and_losses_are_always_compared() -> None:
    assert all(out.reason for out in LEFT_OUT)
    kept = {"output_ids", "output_tokens", "loss", "body", "jobs", "tokens", "status"}
    assert not kept & {out.column for out in LEFT_OUT}
    whole = {out.file for out in LEFT_OUT if out.column == ALL and not out.is_timed}
    assert whole == {"hashes.json"}


def test_it_is_no_claim() -> None:
    assert "same_behaviour" not in {path.stem for path in scripts()}
