"""The bars of fidelity: what passes, what is widened by reruns, and what is not judged."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.distance import STEADY
from analysis.fidelity import (
    COLUMNS,
    DEVICE_PEAK,
    DEVICE_PEAK_BAR,
    FIGURES,
    FINETUNED,
    FINETUNED_BAR,
    JUDGED,
    KV_PEAK_BAR,
    LATENCY_BAR,
    NEVER_ABOVE,
    THROUGHPUT_BAR,
    TTFT_BAR,
    TTFT_UP_TO,
    Fidelity,
    JudgedLoad,
    Pair,
    Rerun,
    bars,
    counts,
    judged,
    judgement,
    load_of,
    table_of,
)
from analysis.pages.fidelity_page import headline, write_fidelity_report
from analysis.run import Run, load
from tandem.cli.fidelity import told
from tandem.fidelity.protocol import PACES
from tests.support.synthetic import TWO, write


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
        ("finetune_tokens_per_s", 0.05),
        ("device_peak_bytes", 0.03),
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
    others = (FINETUNED, 0.05), (DEVICE_PEAK, 0.03)
    for figure, fixed in (("request_throughput", 0.02), ("kv_peak_pages", 0.03), *others):
        assert bars(row(figure, spread=spread), True) == fixed, "the spread widens no other bar"


def test_ttft_is_judged_up_to_half_the_capacity_and_percentiles_never() -> None:
    assert judgement(used("mean_ttft_s", 0.5, load=0.5)) == "fail"
    assert judgement(used("mean_ttft_s", 0.5, load=0.8)) == ""
    unjudged = [figure for figure in FIGURES if figure.startswith("p")]
    assert len(unjudged) == 9 and all(bars(row(figure), True) is None for figure in unjudged)


@pytest.mark.parametrize("figure", ["request_throughput", "mean_tpot_s", "kv_peak_pages"])
def test_an_error_that_is_no_number_fails_its_bar(figure: str) -> None:
    """The prediction lacks a figure that was measured, so nothing shows that the bar holds."""
    assert judgement(used(figure, float("nan"))) == "fail"
    assert judgement(used("p99_e2e_s", float("nan"))) == "", "without a bar there is no verdict"


def test_a_run_counts_up_to_three_percent_of_drift() -> None:
    assert counts(0.03) and not counts(0.0301)


def test_the_guide_tells_no_percentage_but_those_of_the_rules() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/guide/fidelity.md").read_text()
    rules = (THROUGHPUT_BAR, KV_PEAK_BAR, TTFT_BAR, LATENCY_BAR, NEVER_ABOVE, TTFT_UP_TO, STEADY)
    rules += (FINETUNED_BAR, DEVICE_PEAK_BAR, max(PACES) - 1)
    found = {float(number) for number in re.findall(r"([\d.]+) %", text)}
    assert found == {round(100 * rule, 6) for rule in rules}


def load_with(*rows: tuple[str, float, float]) -> JudgedLoad:
    table = pd.DataFrame(
        [("50 %", figure, value, error, error, 0.0) for figure, value, error in rows],
        columns=COLUMNS,
    )
    reruns = pd.DataFrame(columns=["rerun", "counts"])
    return JudgedLoad("50 %", 0.5, 2.0, judged(table, True), reruns)


def test_a_headline_names_what_fails() -> None:
    good = Fidelity(4.0, (load_with(("request_throughput", 2.0, 0.001)),))
    assert headline(good).startswith("Every bar holds. At 50 % of the capacity: throughput +0.1 %.")
    bad = load_with(("request_throughput", 2.0, 0.03), ("kv_peak_replayed_equal", 0.0, 0.0))
    found = headline(Fidelity(4.0, (bad,)))
    assert found.startswith(
        "Beyond the bar: throughput at 50 %, peak KV of replayed plans at 50 %. At 50 %"
    )


def test_too_few_steady_reruns_fail() -> None:
    load = load_with(("steady_reruns", 2.0, 2 / 5 - 1))
    assert load.failed == ["steady_reruns"] and np.isinf(load.table["used"]).all()
    assert "no steady rerun" in headline(Fidelity(4.0, (load,)))


def rerun(
    folder: Path, number: int, moved: float, pace: float = 1.0, outputs: Sequence[int] = TWO.outputs
) -> Rerun:
    """A run of the toy engine with memory rows at issues, and its prediction by slower steps."""
    found = []
    for name, factor in (("measured", 1.0), ("predicted", pace)):
        probed = {"probe_ratios": {"decode": 1 + moved}}
        toy = replace(TWO, provenance=probed, factor=lambda step, f=factor: f)
        run = load(write(folder / f"{name}{number}", toy, outputs=outputs))
        booked = run.memory.assign(cause="issue")
        found.append(replace(run, memory=pd.concat([run.memory, booked])))
    measured, predicted = found
    return Rerun(number, moved, Pair(measured, predicted, measured))


@pytest.mark.usefixtures("unrendered")
def test_a_page_shows_verdicts_and_discarded_reruns(tmp_path: Path) -> None:
    """Steps that are predicted 4 % too long: the toy's TPOT and E2E follow, its KV does not."""
    reruns = [rerun(tmp_path, 0, 0.5), rerun(tmp_path, 1, 0.0, 1.04)]
    found = Fidelity(4.0, (load_of("50 %", 0.5, 2.0, reruns, 1),), 3, 2)
    page = write_fidelity_report(found, tmp_path / "report", "tandem fidelity", {"commit": "abc"})
    text = page.read_text()
    counted = "Discarded on an unsteady machine: calibrations 3, capacity runs 2, judged runs 1."
    assert counted in text and counted in told(found)
    assert "Beyond the bar: throughput at 50 %." in text and "abc" in text
    assert text.count("no: the machine drifted") == 1
    said = json.loads((page.parent / "fidelity.json").read_text())
    assert said["discarded"] == {"calibrations": 3, "capacity_runs": 2, "judged_runs": 1}
    assert said["loads"][0]["steady_reruns"] == 1
    errors = {row["figure"]: row for row in said["loads"][0]["figures"]}
    assert errors["mean_tpot_s"]["error"] == pytest.approx(0.04)
    assert errors["request_throughput"]["verdict"] == "fail"
    assert errors["kv_peak_pages"]["error"] == 0 and errors["p99_ttft_s"]["bar"] is None


