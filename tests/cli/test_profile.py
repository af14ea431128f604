"""What a profile is fitted to and judged by: replays, and not only shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from engine.contract.regions import PageSize
from engine.results.schema import STEPS
from engine.results.tables import table_of
from sim.cost.piecewise import Table
from sim.cost.tables import HOST, TableCost
from tandem.cli.__main__ import main
from tandem.cli.calibrate import told
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.wiring.cost import COST, device_facts, read_cost
from tandem.wiring.profile import AGAIN, calibrate, fitted_replay, is_steady, judged, replayed_count
from tandem.wiring.run_spec import run_spec_of
from tandem.wiring.workload import SESSIONS, synthetic_requests, synthetic_stream
from tests.laws.test_faults import profiled
from tests.support.hand_made import TINY
from traces.files import seal

PAGE = PageSize(16, 65536)


def steps(host_ns: int, length_ns: int, plans: int = 4) -> Any:
    """Plans of two decodes, all with equal times."""
    given = {"lane": "compute", "host_ns": host_ns, "samples": 2, "decode_tokens": 2}
    given |= {
        "work": "serve",
        "request_ids": [1, 2],
        "tokens": [1, 1],
        "contexts": [30, 40],
        "device": 0,
    }
    rows = []
    for i in range(plans):
        row = given | {"step": i, "start_ns": 0, "end_ns": length_ns}
        rows.append(tuple(row.get(f.name, [] if "list" in str(f.type) else 0) for f in STEPS))
    return table_of("steps", rows)


def test_the_host_is_judged_by_a_replay_and_operators_by_all_that_was_held_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "held-out-0").mkdir()
    pq.write_table(steps(host_ns=10_000, length_ns=5000), tmp_path / "holdout.parquet")
    pq.write_table(steps(host_ns=80_000, length_ns=8000), tmp_path / "held-out-0/steps.parquet")
    flat = {"linear": 6000.0, "head": 0.0, "first": 0.0, "decode": 0.0, HOST: 100_000.0}
    tables = {name: Table(((1,),), (ns,)) for name, ns in flat.items()}
    tables["chunk"] = Table(((1,), (1,)), (0.0,))
    table = judged(TableCost(tables, TINY, PAGE, "by hand"), tmp_path)
    errors = table["bias"].dropna().to_dict()
    assert errors == pytest.approx(
        {
            "decode only": 0.2,
            "all launches": 0.2,
            f"{AGAIN}all launches": -0.25,
            f"{AGAIN}host": 0.25,  # 1000 % of what packing shapes took, 25 % of what plans took
            "operator linear": -0.025,  # four launches each
            "operator host": 0.25,
        }
    )
    said = told(table).splitlines()
    assert any(line.startswith(f"{AGAIN}host") for line in said)
    (head,) = (line.split() for line in said if line.startswith("operator head"))
    assert head == ["operator", "head", "0", "-", "-", "-"], "where it rules nothing"


@pytest.mark.parametrize(("total", "steady"), [(0.0, True), (-0.029, True), (0.031, False)])
def test_a_machine_that_changed_meanwhile_is_told(total: float, steady: bool) -> None:
    """Judged by the sum over a replay: single launches may scatter by far more."""
    columns = {"rows": 9, "mape": 0.2, "p90": 0.4, "bias": 0.1, "total": total}
    table = pd.DataFrame(columns, index=["all launches", f"{AGAIN}all launches"])
    table.loc["all launches", "total"] = 0.5  # of shapes: says nothing about a change
    assert is_steady(table) is steady
    assert ("calibrate again" in told(table)) is not steady
    trained = table.drop(f"{AGAIN}all launches").assign(total=total)  # launches through the engine
    assert ("of training are" in told(trained)) is not steady


def test_a_replay_is_as_large_as_its_batches_may_be() -> None:
    assert replayed_count({"max_jobs": 200}) == 200
    assert replayed_count({"max_jobs": 4}) == replayed_count({}) == replayed_count(None) == 48
    assert replayed_count({"max_jobs": 10_000}) == 256
    assert replayed_count({"sharing": {"serving": {"max_jobs": 100}}}) == 100


def test_more_requests_are_shorter_ones() -> None:
    few, many = (
        [r for r in synthetic_requests(2048, 0, count) if r.session is None] for count in (48, 256)
    )
    assert len(few) == 48 and len(many) == 256
    for kind in ("prompt_tokens", "output_tokens"):
        long, short = ([getattr(r, kind) for r in part] for part in (many[:48], many[48:]))
        assert min(short) >= 4 and 0.3 < (sum(short) / 208) / (sum(long) / 48) < 0.75  # ~ a half


def test_sessions_ebb_to_one_job() -> None:
    """The k-th session has k turns, each after the answer to the one before."""
    ebb = [r for r in synthetic_requests(2048, 0, 48) if r.session is not None]
    turns = [sum(r.session == k for r in ebb) for k in range(SESSIONS)]
    assert turns == list(range(1, SESSIONS + 1))


def test_a_profile_of_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    """Its model, its pages, its device and its link: each would price another thing."""
    cpu = run_spec_of(composed(["limit=2"])).device
    tables = {name: Table(((1,),), (1.0,)) for name in ("linear", "head", "first", "decode", HOST)}
    tables["chunk"] = Table(((1,), (1,)), (0.0,))
    TableCost(tables, TINY, PAGE, "by hand").save(tmp_path / COST)
    (tmp_path / "profile.json").write_text(json.dumps(device_facts(cpu)))
    seal(tmp_path, "profile.json")
    assert read_cost(tmp_path, TINY, cpu, PAGE).tables
    other = replace(TINY, name="other", hidden_size=128)
    for spec, device, page, words in (
        (other, cpu, PAGE, "model"),
        (TINY, cpu, PageSize.of(TINY, 2 * PAGE.tokens), "page_tokens"),
        (TINY, replace(cpu, name="h200"), PAGE, "device cpu, not h200"),
        (TINY, replace(cpu, to_host_bytes_per_s=1e6), PAGE, "to_host_bytes_per_s"),
    ):
        with pytest.raises(ValueError, match=words):
            read_cost(tmp_path, spec, device, page)


def test_a_calibration_ends_with_what_it_made_and_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"rows": 9, "mape": 0.2, "p90": 0.4, "bias": 0.1, "total": 0.0}
    table = pd.DataFrame(columns, index=["all launches", f"{AGAIN}all launches"])
    monkeypatch.setattr("tandem.wiring.profile.calibrate", lambda *_: table)
    assert main(["calibrate", "--out", "here"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "profile: here, made in 0 s  (use it with profile=here)"
    assert said.err == "", "off a terminal long work is quiet"


def test_fitted_replays_lie_on_both_sides_of_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them before it, half behind; then half as many that the fit does not see."""
    done: list[str] = []

    def replay(point: object, folder: Path, name: str, *_: object) -> None:
        done.append(name)
        if name == "held-out-1":
            raise InterruptedError  # nothing was measured that could be fitted

    monkeypatch.setattr("tandem.wiring.profile._replay", replay)
    monkeypatch.setattr("tandem.wiring.profile._profile_shapes", lambda *_: done.append("grid"))
    point = composed(["backend=cpu", "model=micro_llama"])
    with pytest.raises(InterruptedError):
        calibrate(point, tmp_path / "profile", replays=4)
    fitted = ["fitted-0", "fitted-1", "grid", "fitted-2", "fitted-3"]
    assert done == [*fitted, "held-out-0", "held-out-1"]


