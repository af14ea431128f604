"""Logs of vLLM 0.19: our engine makes vLLM's decisions on them, and the costs meet the bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm_logs import (
    CASES,
    COLUMNS,
    PAGE,
    RUN_AHEAD,
    STEP_TOKENS,
    Case,
    by_engine,
    by_reference,
    latencies,
    read_log,
)
from tests.vllm_reference import Vllm


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.device)
def test_the_engine_decides_as_vllm_does_on_its_own_log(shared: Path, case: Case) -> None:
    log = read_log(shared / "data", case)
    cost = log.cost()
    vllm = Vllm(*(case.pages, PAGE.tokens, cost.shape_ns, STEP_TOKENS, case.sequences, RUN_AHEAD))
    expected = vllm.run(log.requests)
    assert vllm.took_from_done == 0, "the one case in which they may differ"
    assert (vllm.restarts > 100) == (case.device == "RTX4090")
    assert by_engine(log, cost, case.pages)[0] == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.device)
def test_with_pages_kept_the_logged_means_are_met(shared: Path, case: Case) -> None:
    log = read_log(shared / "data", case)
    found = latencies(log, by_reference(log, log.cost(), case.pages)[0])
    for name, column in COLUMNS.items():
        error = found[name].mean() / log.measured[column].mean() - 1
        assert abs(error) * 100 < case.bars[name], f"{name} is {error:+.2%} off"
