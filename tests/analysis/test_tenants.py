"""Tenants from a trace or a configuration to policies, tables, metrics, terminal and reports."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import metrics
from analysis.metric_names import tenants_in
from analysis.run import load, run_files
from engine.results.schema import TABLES
from tandem.cli.__main__ import main
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import run_spec_of
from tests.support.synthetic import write
from traces.importing import import_trace, inspect_trace
from traces.serving.request import Request
from traces.serving.sessions import with_shares, with_tenants
from traces.store import read_trace

SHARES = "tenants.shares={a: 0.5, b: 0.5}"
SMALL = ["model=micro_llama", "trace=random", "trace.requests=24", "trace.input_tokens=60"]
SMALL += ["trace.output_tokens=20", "arrival=all_at_once", SHARES]


# ---- from traces
def test_a_table_of_lengths_names_tenants(tmp_path: Path) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "a.parquet"
    path.write_text("prompt_tokens,output_tokens,tenant,slo\n5,7,acme,chat\n0,7,acme,\n5,7,,\n")
    import_trace(path, out)
    assert [(r.tenant, r.slo) for r in read_trace(out)] == [("acme", "chat"), ("", "")]
    assert inspect_trace(out)["tenants"] == {"acme": 1}
    path.write_text("prompt_tokens,output_tokens\n5,7\n")
    import_trace(path, out)
    assert [r.tenant for r in read_trace(out)] == [""]


# ---- by share
def test_shares_are_drawn_by_seed_and_turns_stay_together() -> None:
    alone = [Request(i, 0, 5, 5) for i in range(4000)]
    drawn = with_tenants(alone, {"a": 0.3, "b": 0.7}, seed=1)
    counts = Counter(request.tenant for request in drawn)
    assert abs(counts["a"] - 1200) < 4 * (4000 * 0.3 * 0.7) ** 0.5
    assert with_tenants(alone[:50], {"a": 0.3, "b": 0.7}, seed=1) == drawn[:50]
    turns = [Request(i, 0, 5, 5, session=i % 40, turn=i // 40) for i in range(120)]
    own = with_tenants(turns, {"a": 0.5, "b": 0.5})
    assert all(own[i].tenant == own[i % 40].tenant for i in range(120))
    both = with_shares(drawn, {"a": 0.3, "b": 0.7}, seed=1)
    assert any(request.slo != request.tenant for request in both), "they are drawn apart"


def test_clients_have_one_tenant_for_all_their_requests() -> None:
    words = ["limit=40", "arrival=clients", "arrival.clients=6", SHARES]
    requests = run_spec_of(composed(words)).requests
    pairs = {(request.session, request.tenant) for request in requests}
    assert len(pairs) == 6 and {tenant for _, tenant in pairs} == {"a", "b"}


def test_a_training_job_has_a_tenant() -> None:
    words = ["policy=coserve", "training=finetune", "training.tenant=acme", "limit=2"]
    words += ["training.sequence_tokens=64", "training.data.mean_tokens=32"]
    assert run_spec_of(composed(words)).trainees[0].job.tenant == "acme"


def test_tenants_may_have_a_job_each() -> None:
    words = ["policy=coserve", "training=finetune", "training.tenants=[a, b]", "limit=2"]
    words += ["training.sequence_tokens=64", "training.data.mean_tokens=32"]
    one, other = (trainee.job for trainee in run_spec_of(composed(words)).trainees)
    assert (one.tenant, other.tenant, other.job_id - one.job_id) == ("a", "b", 1)
    assert one.samples != other.samples and other.recipe.seed - one.recipe.seed == 1
    for wrong in ("training.tenants=[a, a]", "training.tenant=c"):
        with pytest.raises(ValueError, match=r"training\.tenants=\[.*\]: a job for each"):
            run_spec_of(composed([*words, wrong]))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("tenants.shares={a: 0.5}", r"tenants\.shares=\{a: 0\.5\}: they must be at least 0"),
        ("tenants.shares={a: much}", r"tenants\.shares\.a=much: that is text; give a number"),
        ("tenants.shares=0.5", r"tenants\.shares=0\.5"),
        ("+tenants.share={a: 1}", r"tenants\.share: no such setting; did you mean shares\?"),
    ],
)
def test_mistakes_are_refused_by_key(word: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run_spec_of(composed(["limit=2", word]))


# ---- to tables and metrics
def test_a_run_without_tenants_has_the_tables_it_had(tmp_path: Path) -> None:
    run_experiment(composed([*SMALL[:-1], "policy=chunked_restart"]), tmp_path / "run")
    assert not (tmp_path / "run" / "service.parquet").exists()
    names = pd.read_parquet(tmp_path / "run" / "requests.parquet").columns
    assert [*names] == TABLES["requests"].names
    assert not tenants_in(json.loads((tmp_path / "run" / "metrics.json").read_text()))


@pytest.mark.parametrize("policy", ["vtc_restart", "chunked_restart"])
def test_tenants_are_told_with_what_they_got(policy: str, tmp_path: Path) -> None:
    """By whatever policy; what they were charged where a scheduling goes by it."""
    found = run_experiment(composed([*SMALL, f"policy={policy}"]), tmp_path / "run")
    rows = pd.read_parquet(tmp_path / "run" / "requests.parquet")
    assert [*rows.columns] == [*TABLES["requests"].names, "tenant"]
    assert tenants_in(found) == ["a", "b"]
    for tenant, own in rows.groupby("tenant"):
        assert found[f"num_requests_for_{tenant}"] == len(own)
        for kind in ("prompt_tokens", "output_tokens"):
            assert found[f"{kind}_for_{tenant}"] == own[kind].sum()
        ttft_s = (own["first_token_ns"] - own["arrival_ns"]) / 1e9
        assert found[f"mean_ttft_s_for_{tenant}"] == pytest.approx(ttft_s.mean())
        if policy == "vtc_restart":
            charged = own["prompt_tokens"].sum() + 2 * (own["output_tokens"] - 1).sum()
            assert found[f"charged_for_{tenant}"] == charged
    assert (tmp_path / "run" / "service.parquet").exists() == (policy == "vtc_restart")
    run = load(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics.summary(run) == metrics.summary(run_files(tmp_path / "run")) == told


def test_figures_of_tenants_by_hand(tmp_path: Path) -> None:
    """Request 0 has a TTFT of 10 ms, request 1 of 15 ms."""
    run = load(write(tmp_path / "two"))
    service = pd.DataFrame({"tenant": ["x", "y", "x"], "charged": [5.0, 7.0, 1.0]})
    service = service.assign(forward_tokens=[0.0, 9.0, 0.0])
    run = replace(run, requests=run.requests.assign(tenant=["x", ""]), service=service)
    found = metrics.summary(run)
    assert tenants_in(found) == ["x", "y"]
    assert found["p50_ttft_s_for_x"] == pytest.approx(0.010)
    assert (found["charged_for_x"], found["charged_for_y"]) == (6.0, 7.0)
    assert found["finetune_tokens_for_y"] == 9.0 and "num_requests_for_y" not in found


# ---- to terminal and reports
def test_tenants_are_shown_in_terminal_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words: list[Any] = [*SMALL, "policy=coserve_vtc", "training=finetune", "training.tenant=c"]
    words += ["training.sequence_tokens=64", "training.data.mean_tokens=32"]
    words += ["training.data.count=8", "training.microbatches=2"]
    assert main(["run", *words, "hydra.run.dir=run"]) == 0
    told = capsys.readouterr().out
    assert "tenant a: " in told and "tenant b: " in told and "charged" in told
    (own,) = [line for line in told.splitlines() if line.startswith("tenant c: ")]
    assert "tokens finetuned" in own and "ttft" not in own
    assert main(["report", "run"]) == 0
    text = Path("run-report/report.html").read_text(encoding="utf-8")
    assert "Tenants" in text and "tokens finetuned" in text
