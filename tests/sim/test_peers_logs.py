"""Logs of vLLM 0.19: the engine makes vLLM's decisions on them, and the costs meet the bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.vllm_logs import (
    CASES,
    COLUMNS,
    NULL_PAGES,
    PLAIN,
    RESERVES,
    Log,
    Simulated,
    latencies,
    read_log,
    simulate,
)
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.vllm_v1 import VllmV1
from tandem.config.build import Builder
from tandem.config.compose import composed
from tandem.wiring.run_spec import RunSpec, policy_of
from tests.support.vllm_reference import Vllm

SMALL, LARGE = CASES


@pytest.fixture(
    scope="module",
    params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)],
    ids=lambda case: case.device,
)
def log(
    shared: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Log:
    return read_log(shared.resolve() / "data", request.param, tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def keeping(log: Log) -> Simulated:
    """A simulated run of a log with prefix caching, shared by the tests."""
    return simulate(log.run_spec())


def test_the_engine_decides_as_vllm_does_on_its_own_log(log: Log, keeping: Simulated) -> None:
    assert decided_as_vllm(log, log.run_spec(), keeping, keeps=True).reused_tokens > 10_000


@pytest.mark.slow
def test_the_engine_decides_as_vllm_does_without_prefix_caching(log: Log) -> None:
    plain = log.run_spec(PLAIN)
    assert decided_as_vllm(log, plain, simulate(plain), keeps=False).reused_tokens == 0


def decided_as_vllm(log: Log, setting: RunSpec, ours: Simulated, keeps: bool) -> Vllm:
    """Checks a run against vLLM's loop with equal costs, and returns that loop."""
    case, page = log.case, setting.room.page
    pages = case.pages - NULL_PAGES
    cost: Any = setting.cost
    given = (pages, page.tokens, cost.shape_ns, 2048, case.sequences, 2)
    vllm = Vllm(*given, prefix_caching=keeps)
    expected = vllm.run(setting.requests)
    assert vllm.took_from_done == 0, "the one case in which the two may differ"
    assert (vllm.restarts > 100) == (case.device == "RTX4090")
    assert ours.times == expected
    figures = (ours.steps, ours.restarts, ours.cached_tokens)
    assert figures == (vllm.steps, vllm.restarts, vllm.reused_tokens)
    return vllm


def test_with_pages_kept_the_logged_means_are_met(log: Log, keeping: Simulated) -> None:
    found = latencies(log.run_spec().requests, keeping.times)
    for name, column in COLUMNS.items():
        error = found[name].mean() / log.measured[column].mean() - 1
        assert abs(error) * 100 < log.case.bars[name], f"{name} is {error:+.2%} off"


def test_judged_costs_come_from_the_profile_alone(log: Log) -> None:
    """No override of a judged run sets its costs; each ablation is an override."""
    assert not any(word.startswith("kernel_profile") for word in log.words)

    def cost(*words: str) -> Any:
        return log.run_spec(*(f"kernel_profile.{word}" for word in words)).cost

    assert cost().skew.default > 0 and cost().skew.by_bucket is None
    assert cost("skew=per_bucket").skew.by_bucket
    assert cost("skew=none").skew.default == 0
    shape = [1] * 33, [100] * 33, 33
    took, slow = cost().shape_ns(*shape), cost("step_ns=200_000").shape_ns(*shape)
    assert took < cost("graphs=true").shape_ns(*shape) < slow == took + 200_000
    assert cost("host_ns_per_plan=200_000").plan_ns(9) == 200_000


def test_the_named_policy_is_the_one_compared_with_vllm(log: Log) -> None:
    memory = PagedRestart(watermark=0.0, prompts="must_fit", gives_way=True, prefix_caching=True)
    assert log.run_spec().policy == Composed(VllmV1(2048, log.case.sequences), memory)
    assert policy_of(composed(["policy=vllm_v1"]).config, Builder()) == Composed(VllmV1(), memory)


def test_the_logged_block_count_lies_in_the_range_of_the_reserve(log: Log) -> None:
    if log.case is not SMALL:
        pytest.skip("the other engine's block count was not logged")
    most, least = (log.pages(reserve) for reserve in RESERVES)
    assert least <= log.case.pages <= most < 1.2 * least