def test_a_stream_of_synthetic_requests_is_as_long_as_sharegpt() -> None:
    """Means of 161 and 338 tokens as published, less what the clipping takes of the upper tail."""
    drawn = [r for seed in range(40) for r in synthetic_stream(2048, seed)]
    assert 130 < np.mean([r.prompt_tokens for r in drawn]) < 161
    assert 310 < np.mean([r.output_tokens for r in drawn]) < 338
    assert max(r.prompt_tokens + r.output_tokens for r in drawn) <= 2048


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ComposedConfig]:
    """The replays that a calibration asks for; none is carried out."""
    found = list[ComposedConfig]()
    monkeypatch.setattr(
        "tandem.wiring.profile.run_experiment", lambda point, folder: found.append(point)
    )
    return found


def test_a_stream_arrives_as_the_case_does_but_at_other_times(
    tmp_path: Path, ran: list[ComposedConfig]
) -> None:
    point = composed(["backend=cpu", "model=micro_llama", "arrival.rate=7", "limit=3"])
    for number in range(2):
        fitted_replay(point, tmp_path, number, streams=True)
    first, second = (got.config for got in ran)
    assert first["arrival"] == second["arrival"] == point.config["arrival"]
    assert first["arrival"]["rate"] == 7 and first["limit"] is None
    assert first["trace"]["path"] == str(tmp_path / "fitted-0-trace.parquet")
    seeds = {config["seed"] for config in (point.config, first, second)}
    assert len(seeds) == 3, "each draws arrivals of its own, none those of the judged run"