@pytest.mark.usefixtures("unrendered")
def test_a_page_without_a_steady_rerun_says_so(tmp_path: Path) -> None:
    found = Fidelity(4.0, (load_of("50 %", 0.5, 2.0, [rerun(tmp_path, 0, 0.5)], 1),))
    page = write_fidelity_report(found, tmp_path / "report", "tandem fidelity", {})
    assert "Beyond the bar: steady reruns at 50 %" in page.read_text()
    assert "Percentiles" not in page.read_text() and found.failed == ["steady reruns at 50 %"]


@pytest.mark.usefixtures("unrendered")
def test_answers_of_one_token_are_judged_without_tpot(tmp_path: Path) -> None:
    """TPOT is the time between tokens: one token has none, and the page says so."""
    reruns = [rerun(tmp_path, 0, 0.0, outputs=(1, 1)), rerun(tmp_path, 1, 0.5, outputs=(1, 1))]
    found = Fidelity(4.0, (load_of("50 %", 0.5, 2.0, reruns, 1),))
    page = write_fidelity_report(found, tmp_path / "report", "tandem fidelity", {})
    note = "Not judged, as no request has it: mean TPOT."
    assert headline(found).startswith("Every bar holds.") and note in headline(found)
    assert note in page.read_text() and note in told(found)
    figure = pd.read_csv(tmp_path / "report/figures/errors.csv")
    assert {*figure["figure"]} == {*JUDGED} - {"mean_tpot_s"}


def test_a_prediction_is_the_median_of_simulations(tmp_path: Path) -> None:
    """Three of steps 4 % too short, as they are and 10 % too long; one of them fails by itself."""
    paces = [rerun(tmp_path / str(pace), 0, 0.0, pace) for pace in (1.1, 0.96, 1.0)]
    others = tuple([one.pair.predicted for one in paces[1:]])
    pair = replace(paces[0].pair, varied=others)
    errors = table_of("50 %", [pair], 1).set_index("figure")["error"]
    assert errors["mean_tpot_s"] == pytest.approx(0)
    assert table_of("50 %", [replace(pair, varied=())], 1)["error"].max() > 0.09


def finetuning(run: Run, tokens: int, spare_bytes: int) -> Run:
    """A run beside which a job took so many tokens forward, and so many bytes of the device."""
    row = {"forward_tokens": tokens, "start_ns": 0, "last_ns": 1, "status": "finished"}
    row |= {"tokens": tokens}
    memory = run.memory.assign(free_bytes=run.memory["free_bytes"] - spare_bytes)
    return replace(run, memory=memory, samples=pd.DataFrame([row | {"restarts": 0}]))


@pytest.mark.usefixtures("unrendered")
def test_a_job_that_finetunes_is_judged_beside_what_is_served(tmp_path: Path) -> None:
    """6 % more tokens than were measured are beyond the bar; peaks are equal."""
    found = rerun(tmp_path, 0, 0.0)
    measured, predicted = (
        finetuning(run, tokens, 1000)
        for run, tokens in ((found.pair.measured, 100), (found.pair.predicted, 106))
    )
    one = replace(found, pair=Pair(measured, predicted, measured))
    load = load_of("50 %", 0.5, 2.0, [one], 1)
    assert load.figures == [*JUDGED, FINETUNED, DEVICE_PEAK] and load.failed == [FINETUNED]
    beside, peak = load.row(FINETUNED), load.row(DEVICE_PEAK)
    assert beside is not None and beside["error"] == pytest.approx(0.06)
    busy = 100_000 - measured.memory["free_bytes"].min()
    assert peak is not None and peak["measured"] == busy and peak["error"] == 0
    fidelity = Fidelity(4.0, (load,))
    assert "Beyond the bar: finetuned at 50 %." in headline(fidelity)
    assert "peak memory +0.0 %" in headline(fidelity) and "finetuned" in told(fidelity)
    page = write_fidelity_report(fidelity, tmp_path / "report", "tandem fidelity", {})
    assert {*pd.read_csv(page.parent / "figures/errors.csv")["figure"]} == {*load.figures}
    assert "tok/s" in page.read_text()


def test_what_is_served_alone_has_no_figure_of_finetuning(tmp_path: Path) -> None:
    load = load_of("50 %", 0.5, 2.0, [rerun(tmp_path, 0, 0.0)], 1)
    assert load.figures == [*JUDGED] and not load.undefined
    assert "finetuned" not in told(Fidelity(4.0, (load,)))
