"""Comparing runs: identical ones, shifted ones, and the parts of their difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from analysis import distance
from analysis.compare import compare
from analysis.distance import drift
from analysis.run import Run, load
from analysis.verdicts import headline, table
from engine.results.schema import SCHEMA_VERSION
from tandem.cli.compare import replay_of
from tandem.cli.errors import Usage
from tests.support.synthetic import MS, TWO, Toy, write

Maker = Callable[..., Run]

# Eight requests, one per 30 ms, so that a slower machine batches them in another way.
EIGHT = Toy([i * 30 * MS for i in range(8)], prompts=[20] * 8, outputs=[4, 9, 2, 7, 1, 5, 8, 3])


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    def make(name: str, toy: Toy = EIGHT, **changes: object) -> Run:
        return load(write(tmp_path / name, toy, **changes))

    return make


def test_equal_runs_agree_in_everything(make: Maker) -> None:
    found = compare(make("a"), make("b", backend="cpu"), make("r"))
    assert (found.errors["error"] == 0).all() and (found.memory["error"] == 0).all()
    assert (found.distances[["ks", "wasserstein"]] == 0).all(axis=None)
    assert (found.split["total"] == 0).all() and len(found.split) == 4
    assert found.plans.share == 1.0 and found.plans.divergence is None
    assert (found.requests["e2e_error"] == 0).all() and len(found.requests) == 8
    assert found.config_differences["key"].tolist() == ["backend.name"]


def test_a_prediction_ten_percent_slow_shows_it_everywhere(make: Maker) -> None:
    # All arrive at once, so the same plans follow and every time is 1.1 times as long.
    at_once = replace(EIGHT, arrivals_ns=[0] * 8)
    slow = compare(make("a", at_once, factor=lambda step: 1.1), make("b", at_once))
    latencies = slow.errors[slow.errors["unit"].eq("s")]
    assert len(latencies) == 26 and latencies["error"].to_numpy() == pytest.approx(0.1)
    assert slow.error("request_throughput", "run") == pytest.approx(1 / 1.1 - 1)
    assert slow.steps.set_index("group")["sum_error"].to_dict() == pytest.approx(
        {"prefill": 0.1, "decode": 0.1}
    )
    assert slow.request_errors["mean_abs"].to_numpy() == pytest.approx(0.1)
    assert slow.plans.share == 1.0


def test_the_split_adds_up_and_names_the_cause(make: Maker) -> None:
    measured = make("b", backend="cpu", factor=lambda step: 1.5)
    free = make("a")
    log = measured.plans.to_dict("records")
    replayed = make("r", plans=log)
    found = compare(free, measured, replayed)
    split = found.split
    assert split["total"].to_numpy() == pytest.approx(split["direct"] + split["consequence"])
    assert np.array_equal(split["total"], split["prediction"] - split["measurement"])
    by_metric = split.set_index("metric")
    assert by_metric.loc["peak kv", "direct"] == 0  # same plans, same pages
    # Every operation takes 1.5 times as long, and there is no host time: so does every latency.
    for metric in ("mean ttft", "mean tpot", "mean e2e"):
        assert by_metric.loc[metric, "direct_share"] == pytest.approx(1 / 1.5 - 1)
    assert split["rest"].isna().all(), "unknown without a corrected simulation"
    assert found.plans.share < 1
    assert compare(replayed, measured).plans.share == 1.0
    # Decode steps are 1.5 times as long in the measurement: matched one by one.
    steps = found.steps.set_index("group")
    assert steps.loc["decode", "sum_error"] == pytest.approx(1 / 1.5 - 1)
    assert steps.loc["decode", "count"] == int((measured.steps["decode_tokens"] > 0).sum())
    shown, alike = table(found), table(compare(free, free, free))
    assert "operations, same plans      -33.3 % of their time in all, copies too" in shown
    assert "the spread of reruns is not known" in shown
    assert "): then each run decides for itself" in shown
    assert f"{len(free.plans)} of {len(free.plans)} (100 %)" in alike


def test_without_a_common_plan_no_share_is_given_to_decisions(make: Maker) -> None:
    measured = make("b", backend="cpu", factor=lambda step: 1.5)
    replayed = make("r", plans=measured.plans.to_dict("records"))
    other = make("a")
    other = replace(other, plans=other.plans.assign(body='{"ops": []}'))
    found = compare(other, measured, replayed)
    assert found.plans.common == 0 and found.split.empty
    shown, text = table(found), headline(found)
    assert "They have no plan in common" in text and "consequence" not in text
    assert f"plans in common             none of {len(measured.plans)}:" in shown
    assert "consequence" not in shown and max(map(len, shown.splitlines())) <= 80
    assert "consequence" in table(compare(make("c"), measured, replayed))


def test_without_a_replay_there_is_no_split(make: Maker) -> None:
    assert compare(make("a"), make("b")).split.empty


def test_first_divergence_is_described(make: Maker) -> None:
    # At plan 1 (10 ms against 4 ms) request 1, which arrives at 5 ms, is there in one run only.
    quick = make("a", TWO, factor=lambda step: 0.4)
    found = compare(quick, make("b", TWO)).plans
    assert found.common == 1
    assert found.divergence is not None
    assert "at plan 1, prediction (4 ms: 0 prefill + 1 decode tokens" in found.divergence
    assert "measurement (10 ms: 10 prefill + 0 decode tokens" in found.divergence
    assert "only in the prediction: job 0; only in the measurement: job 1" in found.divergence


def test_a_shorter_log_diverges_at_its_end(make: Maker) -> None:
    whole = make("a", TWO)
    short = replace(whole, plans=whole.plans.iloc[:-1])
    found = compare(whole, short).plans
    assert (found.common, found.share) == (len(whole.plans) - 1, (len(whole.plans) - 1) / 4)
    assert found.divergence is not None and "measurement has ended" in found.divergence


def test_a_plan_played_back_frees_what_the_engine_had_returned(make: Maker) -> None:
    compute = ["compute", 0, "compute", False, [[1, 1]], [], []]
    freed = ["free", [7, "kv", 0, 0, "gpu", 0]]

    def with_log(ops: list[object], returned: list[int]) -> Run:
        run = make("a", TWO)
        bodies = [json.dumps({"ops": ops, "restart": [], "refuse": []})] * len(run.plans)
        rows = run.plans.assign(body=bodies, returned=[returned] * len(bodies))
        return replace(run, plans=rows)

    native, replayed = with_log([compute], [7]), with_log([freed, compute], [])
    assert compare(replayed, native).plans.divergence is None
    assert compare(with_log([compute, freed], []), native).plans.common == 0
    assert compare(with_log([freed, compute], [8]), native).plans.common == 0


def test_a_meters_reading_stands_beside_the_prediction(make: Maker) -> None:
    found = compare(make("a"), make("b", backend="cpu")).memory
    rows = found[found["kind"].eq("measured")]
    assert rows["stat"].tolist() == ["peak", "mean"] and (rows["error"] == 0).all()


def test_workspace_is_compared_over_measured_launches(make: Maker) -> None:
    """One launch in three is measured, with a prediction 10 % too large, the last one 100 %."""
    predicted, measured = make("a"), make("b", backend="cpu")
    nbytes = 100.0 + measured.steps["step"].where(measured.steps["step"] % 3 == 0)
    guess = (100 + predicted.steps["step"]) * 1.1
    guess[nbytes.last_valid_index()] = 2 * nbytes.max()
    predicted = replace(predicted, steps=predicted.steps.assign(peak_bytes=guess))
    measured = replace(measured, steps=measured.steps.assign(peak_bytes=nbytes))
    found = compare(predicted, measured).memory
    rows = found[found["kind"].eq("workspace")].set_index("stat")
    assert rows.loc["peak", ["prediction", "measurement"]].tolist() == [
        int(2 * nbytes.max()),
        nbytes.max(),
    ]
    errors = [0.1] * (nbytes.count() - 1) + [1.0]
    assert rows.loc["p90 |error|", "error"] == pytest.approx(np.quantile(errors, 0.9))
    assert "peak workspace gpu:0" in table(compare(predicted, measured))
    assert "workspace" not in set(compare(make("c"), measured).memory["kind"]), "predicted by none"


def test_different_traces_are_refused(make: Maker) -> None:
    base = make("a", TWO)
    with pytest.raises(ValueError, match=r"different traces .hashes differ"):
        compare(base, make("b", TWO, provenance={"trace_hash": "other"}))
    same = {"trace_hash": base.provenance["trace_hash"]}
    with pytest.raises(ValueError, match=r"1 requests are in one only .request 2 in c"):
        three = replace(TWO, arrivals_ns=(0, 0, 0), prompts=(10, 10, 9), outputs=(1, 1, 1))
        compare(base, make("c", three, provenance=same))
    with pytest.raises(ValueError, match="request 1 has 10 prompt tokens in one, 11 in the other"):
        compare(base, make("d", TWO, prompts=(10, 11), provenance=same))


def test_only_requests_finished_in_both_are_joined(make: Maker) -> None:
    a = make("a", TWO)
    part = replace(a, requests=a.requests.assign(status=["finished", "unfinished"]))
    assert compare(part, a).requests.index.tolist() == [0]


def test_distances_are_those_of_scipy() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        a, b = rng.exponential(1.0, 50), rng.exponential(1.2, 37)
        b[:5] = a[:5]  # ties
        assert distance.ks(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic, abs=1e-12)
        expected = stats.wasserstein_distance(a, b) / b.mean()
        assert distance.wasserstein(a, b) == pytest.approx(expected, abs=1e-12)


def test_relative_error_is_signed_and_defined_at_zero() -> None:
    assert distance.relative_error(0.9, 1.0) == pytest.approx(-0.1)
    assert distance.relative_error(0.0, 0.0) == 0.0
    assert np.isnan(distance.relative_error(1.0, 0.0))
    assert distance.relative_error(0.0, 2.0) == -1.0


def test_drift_is_the_largest_departure_of_a_probe(make: Maker) -> None:
    assert drift(make("none", TWO)) is None
    probed = make("p", TWO, provenance={"probe_ratios": [1.01, 0.98]})
    assert drift(probed) == pytest.approx(0.02)
    named = make("q", TWO, provenance={"probe_ratios": {"gemm": 1.03}})
    assert drift(named) == pytest.approx(0.03)


def test_a_missing_trace_is_refused_with_the_remedy(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise ValueError("trace.path=there: no such file")

    monkeypatch.setattr("tandem.wiring.experiment.run_experiment", gone)
    run = replace(make("a", TWO), config={"budget": {}}, provenance={"kv_pages": 9})
    with pytest.raises(Usage, match=r"\(trace\.path=there: no such file\); try --no-replay"):
        replay_of(run, run, tmp_path / "replay")


def test_a_runs_folder_adds_no_trust_to_its_replay(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trusted modules and configuration folders come from the command, never from the run."""
    points: list[Any] = []
    monkeypatch.setattr(
        "tandem.wiring.experiment.run_experiment", lambda point, _: points.append(point)
    )
    claimed: dict[str, Any] = {"kv_pages": 9, "config_folders": [str(tmp_path / "evil")]}
    run = replace(make("a", TWO), config={"budget": {}, "trusted": ["os"]}, provenance=claimed)
    replay_of(run, run, tmp_path / "replay")
    replay_of(run, run, tmp_path / "replay", [tmp_path], ["fractions"])
    assert [(p.config["trusted"], p.folders) for p in points] == [
        ([], ()),
        (["fractions"], (tmp_path,)),
    ]


