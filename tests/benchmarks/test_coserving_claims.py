"""The claims of co-serving: their judges, and what they measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.fidelity import DEVICE_PEAK, FINETUNED, KV_PEAK
from analysis.run import Run, load
from benchmarks.coserving import adapters as adapters_claim
from benchmarks.coserving import coserving_fidelity as fidelity
from benchmarks.coserving import feedback_fidelity, record_reuse, recording_cost
from benchmarks.coserving import token_deadlines as deadlines
from benchmarks.coserving.host_share import host_share
from benchmarks.coserving.memory_split import SPLITS, foreseen, real, smallest_split
from benchmarks.coserving.token_deadlines import FixedRule, SimulatedRule
from tandem.config.compose import composed
from tandem.wiring.run_spec import run_spec_of
from tests.support.synthetic import MS, TWO, write

BARS = {FINETUNED: 0.05, "mean_tpot_s": 0.05, KV_PEAK: 0.03, DEVICE_PEAK: 0.03}
GOOD = {figure: 0.01 for figure in BARS} | {"mean_ttft_s": 0.02, "steady_reruns": 0.0}


def report(
    errors: dict[str, float | None], load: float = 0.5, failed: tuple[str, ...] = ()
) -> dict[str, Any]:
    bars = BARS | {"mean_ttft_s": 0.10}
    rows = [
        {"figure": f, "measured": 1.0, "error": error, "worst_rerun": error, "bar": bars.get(f)}
        for f, error in errors.items()
    ]
    return {"loads": [{"load": load, "failed": [*failed], "figures": rows}]}


def worst(found: dict[str, Any], load: float = 0.5) -> float:
    return float(fidelity.judged("budget", found, (load,))["used"].max())


CALIBRATIONS = {
    "record_reuse": (*record_reuse.LEARNING, *record_reuse.CALIBRATED),
    "recording_cost": (*recording_cost.NEVER, *recording_cost.MODELS[recording_cost.JUDGED]),
    "feedback_fidelity": feedback_fidelity.LEARNS_ALONE,
    **{f"feedback_fidelity {k}": (*feedback_fidelity.SERVED, *words)
       for k, words in feedback_fidelity.POLICIES.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_claims_of_records_calibrate_on_runs_that_fit(name: str) -> None:
    assert run_spec_of(composed([*CALIBRATIONS[name], "backend=cpu"])).work


def test_medians_within_the_bars_pass() -> None:
    assert worst(report(GOOD)) == pytest.approx(1 / 3)  # 1 % of the peaks' 3 %


@pytest.mark.parametrize(("figure", "bar"), [*BARS.items(), ("mean_ttft_s", 0.10)])
def test_a_median_beyond_its_bar_fails(figure: str, bar: float) -> None:
    assert worst(report(GOOD | {figure: -1.01 * bar})) == pytest.approx(1.01)


def test_ttft_is_judged_at_half_the_capacity_alone() -> None:
    assert worst(report(GOOD | {"mean_ttft_s": 0.7}, 0.8), 0.8) < 1


def test_what_reruns_vary_by_widens_the_bar_of_tpot() -> None:
    found = report(GOOD | {"mean_tpot_s": 0.07})
    for row in found["loads"][0]["figures"]:
        if row["figure"] == "mean_tpot_s":
            row["bar"] = 0.08
    assert worst(found) == pytest.approx(7 / 8)


@pytest.mark.parametrize("figure", [*BARS])
def test_a_figure_that_lacks_or_is_no_number_fails(figure: str) -> None:
    assert worst(report({f: e for f, e in GOOD.items() if f != figure})) == math.inf
    assert worst(report(GOOD | {figure: None})) == math.inf


def test_too_few_reruns_and_a_lacking_load_fail() -> None:
    assert worst(report(GOOD, failed=("steady_reruns",))) == math.inf
    assert worst(report(GOOD), load=0.8) == math.inf
    assert worst({}) == math.inf


@pytest.mark.slow
def test_every_policy_of_the_claim_can_be_built(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_SHARED", str(shared.resolve()))
    names = set()
    for policy in fidelity.POLICIES:
        words = [*fidelity.settings_of(policy), "limit=2", f"cache={tmp_path}/cache"]
        spec = run_spec_of(composed(words))
        assert spec.trainees[0].job.finetunes and spec.trainees[0].job.until_served
        names.add(type(spec.policy.scheduling).__name__)  # type: ignore[attr-defined]
    assert len(names) == 3


def toy(folder: Path, *token_ms: Sequence[int]) -> Run:
    """A run whose requests get their tokens at these moments."""
    run = load(write(folder, replace(TWO, outputs=(1,) * len(token_ms[:2]))))
    times = [np.array(own) * MS for own in token_ms]
    rows = run.requests.iloc[[0] * len(times)].assign(request_id=range(len(times)), token_ns=times)
    return replace(run, requests=rows.reset_index(drop=True))


def test_tokens_are_due_by_the_first_of_their_request(tmp_path: Path) -> None:
    found = deadlines.in_time(toy(tmp_path / "run", [5, 15, 26, 35], [7]), 0.010)
    assert found[0].tolist() == [True, False, True], "a late token may be followed by one in time"
    assert not len(found[1])


def test_tokens_that_were_late_when_served_alone_do_not_count(tmp_path: Path) -> None:
    alone = toy(tmp_path / "alone", [0, 10, 30, 30], [0, 10])
    beside = toy(tmp_path / "beside", [50, 61, 90, 80], [50, 60])
    assert deadlines.kept_share(beside, alone, 0.010) == pytest.approx(2 / 3)
    assert deadlines.kept_share(alone, alone, 0.010) == 1
    assert math.isnan(deadlines.kept_share(beside, alone, 0.001))


def test_rules_are_measured_from_the_most_finetuning_on() -> None:
    sweep = [
        SimulatedRule(FixedRule(64, 1), 100.0, (1.0,)),
        SimulatedRule(FixedRule(128, 1), 200.0, (0.985,)),
        SimulatedRule(FixedRule(256, 1), 300.0, (0.9,)),
        SimulatedRule(FixedRule(512, 1), 400.0, (float("nan"),)),
    ]
    order = [rule.budget for rule in deadlines.measured_order(sweep, 0)]
    assert order == [128, 64, 256, 512]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ((0.995, 0.985, 0.99), 1.0),
        ((1.0, 1.2, 1.0), 0.0),
        ((0.98, 1.0, 1.0), 2.0),
        ((1.0, 0.94, 1.0), 2.0),
        ((1.0, 1.0, 0.97), 3.0),
        ((1.0, float("nan"), 1.0), math.inf),
    ],
)
def test_the_worst_of_three_bars_counts(given: tuple[float, float, float], used: float) -> None:
    assert deadlines.judged("x", *given)["used"].max() == pytest.approx(used)


def test_the_best_fixed_rule_keeps_enough_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first ones that are measured the best; more are measured until one keeps enough."""
    kept = {256: 0.98, 128: 0.995, 64: 1.0}
    seen = list[int]()

    class Rate:
        def alone(self) -> int:
            return 0

        def beside(self, settings: Sequence[str], name: str) -> int:
            seen.append(int(name.split("-")[1]))
            return seen[-1]

    monkeypatch.setattr(deadlines, "kept_share", lambda done, alone, slo_s: kept[done])
    monkeypatch.setattr(deadlines, "finetuned", float)
    order, rate = [FixedRule(n, 1) for n in kept], Rate()
    assert deadlines.best_fixed(rate, order, 0.01, 1) == (FixedRule(128, 1), 128.0)  # type: ignore[arg-type]
    assert seen == [256, 128]
    kept[128] = 0.5
    assert deadlines.best_fixed(rate, order[:2], 0.01, 1) == (None, 0.0)  # type: ignore[arg-type]


