"""Logs of vLLM 0.19: our engine makes vLLM's decisions on them, and the costs meet the bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm_logs import (
    CASES,
    COLUMNS,
    MEMORY,
    NULL_PAGES,
    PAGE,
    PLAIN,
    RUN_AHEAD,
    STEP_TOKENS,
    Log,
    Simulated,
    latencies,
    read_log,
    simulate,
)
from tests.vllm_reference import Vllm

SMALL, LARGE = CASES


@pytest.fixture(
    scope="module",
    params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)],
    ids=lambda case: case.device,
)
def log(shared: Path, request: pytest.FixtureRequest) -> Log:
    return read_log(shared / "data", request.param)


@pytest.fixture(scope="module")
def keeping(log: Log) -> Simulated:
    """Our run of a log with pages kept, once for all that is asked of it."""
    return simulate(log, log.cost(), log.case.pages, MEMORY)


def test_the_engine_decides_as_vllm_does_on_its_own_log(log: Log, keeping: Simulated) -> None:
    assert decided_as_vllm(log, keeping, keeps=True).reused_tokens > 10_000


@pytest.mark.slow
def test_the_engine_decides_as_vllm_does_where_no_page_is_kept(log: Log) -> None:
    plain = simulate(log, log.cost(), log.case.pages, PLAIN)
    assert decided_as_vllm(log, plain, keeps=False).reused_tokens == 0


def decided_as_vllm(log: Log, ours: Simulated, keeps: bool) -> Vllm:
    """Checks a run against vLLM's loop with the same costs, which it returns."""
    case, cost = log.case, log.cost()
    given = (case.pages - NULL_PAGES, PAGE.tokens, cost.shape_ns, STEP_TOKENS, case.sequences)
    vllm = Vllm(*given, RUN_AHEAD, prefix_caching=keeps)
    expected = vllm.run(log.requests)
    assert vllm.took_from_done == 0, "the one case in which they may differ"
    assert (vllm.restarts > 100) == (case.device == "RTX4090")
    assert ours.times == expected
    figures = (ours.steps, ours.restarts, ours.cached_tokens)
    assert figures == (vllm.steps, vllm.restarts, vllm.reused_tokens)
    return vllm


def test_with_pages_kept_the_logged_means_are_met(log: Log, keeping: Simulated) -> None:
    found = latencies(log, keeping.times)
    for name, column in COLUMNS.items():
        error = found[name].mean() / log.measured[column].mean() - 1
        assert abs(error) * 100 < log.case.bars[name], f"{name} is {error:+.2%} off"