def test_a_replay_replaces_replays_only(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.wiring.experiment.run_experiment", lambda *_: None)
    run = replace(make("a", TWO), config={"budget": {}}, provenance={"kv_pages": 9})
    theirs = write(tmp_path / "theirs-replay")
    with pytest.raises(Usage, match=r"theirs-replay: the replay belongs there.*never overwritten"):
        replay_of(run, run, theirs)
    assert load(theirs).requests["status"].eq("finished").all()
    (theirs / "config.yaml").write_text("replayed: /measured\n", encoding="utf-8")
    replay_of(run, run, theirs)
    assert not theirs.exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("status.json", None, "is not a run folder"),
        ("status.json", json.dumps({"status": "failed", "error": "boom\nx"}), "failed: boom x"),
        ("status.json", json.dumps({"status": "running"}), "status running: no reason recorded"),
        ("provenance.json", None, "has no provenance.json"),
        ("provenance.json", "{", "is not JSON"),
        ("provenance.json", "[]", "holds no JSON object"),
        ("config.yaml", None, "has no config.yaml"),
        ("config.yaml", "a: 1\nb: [", "config.yaml: not YAML at line 2, column 5"),
        ("plans.parquet", None, "has no plans.parquet"),
    ],
)
def test_load_says_in_one_line_what_is_wrong(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    folder = write(tmp_path / "run")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_load_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        load(tmp_path / "nowhere")


def test_load_refuses_foreign_tables(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write(tmp_path / "run") / "plans.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), path)
    with pytest.raises(ValueError, match=f"schema version 99, this Tandem reads {SCHEMA_VERSION}"):
        load(path.parent)
    pq.write_table(table.drop_columns("body"), path)
    with pytest.raises(ValueError, match="lacks column body"):
        load(path.parent)
    wrong = table.set_column(0, "step", table["step"].cast(pa.string()))
    pq.write_table(wrong, path)
    with pytest.raises(ValueError, match="column step is string, not int64"):
        load(path.parent)
