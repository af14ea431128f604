"""One table from whatever is on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from analysis.swept import HEADLINES
from tandem.cli.__main__ import main
from tandem.cli.collect import COLUMNS, policy_name, write_runs
from tandem.sweeps.point import add_points, points_in
from tests.support.sweeps import failed, finished, grid


def test_a_row_per_run_with_settings_choices_and_metrics(tmp_path: Path) -> None:
    words = ["policy=fast", "slo=chat", "arrival.rate=2"]
    finished(tmp_path, "a", words, 2.0, goodput=1.5)
    failed(tmp_path, "deep/b", "ValueError: no")
    rows = pd.read_parquet(collected(tmp_path)).set_index("run")
    assert list(rows.index) == ["a", "deep/b"]
    a, b = rows.loc["a"], rows.loc["deep/b"]
    assert (a["status"], a["policy"], a["slo"], a["goodput"]) == ("ok", "fast", "chat", 1.5)
    assert (a["config.arrival.rate"], a["config.slo.ttft_s"], a["made.model"]) == (
        2.0,
        0.012,
        "toy",
    )
    assert json.loads(a["overrides"]) == words
    assert (b["status"], b["error"]) == ("failed", "ValueError: no")
    assert pd.isna(b["goodput"])


def test_the_small_table_has_what_varies_and_the_headlines(tmp_path: Path) -> None:
    grid(tmp_path)
    assert main(["collect", str(tmp_path)]) == 0
    assert not (tmp_path / "runs_all.parquet").exists()
    small = pd.read_parquet(tmp_path / "runs.parquet")
    first = ["run", "status", "error", "policy", "config.seed", "config.arrival.rate"]
    told = ["output_throughput", "request_throughput", "p99_ttft_s", "p99_tpot_s"]
    assert set(small) == {*first, *told, "slo_attainment", "goodput"}
    assert list(small)[:4] == first[:4]
    whole = pd.read_parquet(collected(tmp_path))
    pd.testing.assert_frame_equal(small, whole[list(small)])
    assert {"overrides", "made.model", "config.trusted", "p50_ttft_s"} <= set(whole)


def test_help_names_every_column_of_the_small_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["collect", "--help"])
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in {**COLUMNS, **HEADLINES})


def test_collecting_again_gives_equal_bytes(tmp_path: Path) -> None:
    grid(tmp_path)
    before = collected(tmp_path).read_bytes()
    assert collected(tmp_path).read_bytes() == before
    assert not list(tmp_path.glob(".runs*"))


def test_unfinished_and_damaged_runs_spoil_nothing(tmp_path: Path) -> None:
    finished(tmp_path, "good", [], 1.0, goodput=1.0)
    finished(tmp_path, "alive.running", [], 1.0)
    cut = finished(tmp_path, "cut", [], 1.0)
    (cut / "metrics.json").write_text('{"goodput": 1.')
    torn = finished(tmp_path, "torn", [], 1.0, goodput=2.0)
    (torn / "status.json").write_text("")
    rows = pd.read_parquet(collected(tmp_path))
    found = dict(zip(rows["run"], rows["status"], strict=True))
    assert found == {"good": "ok", "cut": "damaged", "torn": "damaged"}


def test_settings_of_different_types_share_a_column(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "'auto'"), ("c", "null")):
        folder = finished(tmp_path, name, [], 1.0)
        text = (folder / "config.yaml").read_text().replace("seed: 0", f"seed: {seed}")
        (folder / "config.yaml").write_text(text)
    rows = pd.read_parquet(collected(tmp_path))
    assert list(rows["config.seed"][:2]) == ["1", "auto"]
    assert pd.isna(rows["config.seed"][2])


def test_points_without_provenance_are_named_by_the_sweep(tmp_path: Path) -> None:
    failed(tmp_path, "abc", "no")
    add_points(tmp_path, {"abc": ("policy=fast", "depth=0")})
    add_points(tmp_path, {"def": ("depth=1",)})
    assert set(points_in(tmp_path)) == {"abc", "def"}  # the first call's points are kept
    [row] = pd.read_parquet(collected(tmp_path)).to_dict("records")
    assert row["policy"] == "fast" and json.loads(row["overrides"]) == ["policy=fast", "depth=0"]


def test_overrides_that_come_under_a_new_key_supersede_the_old_one(tmp_path: Path) -> None:
    for name in ("old", "new", "other"):
        finished(tmp_path / "deep", name, ["policy=fast"], 1.0, goodput=1.0)
    failed(tmp_path / "deep", "broken", "old code")
    add_points(tmp_path / "deep", {"old": ("policy=fast", "depth=1"), "broken": ("depth=3",)})
    add_points(tmp_path / "deep", {"new": ("depth=1", "policy=fast"), "other": ("depth=2",)})
    add_points(tmp_path / "deep", {"again": ("depth=3",)})
    assert list(points_in(tmp_path / "deep")) == ["new", "other", "again"]
    rows = pd.read_parquet(collected(tmp_path))  # of a folder around it, too
    found = {row["run"].rpartition("/")[2]: row["status"] for row in rows.to_dict("records")}
    gone = "superseded"
    assert found == {"old": gone, "new": "ok", "other": "ok", "broken": gone}


def test_a_policy_without_a_name_is_called_by_its_halves() -> None:
    config = {"scheduling": {"_target_": "a.B"}, "memory": {"_target_": "c.d.E"}}
    assert policy_name(config, ["arrival.rate=2"]) == "B+E"
    assert policy_name({**config, "replayed": "x"}, []) == "recorded"
    assert policy_name(config, ["policy=mine"]) == "mine"


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, wanted in ((tmp_path / "no", "is no folder"), (tmp_path, "no run lies there")):
        assert main(["collect", str(folder)]) == 2
        told = capsys.readouterr().err.strip()
        assert wanted in told and len(told.splitlines()) == 1


def test_the_verb_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid(tmp_path)
    assert main(["collect", str(tmp_path)]) == 0
    assert "17 runs (16 ok, 1 failed)" in capsys.readouterr().out


def collected(root: Path) -> Path:
    write_runs(root, with_all=True)
    return root / "runs_all.parquet"
