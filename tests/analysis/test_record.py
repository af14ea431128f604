"""`record`: which tables a run keeps, and what a sweep keeps of each point."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from analysis.agreement import common_plans
from analysis.run import load
from tandem.cli.__main__ import main
from tandem.config.compose import composed
from tandem.wiring.experiment import as_swept
from tandem.wiring.folder import checked_json

RUN = ("run", "model=micro_llama", "limit=12")
TRAINS = ("training=random", "policy=time_shared")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tables(folder: str | Path) -> set[str]:
    return {path.stem for path in Path(folder).glob("*.parquet")}


def test_a_run_of_requests_has_their_table_and_metrics() -> None:
    """Equal to those of a run that keeps everything."""
    assert main([*RUN, "hydra.run.dir=all"]) == 0
    assert main([*RUN, "record=requests", "hydra.run.dir=few"]) == 0
    assert tables("all") - tables("few") == {"steps", "memory", "plans"}
    assert pq.read_table("few/requests.parquet").equals(pq.read_table("all/requests.parquet"))
    whole, few = (checked_json(Path(name) / "metrics.json") for name in ("all", "few"))
    assert {name: whole[name] for name in few} == few
    assert {"p99_ttft_s", "p99_itl_s", "steady_output_throughput"} <= few.keys()
    assert {"peak_kv_usage", "host_share", "num_plans"} <= whole.keys() - few.keys()


def test_what_needs_its_steps_tells_how_to_get_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "record=requests", "hydra.run.dir=few"]) == 0
    for words in (["report", "few"], ["compare", "few"]):
        assert main(words) == 2
        assert "few has kept requests alone (record=requests): run it again with record=all" in (
            capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("record=some",), "record=some: there are auto, all, requests"),
        (("record=requests", *TRAINS), "record=requests: what is trained is told by its steps"),
    ],
)
def test_a_wrong_record_is_told_before_anything_begins(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words, "hydra.run.dir=out"]) == 2
    assert told in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "record"),
    [
        ((), "requests"),
        (("record=all",), "all"),
        (("backend=lockstep",), "auto"),
        (("replicas=2", "router=round_robin"), "auto"),
        (TRAINS, "auto"),
    ],
)
def test_a_sweep_keeps_requests_where_they_tell_all(words: tuple[str, ...], record: str) -> None:
    assert as_swept(composed(["model=micro_llama", *words]).config)["record"] == record


@pytest.mark.parametrize("verb", [("sweep", "--out", "out", "--jobs", "1"), ("run", "-m")])
def test_points_of_a_sweep_keep_requests(verb: tuple[str, ...]) -> None:
    words = [*RUN[1:], "arrival.rate=2,4", *([] if verb[0] == "sweep" else ["hydra.sweep.dir=out"])]
    assert main([*verb, *words]) == 0
    found = [path.parent for path in Path("out").rglob("metrics.json")]
    assert len(found) == 2
    assert [tables(folder) for folder in found] == [{"requests", "training"}] * 2


def test_a_sweep_is_judged_by_other_limits() -> None:
    """By its requests, which are all that it keeps."""
    assert main(["run", "-m", *RUN[1:], "arrival.rate=2,4", "hydra.sweep.dir=out"]) == 0
    assert main(["report", "out", "--ttft", "1"]) == 0


def test_a_log_that_is_played_back_agrees_in_every_plan() -> None:
    """Though it frees what finished jobs held; other growth at one plan parts the logs."""
    assert main([*RUN, "hydra.run.dir=one"]) == 0
    assert main([*RUN, "policy=recorded", "replayed=one", "hydra.run.dir=two"]) == 0
    one, two = load("one"), load("two")
    assert sum(common_plans(one, two).values()) == len(one.plans) == len(two.plans)
    at = next(i for i, grows in enumerate(one.plans["grows"]) if grows != "[]")
    grows = one.plans["grows"].copy()
    grows.iloc[at] = grows.iloc[at].replace(",0,0]", "0,0,0]", 1)
    changed = replace(one, plans=one.plans.assign(grows=grows))
    assert sum(common_plans(one, changed).values()) == at