def test_the_hosts_share_is_of_its_time_and_that_of_launches(tmp_path: Path) -> None:
    run = load(write(tmp_path / "run", replace(TWO, host_ns=MS)))
    steps = run.steps
    launches_ns = (steps["end_ns"] - steps["start_ns"]).sum()
    assert host_share(run) == pytest.approx(len(steps) * MS / (len(steps) * MS + launches_ns))


def test_a_split_is_bisected_to_the_page() -> None:
    policy = replace(SPLITS[1], most=512)
    tried = list[int]()

    def fits(settings: Sequence[str]) -> bool:
        tried.append(int(settings[-1].partition("=")[2]))
        return tried[-1] >= 77

    assert smallest_split(policy, fits) == 77 and len(tried) <= 9


@pytest.mark.slow
@pytest.mark.parametrize("policy", SPLITS, ids=lambda policy: policy.name)
def test_splits_that_fit_and_do_not_are_foreseen(policy: Any) -> None:
    found = [
        (foreseen(words), real(words) > 0)
        for words in map(policy.settings_for, (policy.tried[0], policy.tried[-1]))
    ]
    assert found == [(False, False), (True, True)]


def test_bytes_of_an_adapter_are_those_of_the_run() -> None:
    words = [*adapters_claim.ADAPTERS, "adapters.count=2", "model=micro_llama", "limit=2"]
    found = run_spec_of(composed(words))
    sizes = {adapter.nbytes for adapter in found.room.layout.adapters}
    assert sizes == {adapters_claim.formula_bytes(found.spec)}


@pytest.mark.ci
def test_loads_of_adapters_are_equal_on_every_backend() -> None:
    words = [*adapters_claim.ADAPTERS, "model=micro_llama", "adapters.count=6", "limit=6"]
    assert adapters_claim.are_loads_equal([*words, "adapters.zipf=0.2"], 6)
