"""SLO classes from a trace or a configuration to policies, metrics, terminal and reports."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import metrics
from analysis.run import load
from tandem.cli.__main__ import main
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import run_spec_of
from tests.support.synthetic import write
from traces.importing import import_trace, inspect_trace
from traces.serving.request import Request
from traces.serving.sessions import with_shares
from traces.store import read_trace

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
HALVES = "slo.shares={interactive: 0.5, batch: 0.5}"


# ---- from traces
def imported(path: Path, *lines: str, **options: Any) -> list[str]:
    """The classes of a table's requests."""
    path.write_text("\n".join(lines) + "\n")
    import_trace(path, path.with_suffix(".parquet"), **options)
    return [request.slo for request in read_trace(path.with_suffix(".parquet"))]


def test_a_table_of_lengths_names_classes(tmp_path: Path) -> None:
    rows = ("prompt_tokens,output_tokens,slo,tier", "5,7,chat,1", "0,7,chat,1", "5,7,,2")
    assert imported(tmp_path / "a.csv", *rows) == ["chat", ""], "each request keeps its class"
    assert imported(tmp_path / "a.csv", *rows, slo_column="tier") == ["1", "2"]
    assert imported(tmp_path / "a.csv", "prompt_tokens,output_tokens", "5,7") == [""]
    with pytest.raises(ValueError, match="no column tear for slo_column"):
        imported(tmp_path / "a.csv", *rows, slo_column="tear")


def test_burstgpt_has_log_types_and_models(tmp_path: Path) -> None:
    rows = ["45,GPT-4,10,5,15,API log", "5,ChatGPT,8,2,10,Conversation log"]
    path = tmp_path / "a.csv"
    assert imported(path, BURST, *rows) == ["Conversation log", "API log"], "sorted by time"
    assert inspect_trace(path.with_suffix(".parquet"))["slo_classes"] == {
        "Conversation log": 1,
        "API log": 1,
    }
    assert imported(path, BURST, *rows, slo_column="Model") == ["ChatGPT", "GPT-4"]
    with pytest.raises(ValueError, match="BurstGPT has Model and Log Type"):
        imported(path, BURST, *rows, slo_column="Timestamp")
    bare = [row.rpartition(",")[0] for row in (BURST, *rows)]
    assert imported(path, *bare) == ["", ""], "a file without log types"


def test_kinds_without_classes_refuse_a_column(tmp_path: Path) -> None:
    azure = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,5,5")
    with pytest.raises(ValueError, match="slo_column is for lengths and burstgpt, not for azure"):
        imported(tmp_path / "a.csv", *azure, slo_column="x")


# ---- by share
def test_shares_are_drawn_by_seed_and_turns_stay_together() -> None:
    alone = [Request(i, 0, 5, 5) for i in range(4000)]
    drawn = with_shares(alone, {"a": 0.3, "b": 0.7, "none": 0.0}, seed=1)
    counts = Counter(request.slo for request in drawn)
    assert abs(counts["a"] - 1200) < 4 * (4000 * 0.3 * 0.7) ** 0.5 and not counts["none"]
    assert with_shares(alone[:50], {"a": 0.3, "b": 0.7, "none": 0.0}, seed=1) == drawn[:50]
    assert with_shares(alone, {"a": 0.3, "b": 0.7}, seed=2) != drawn
    turns = [Request(i, 0, 5, 5, session=i % 40, turn=i // 40) for i in range(120)]
    classed = with_shares(turns, {"a": 0.5, "b": 0.5})
    assert all(classed[i].slo == classed[i % 40].slo for i in range(120))
    assert {request.slo for request in classed} == {"a", "b"}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("slo.shares={a: 0.5}", r"slo\.shares=\{a: 0\.5\}: they must be at least 0 and make up 1"),
        ("slo.shares={a: 1.5, b: -0.5}", "make up 1"),
        ("slo.shares={a: much}", r"slo\.shares\.a=much: that is text; give a number"),
        ("slo.shares=0.5", r"slo\.shares=0\.5"),
        ("slo.classes={a: {ttft: 1}}", r"slo\.classes\.a\.ttft: no such limit"),
        ("slo.classes={a: {ttft_s: 0}}", r"slo\.classes\.a\.ttft_s=0\.0: it must be above 0"),
        ("slo.classes={a: 1}", r"slo\.classes\.a=1"),
    ],
)
def test_mistakes_are_refused_by_key(word: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        run_experiment(composed(["limit=2", word]), tmp_path / "run", keeps_rejected=False)


def test_shares_of_an_option_are_replaced_as_its_refusal_says() -> None:
    words = ["limit=2", "slo=mixed", "~slo.shares", "+slo.shares={chat: 1.0}"]
    assert {request.slo for request in run_spec_of(composed(words)).requests} == {"chat"}


@pytest.mark.slow
# ---- to policies
def test_the_urgent_class_is_served_first(tmp_path: Path) -> None:
    """From the command line: one load, first come first served and by deadline."""
    words = ["model=micro_llama", "limit=60", "arrival=all_at_once", "scheduling.max_jobs=4"]
    words += [HALVES, "slo.ttft_s=1e9"]
    urgent = "scheduling.deadline_s={interactive: 0.1, batch: 60}"
    waits = {
        name: run_experiment(composed([*words, "policy=deadline_restart", *more]), tmp_path / name)
        for name, more in (
            ("equal", ()),
            ("deadlines", (urgent,)),
            ("priorities", ("scheduling.priority={interactive: 0, batch: 1}",)),
        )
    }
    mean = {
        name: {c: float(found[f"mean_ttft_s_of_{c}"]) for c in ("interactive", "batch")}
        for name, found in waits.items()
    }
    assert 0.5 < mean["equal"]["interactive"] / mean["equal"]["batch"] < 2
    assert mean["deadlines"]["interactive"] < 0.6 * mean["deadlines"]["batch"]
    assert mean["priorities"] == pytest.approx(mean["deadlines"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["slo=mixed", "scheduling.deadline_s={interactiv: 1, batch: 60}"],
            "deadline_s.interactiv",
        ),
        (["slo=mixed", "scheduling.priority={Batch: 1}"], "priority.Batch"),
        (
            [
                "slo=mixed",
                "scheduling=shortest_by_class",
                "scheduling.predictor.mean_tokens={a: 1}",
            ],
            "predictor.mean_tokens.a",
        ),
    ],
)
def test_an_unknown_class_is_refused_with_the_known_ones(words: list[str], told: str) -> None:
    there = (
        rf"scheduling\.{told}: the trace and slo have no such class; there are batch, interactive$"
    )
    with pytest.raises(ValueError, match=there):
        run_spec_of(composed(["limit=1", "policy=deadline_restart", *words]))


