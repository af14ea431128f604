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
    Case,
    latencies,
    read_log,
    simulate,
)
from policies.paged_restart import PagedRestart
from tests.vllm_reference import Vllm


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(MEMORY, id="prefix_caching"),
        pytest.param(PLAIN, id="plain", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.device)
def test_the_engine_decides_as_vllm_does_on_its_own_log(
    shared: Path, case: Case, memory: PagedRestart
) -> None:
    log = read_log(shared / "data", case)
    cost, keeps = log.cost(), memory.prefix_caching
    given = (case.pages - NULL_PAGES, PAGE.tokens, cost.shape_ns, STEP_TOKENS, case.sequences)
    vllm = Vllm(*given, RUN_AHEAD, prefix_caching=keeps)
    expected = vllm.run(log.requests)
    assert vllm.took_from_done == 0, "the one case in which they may differ"
    assert (vllm.restarts > 100) == (case.device == "RTX4090")
    assert (vllm.reused_tokens > 10_000) == keeps
    ours = simulate(log, cost, case.pages, memory)
    assert ours.times == expected
    figures = (ours.steps, ours.restarts, ours.cached_tokens)
    assert figures == (vllm.steps, vllm.restarts, vllm.reused_tokens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.device)
def test_with_pages_kept_the_logged_means_are_met(shared: Path, case: Case) -> None:
    log = read_log(shared / "data", case)
    found = latencies(log, simulate(log, log.cost(), case.pages).times)
    for name, column in COLUMNS.items():
        error = found[name].mean() / log.measured[column].mean() - 1
        assert abs(error) * 100 < case.bars[name], f"{name} is {error:+.2%} off"
