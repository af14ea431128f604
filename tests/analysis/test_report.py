"""Reports: written whole or not at all, self-contained, and in accord with the numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import units, verdicts
from analysis.compare import Comparison, compare
from analysis.figures import plots, run_figures, timelines
from analysis.figures.style import RUNS
from analysis.pages import report
from analysis.pages.report import write_report, write_run_report
from analysis.pages.tables import compared_tables
from analysis.run import Run, load
from tests.support.synthetic import MS, TWO, Toy, write


def crowd() -> Toy:
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(60 * MS, 200)).astype(int).tolist()
    outputs = np.clip(rng.geometric(1 / 40, 200), 1, 300).tolist()
    prompts = rng.integers(8, 300, 200).tolist()
    return Toy(arrivals, prompts, outputs, prefill_ns=MS // 10, host_ns=MS // 2)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder, toy = tmp_path_factory.mktemp("runs"), crowd()
    jitter = np.random.default_rng(5).normal(1.04, 0.05, 100_000)
    fitted = {"cost_form": "table", "device": "<cpu> & co"}
    sim = load(write(folder / "sim", toy, provenance=fitted))
    ratios = {"probe_ratios": {"gemm": 1.01}}
    changes = {"backend": "cpu", "factor": lambda step: jitter[step], "provenance": ratios}
    cpu = load(write(folder / "cpu", toy, **changes))
    log = cpu.plans.to_dict("records")
    return compare(sim, cpu, load(write(folder / "replay", toy, plans=log)))


@pytest.fixture(scope="module")
def page(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(comparison, tmp_path_factory.mktemp("out") / "report")


def test_the_page_is_self_contained_and_small(comparison: Comparison, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text) < 1_000_000  # for 200 requests
    fetched = re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"|@import|url\((?!#)', text)
    assert fetched == []
    assert "&lt;cpu&gt; &amp; co" in text  # provenance is escaped
    runs = (comparison.prediction, comparison.measurement)
    assert f"tandem compare {runs[0].folder} {runs[1].folder}" in text


def test_the_terminal_shows_the_source_of_durations(comparison: Comparison) -> None:
    [line] = [
        x for x in verdicts.table(comparison).splitlines() if x.startswith("durations rest on")
    ]
    assert line.split()[-2:] == ["table", "measured"]


def test_the_page_is_well_formed(page: Path) -> None:
    open_tags: list[str] = []
    ids: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            ids.extend(value or "" for name, value in attrs if name == "id")
            if tag not in ("meta", "br", "link"):
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            ids.extend(value or "" for name, value in attrs if name == "id")

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    text = page.read_text(encoding="utf-8")
    Checker().feed(text)
    assert open_tags == []
    assert len(ids) == len(set(ids)) > 0  # figures do not borrow one another's clips
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_every_figure_has_its_numbers(page: Path) -> None:
    folder = page.parent / "figures"
    names = {path.stem for path in folder.glob("*.svg")}
    assert names == set(run_figures.TEXTS) == {path.stem for path in folder.glob("*.csv")}
    assert all(len(pd.read_csv(folder / f"{name}.csv")) > 0 for name in names)


def test_the_numbers_are_on_file(comparison: Comparison, page: Path) -> None:
    found = json.loads((page.parent / "comparison.json").read_text(encoding="utf-8"))
    assert found["plans"]["common"] == comparison.plans.common
    assert found["errors"][0]["error"] == comparison.error("ttft", "mean")
    assert len(found["split"]) == 4 and len(found["runs"]) == 3
    errors = pd.read_csv(page.parent / "errors.csv")
    assert errors["error"].to_numpy() == pytest.approx(comparison.errors["error"].to_numpy())


def test_a_report_replaces_a_report_and_nothing_else(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "compared", lambda *_: [])
    page = write_report(comparison, tmp_path / "report")
    (page.parent / "stale").write_text("")
    write_report(comparison, tmp_path / "report")
    assert not (page.parent / "stale").exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(ValueError, match="something other than a report"):
        write_report(comparison, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "mine"


def test_a_failed_report_leaves_nothing_behind(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of ink")

    monkeypatch.setattr(report, "compared", fail)
    with pytest.raises(RuntimeError):
        write_report(comparison, tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_one_run_has_a_report_too(tmp_path: Path) -> None:
    page = write_run_report(load(write(tmp_path / "two")), tmp_path / "report")
    text = page.read_text(encoding="utf-8")
    assert "tandem report" in text and "14.95 ms" in text  # p99 of TTFTs of 10 and 15 ms
    assert json.loads((page.parent / "metrics.json").read_text())["num_finished"] == 2


def without_a_finished_request(run: Run, status: str) -> tuple[Run, Run]:
    """The run with that status for all requests, with its steps and without."""
    nothing = replace(run, requests=run.requests.assign(status=status, token_ns=None))
    empty = replace(nothing, steps=run.steps[:0], plans=run.plans[:0], memory=run.memory[:1])
    return nothing, empty


@pytest.mark.broad(2)
@pytest.mark.parametrize("status", ["refused", "unfinished"])
def test_runs_without_a_finished_request_are_reported(
    tmp_path: Path, status: str, unrendered: None
) -> None:
    run = load(write(tmp_path / "two"))
    nothing, empty = without_a_finished_request(run, status)
    pairs = [(run, nothing)] if status == "unfinished" else [(nothing, run), (empty, empty)]
    for number, pair in enumerate(pairs):
        comparison = compare(*pair)
        assert "(undefined)" in verdicts.headline(comparison)
        assert write_report(comparison, tmp_path / f"report{number}").is_file()
        assert verdicts.table(comparison)
    assert write_run_report(empty, tmp_path / "single").is_file()


@pytest.mark.slow
def test_figures_without_any_point_become_pictures(tmp_path: Path) -> None:
    _, empty = without_a_finished_request(load(write(tmp_path / "two")), "refused")
    page = write_report(compare(empty, empty), tmp_path / "report")
    assert len(list((page.parent / "figures").glob("*.svg"))) >= 4


def test_the_headline_has_sizes_and_causes(comparison: Comparison) -> None:
    text = verdicts.headline(comparison)
    error = comparison.error("tpot", "mean")
    assert f"mean TPOT {abs(error) * 100:.1f} % too low" in text and error < 0
    assert f"the first {comparison.plans.common} of" in text
    rows = comparison.split.set_index("metric")
    assert verdicts.percent(float(rows.loc["mean e2e", "direct_share"])) in text
    assert "cost form table" in text and "drifted by 1.0 %" in text


def test_decisions_of_a_server_without_plans_are_not_compared(
    comparison: Comparison,
) -> None:
    silent = replace(comparison.plans, common=0, measurement=0)
    text = verdicts.headline(replace(comparison, plans=silent))
    assert "decisions are not compared" in text and "plans." not in text


def with_parts(
    comparison: Comparison, direct: float, consequence: float, rest: float
) -> Comparison:
    """The comparison with these parts of the error of the mean end-to-end latency, of 1 s."""
    parts = {"direct": direct, "consequence": consequence, "rest": rest}
    total = direct + consequence + (0.0 if rest != rest else rest)
    row = {"metric": "mean e2e", **parts, "total": total, "spread": float("nan")}
    row |= {f"{part}_share": value for part, value in parts.items()}
    row |= {"total_share": total, "explained": 1 - abs(rest) / abs(total)}
    row |= dict.fromkeys(("prediction", "retimed", "corrected"), 1 + total) | {"measurement": 1.0}
    return replace(comparison, split=pd.DataFrame([row]))


@pytest.mark.parametrize(
    ("direct", "consequence", "said"),
    [(0.09, -0.10, True), (-0.09, 0.02, True), (0.09, 0.10, False), (0.09, -0.002, False)],
)
def test_parts_of_opposite_signs_are_said_to_cancel(
    comparison: Comparison, direct: float, consequence: float, said: bool
) -> None:
    found = with_parts(comparison, direct, consequence, float("nan"))
    text, shown = verdicts.headline(found), verdicts.table(found)
    note = next(t.note for t in compared_tables(found) if "consequence" in t.title)
    assert ("opposite signs and cancel in part, which leaves" in text) is said
    assert ("cancel in part: mean e2e" in shown) is said
    assert ("cancel in part for mean e2e" in note) is said
    for word in (verdicts.percent(direct), verdicts.percent(consequence)):
        assert word in text and word in shown


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (0.004, "explain 96 % of the error."),
        (0.05, "explain 67 % of the error, something else the rest."),
        (-0.3, "explain none of the error, something else the rest."),
    ],
)
def test_the_headline_says_how_much_durations_explain(
    comparison: Comparison, rest: float, said: str
) -> None:
    found = with_parts(comparison, 0.06, 0.04, rest)
    text = verdicts.headline(found)
    assert said in text and f"the prediction is {verdicts.percent(rest)} off" in text
    assert f"rest {verdicts.percent(rest):>8}" in verdicts.table(found)
    assert "explain" not in verdicts.headline(with_parts(comparison, 0.06, 0.04, float("nan")))


def test_causes_of_what_reruns_hide_are_left_out(comparison: Comparison, tmp_path: Path) -> None:
    """Reruns that differ by more than the error: nothing is said of causes, and that is said."""
    a, b, played = comparison.prediction, comparison.measurement, comparison.replay
    other = b.requests.assign(**{n: b.requests[n] * 2 for n in ("first_token_ns", "finish_ns")})
    hidden = compare(a, b, played, reruns=[replace(b, requests=other)])
    assert hidden.within_spread == ("mean ttft", "mean tpot", "mean e2e")
    assert hidden.split["metric"].tolist() == ["peak kv"]
    said = "no more than the spread of 2 measurements, so its causes are left out"
    assert said in verdicts.headline(hidden) and "direct error" not in verdicts.headline(hidden)
    shown = verdicts.table(hidden)
    assert "within the spread of reruns: mean ttft, mean tpot, mean e2e" in shown
    note = next(t.note for t in compared_tables(hidden) if "consequence" in t.title)
    assert "Left out, as no more than the spread of 2 measurements: mean ttft" in note
    known = compare(a, b, played, reruns=[b])  # no spread at all hides nothing
    assert len(known.split) == 4 and "spread" not in verdicts.headline(known)
    assert "spread of reruns is not known" in verdicts.headline(comparison)


def test_drift_is_shown_beside_the_errors(comparison: Comparison) -> None:
    told = verdicts.table(comparison)
    assert "drift of the machine        +1.0 %\n\n" in told, "and the verdict ends the table"
    assert told.split("\n\n")[-1].replace("\n", " ").startswith("sim, predicted, against cpu")
    provenance = {**comparison.measurement.provenance, "probe_ratios": {"decode": 1.2}}
    moved = replace(comparison.measurement, provenance=provenance)
    assert "+20.0 %: errors of that size" in verdicts.table(replace(comparison, measurement=moved))


def test_headline_of_equal_runs(tmp_path: Path) -> None:
    run = load(write(tmp_path / "two"))
    text = verdicts.headline(compare(run, run))
    assert "right (within 0.05 %)" in text and "equal to the byte" in text
    assert "the same 4 decisions" in text


@pytest.mark.parametrize(
    ("metric", "error", "expected"),
    [
        ("output_throughput", 0.019, "good"),
        ("output_throughput", -0.03, "fair"),
        ("tpot", -0.05, "good"),
        ("tpot", 0.11, "poor"),
        ("memory", 0.04, "fair"),
        ("e2e", float("nan"), "undefined"),
    ],
)
def test_verdicts_follow_the_stated_limits(metric: str, error: float, expected: str) -> None:
    assert verdicts.verdict(metric, error) == expected


def test_amounts_carry_a_unit_of_their_size() -> None:
    assert units.amount(0.0123, "s") == "12.3 ms"
    assert units.amount(2e-5, "s") == "20 us"
    assert units.amount(3 * 2**20, "bytes") == "3 MiB"
    assert units.amount(1234.5, "tok/s") == "1,234 tok/s"
    assert units.amount(float("nan"), "s") == "n/a"


def test_the_terminal_table_fits(comparison: Comparison) -> None:
    lines = verdicts.table(comparison).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("mean tpot") and line.endswith(" o") for line in lines)


def test_memory_timeline_keeps_peaks_and_readings(comparison: Comparison) -> None:
    run = comparison.measurement
    data = timelines.memory_data(run)
    assert len(data) <= timelines.BINS < len(run.memory)
    assert data["kv"].max() == run.memory["kv_bytes"].max()
    assert data["measured"].max() == run.memory["measured_bytes"].max()
    assert (data["pending"] == 0).all()  # the toy frees at once


def test_occupancy_counts_running_and_waiting(tmp_path: Path) -> None:
    # At 12 ms request 0 runs and request 1, arrived at 5 ms, was issued at 10 ms.
    data = timelines.occupancy_data(load(write(tmp_path / "two", TWO)))
    at = {ms: data.iloc[(data["at_s"] - ms / 1e3).abs().argmin()] for ms in (2, 7, 12, 27)}
    assert {ms: (row["running"], row["waiting"]) for ms, row in at.items()} == {
        2: (1, 0),
        7: (1, 1),
        12: (2, 0),
        27: (1, 0),
    }


def test_gantt_shows_the_host_and_the_lanes_of_a_window(comparison: Comparison) -> None:
    run = comparison.measurement
    start, end = timelines.window_s(run)
    data = timelines.gantt_data(run, (start, end))
    assert set(data["lane"]) == {"host", "compute"}
    assert (data["end_s"] > start).all() and (data["start_s"] < end).all()
    assert (data["lane"] == "compute").sum() == timelines.WINDOW_OPS


def test_an_ecdf_is_made_of_quantiles(tmp_path: Path) -> None:
    data = plots.ecdf_data({"measurement": load(write(tmp_path / "two"))}, "ttft")
    assert data["seconds"].iloc[[0, -1]].tolist() == pytest.approx([0.010, 0.015])
    assert data["share"].iloc[[0, -1]].tolist() == [0, 1]


def test_plots_draw_every_row(comparison: Comparison) -> None:
    data = plots.parity_data(comparison.requests, "e2e")
    ax = plots.plot_parity(data)
    assert len(ax.collections[-1].get_offsets()) == len(data) == 200
    assert list(data) == ["request_id", "prediction_s", "measurement_s", "metric"]
    steps = plots.step_data(comparison.replay or comparison.prediction, comparison.measurement)
    assert list(steps)[-3:] == ["at_s", "prediction_s", "measurement_s"]
    assert len(steps) == len(comparison.measurement.steps)
    ax = plots.plot_step_time(steps)
    assert sum(len(c.get_offsets()) for c in ax.collections) == len(steps)
    busy = timelines.occupancy_data(comparison.prediction)
    twice = pd.concat([busy.assign(run=name) for name in RUNS])
    assert len(timelines.plot_occupancy(twice).lines) == 2
