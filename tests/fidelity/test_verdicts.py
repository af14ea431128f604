"""The bars of fidelity: what passes, what is widened by reruns, and what is not judged."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.fidelity import (
    COLUMNS,
    FIGURES,
    Fidelity,
    JudgedLoad,
    bars,
    counts,
    judged,
    judgement,
)
from analysis.pages.fidelity_page import headline


def row(figure: str, error: float = 0.0, spread: float = 0.0) -> dict[str, object]:
    return {"figure": figure, "measured": 1.0, "error": error, "rerun_iqr": spread}


def used(figure: str, error: float, spread: float = 0.0, load: float = 0.5) -> float:
    table = pd.DataFrame([row(figure, error, spread)])
    return float(judged(table, load <= 0.5)["used"].iloc[0])


@pytest.mark.parametrize(
    ("figure", "bar"),
    [
        ("request_throughput", 0.02),
        ("mean_tpot_s", 0.05),
        ("mean_e2e_s", 0.05),
        ("mean_ttft_s", 0.10),
        ("kv_peak_pages", 0.03),
    ],
)
def test_a_bar_holds_for_errors_of_both_signs(figure: str, bar: float) -> None:
    for sign in (-1, 1):
        assert judgement(used(figure, sign * bar)) == "pass"
        assert judgement(used(figure, sign * (bar + 1e-6))) == "fail"


@pytest.mark.parametrize(("spread", "bar"), [(0.01, 0.05), (0.07, 0.07), (0.4, 0.10)])
def test_latencies_are_held_to_what_reruns_vary_by_up_to_ten_percent(
    spread: float, bar: float
) -> None:
    for figure in ("mean_tpot_s", "mean_e2e_s"):
        assert bars(row(figure, spread=spread), True) == bar
    for figure, fixed in (("request_throughput", 0.02), ("kv_peak_pages", 0.03)):
        assert bars(row(figure, spread=spread), True) == fixed, "the spread widens no other bar"


def test_ttft_is_judged_up_to_half_the_capacity_and_percentiles_never() -> None:
    assert judgement(used("mean_ttft_s", 0.5, load=0.5)) == "fail"
    assert judgement(used("mean_ttft_s", 0.5, load=0.8)) == ""
    unjudged = [figure for figure in FIGURES if figure.startswith("p")]
    assert len(unjudged) == 9 and all(bars(row(figure), True) is None for figure in unjudged)


def test_a_run_counts_up_to_three_percent_of_drift() -> None:
    assert counts(0.03) and not counts(0.0301)


def load_with(*rows: tuple[str, float, float]) -> JudgedLoad:
    table = pd.DataFrame(
        [("50 %", figure, value, error, error, 0.0) for figure, value, error in rows],
        columns=COLUMNS,
    )
    return JudgedLoad("50 %", 0.5, 2.0, judged(table, True), pd.DataFrame())


def test_a_headline_names_what_fails() -> None:
    good = Fidelity(4.0, (load_with(("request_throughput", 2.0, 0.001)),))
    assert headline(good).startswith("Every bar holds. At 50 % of the capacity: throughput +0.1 %.")
    bad = load_with(("request_throughput", 2.0, 0.03), ("kv_peak_replayed_equal", 0.0, 0.0))
    told = headline(Fidelity(4.0, (bad,)))
    assert told.startswith(
        "Beyond the bar: throughput at 50 %, peak KV of replayed plans at 50 %. At 50 %"
    )


def test_too_few_steady_reruns_fail() -> None:
    load = load_with(("steady_reruns", 2.0, 2 / 5 - 1))
    assert load.failed == ["steady_reruns"] and np.isinf(load.table["used"]).all()
    assert "no steady rerun" in headline(Fidelity(4.0, (load,)))