def test_classes_of_the_whole_trace_and_of_limits_are_known(tmp_path: Path) -> None:
    imported(tmp_path / "a.csv", "prompt_tokens,output_tokens,slo", "5,7,chat", "5,7,batch")
    words = ["policy=deadline_restart", "trace=file", f"trace.path={tmp_path / 'a.parquet'}"]
    words += ["limit=1", "slo.classes={later: {ttft_s: 9}}"]
    run_spec_of(composed([*words, "scheduling.deadline_s={chat: 1, batch: 9, later: 60}"]))
    with pytest.raises(ValueError, match=r"deadline_s\.bulk: .*; there are batch, chat, later$"):
        run_spec_of(composed([*words, "scheduling.deadline_s={bulk: 1}"]))
    with pytest.raises(ValueError, match=r"\.chat: .*; there is none: slo\.shares draws them$"):
        run_spec_of(composed([words[0], "limit=1", "scheduling.deadline_s={chat: 1}"]))


def test_a_predictor_may_go_by_class() -> None:
    words = ["limit=2", "policy=shortest_restart", "scheduling=shortest_by_class"]
    words.append("slo.shares={chat: 0.5, batch: 0.5}")
    known = "scheduling.predictor.mean_tokens={chat: 50, batch: 900}"
    policy: Any = run_spec_of(composed([*words, known])).policy
    predictor = policy.scheduling.predictor
    job = type("Job", (), {"slo": "batch"})
    assert predictor.output_tokens(job) == 900
    assert predictor.output_tokens(type("Job", (), {"slo": "other"})) == 256


# ---- to metrics, terminal and reports
def test_figures_of_classes_by_hand(tmp_path: Path) -> None:
    """Request 0 has a TTFT of 10 ms and a TPOT of 10 ms, request 1 of 15 ms and 5 ms."""
    run = load(write(tmp_path / "two"))
    run = replace(run, requests=run.requests.assign(slo=["chat", "batch"]))
    found = metrics.summary(run, {"ttft_s": 0.012})
    assert (found["slo_attainment"], found["slo_attainment_of_chat"]) == (0.5, 1.0)
    assert (found["slo_attainment_of_batch"], found["goodput_of_batch"]) == (0.0, 0.0)
    assert found["goodput_of_chat"] == pytest.approx(1 / 0.030) == found["goodput"]
    assert (found["num_requests_of_chat"], found["num_requests_of_batch"]) == (1, 1)
    assert found["p99_ttft_s_of_batch"] == pytest.approx(0.015)
    assert found["mean_tpot_s_of_chat"] == pytest.approx(0.010)
    own = {"ttft_s": 0.012, "classes": {"batch": {"ttft_s": 0.016}, "chat": {"tpot_s": 0.009}}}
    found = metrics.goodput(run, own)
    assert (found["slo_attainment_of_chat"], found["slo_attainment_of_batch"]) == (0.0, 1.0)
    unlimited = {"ttft_s": 0.012, "classes": {"batch": {"ttft_s": None}}}
    assert metrics.goodput(run, unlimited)["slo_attainment"] == 1.0
    with pytest.raises(ValueError, match="unknown SLO 'itl'"):
        metrics.goodput(run, {"classes": {"batch": {"itl": 1.0}}})


@pytest.mark.slow
def test_classes_are_shown_in_terminal_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=micro_llama", "limit=20", "arrival.rate=30", "slo=mixed"]
    assert main(["run", *words, "hydra.run.dir=one/run"]) == 0
    told = capsys.readouterr().out
    assert "within the SLO, goodput" in told
    assert "class interactive: " in told and "class batch: " in told
    found = json.loads(Path("one/run/metrics.json").read_text())
    names = ("interactive", "batch")
    assert sum(found[f"num_requests_of_{name}"] for name in names) == 20
    shares = sum(found[f"num_requests_of_{n}"] * found[f"slo_attainment_of_{n}"] for n in names)
    assert shares / 20 == pytest.approx(found["slo_attainment"])
    for folder, page in (("one/run", "one/run-report"), ("one", "one/report")):
        assert main(["report", folder]) == 0
        text = Path(page, "report.html").read_text(encoding="utf-8")
        assert "SLO classes" in text and "interactive" in text
    assert main(["report", "one", "--ttft", "1e-9"]) == 0
    points = pd.read_csv("one/report/points.csv")
    assert points["slo_attainment_of_interactive"].tolist() == [0.0]