def test_replays_finetune_on_other_samples_than_the_run(
    tmp_path: Path, ran: list[ComposedConfig]
) -> None:
    words = ["backend=cpu", "model=micro_llama", "limit=3", "policy=coserve", "training=finetune"]
    point = composed([*words, "training.sequence_tokens=64", "training.data.mean_tokens=40"])
    for streams in (False, True):
        fitted_replay(point, tmp_path, 0, streams)
        fitted_replay(point, tmp_path, 1, streams)
    jobs = [run_spec_of(found).trainees[0].job for found in (point, *ran[:1])]
    assert jobs[0].samples != jobs[1].samples
    seeds = [found.config["training"]["recipe"]["seed"] for found in ran]
    assert point.config["training"]["recipe"]["seed"] not in seeds


def test_replays_have_the_kv_of_the_run_and_room_for_steps_of_their_own(
    tmp_path: Path, ran: list[ComposedConfig]
) -> None:
    """A batch of whole prompts has no bound in tokens: it is as large as those of the trace."""
    words = ["backend=cpu", "model=tiny_llama", "policy=orca", "limit=3", "arrival.rate=7"]
    point = composed([*words, "device.memory_bytes=64000000"])
    fitted_replay(point, tmp_path, 0)
    own, other = (run_spec_of(found).room for found in (point, ran[0]))
    assert other.capacity_bytes == own.capacity_bytes
    assert other.memory.activation > own.memory.left, "it would not fit"


def test_policies_may_be_quoted_another_profile_than_that_of_the_run(tmp_path: Path) -> None:
    words = ["model=micro_llama", "limit=2", f"profile={profiled(tmp_path / 'a', 4000)}"]
    alone = run_spec_of(composed(words))
    assert alone.quotes is alone.cost
    other = run_spec_of(composed([*words, f"quoted_profile={profiled(tmp_path / 'b', 3000)}"]))
    shape = [1] * 8, [3500] * 8, 8
    assert other.cost.shape_ns(*shape) == alone.cost.shape_ns(*shape)  # type: ignore[attr-defined]
    assert other.quotes.shape_ns(*shape) != alone.quotes.shape_ns(*shape)  # type: ignore[attr-defined]
    assert run_spec_of(composed([*words[:2], f"quoted_profile={tmp_path}/b"])).cost.form != "table"
    with pytest.raises(ValueError, match=r"no cost\.json"):
        run_spec_of(composed([*words, f"quoted_profile={tmp_path}/none"]))


def test_a_fit_takes_two_replays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replays=1: a fit takes 2 or more"):
        calibrate(composed(["backend=cpu"]), tmp_path / "profile", replays=1)
