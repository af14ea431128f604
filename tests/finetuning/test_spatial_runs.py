"""Whole runs on two compute lanes: tokens, losses and adapters are those of one lane."""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import pytest

from engine.contract.plan import SECOND_LANE
from tests.finetuning.test_co_serving_runs import (
    BACKENDS,
    SMALL,
    TIGHT,
    UNFUSED,
    Run,
    check_tokens,
    run,
    run_of,
)
from tests.training.trainings import differing

pytestmark = pytest.mark.ci

SPATIAL = (
    *("policy=spatial", "scheduling.serving.token_budget=40"),
    *[word for word in SMALL if not word.startswith(("policy=", "scheduling."))],
)
LIMITED = ("policy=spatial_limited", *SMALL[1:])
WORDS = {"spatial": SPATIAL, "limited": LIMITED}


def lanes(found: Run) -> set[str]:
    return {row["lane"] for row in found.recorder.tables()["steps"].to_pylist()}


@pytest.mark.parametrize("name", WORDS)
def test_equal_launches_give_equal_bits_on_every_clock(name: str) -> None:
    words = WORDS[name]
    expected, first = run_of("sim", words), run_of("lockstep", words)
    assert SECOND_LANE in lanes(expected) and first.log == expected.log
    assert not any(math.isnan(loss) for loss in first.losses)
    for backend in BACKENDS[1:]:
        found = run_of(backend, words)
        assert found.log == first.log and SECOND_LANE in lanes(found)
        assert not differing(found.result, first.result)
        assert found.outputs == first.outputs


def test_another_lane_changes_no_bits() -> None:
    """Windows that are launches of their own, beside what is served or behind it."""
    assert not differing(run_of("lockstep", LIMITED).result, run("lockstep", *UNFUSED).result)


@pytest.mark.broad(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WORDS)
def test_requests_get_the_tokens_of_generate_in_little_memory(name: str, backend: str) -> None:
    found = run_of(backend, (*WORDS[name], *TIGHT))
    check_tokens(found)
    roomy = run_of("lockstep", (*WORDS[name], *TIGHT, "budget.kv_pages=400"))
    assert found.losses == pytest.approx(roomy.losses, rel=1e-6)


def test_offloaded_on_another_lane_gives_equal_bits() -> None:
    kept, away = (
        run_of("lockstep", (*SPATIAL, f"planner.modes={mode}")) for mode in ("keep", "offload")
    )
    assert not differing(away.result, kept.result)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_measured_lanes_take_turns_and_say_so(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = run_of(backend, (*SPATIAL, "seed=1"))
    assert "one thread runs both compute lanes in turn" in caplog.text
    spans = sorted(
        (row["start_ns"], row["end_ns"])
        for row in found.recorder.tables()["steps"].to_pylist()
        if row["lane"].startswith("compute")
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
