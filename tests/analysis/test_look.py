"""What a page looks like: units, opacity, memory of both runs, capacity, a headline."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import units, verdicts
from analysis.compare import Comparison, compare
from analysis.figures import plots, timelines
from analysis.figures.style import opacity
from analysis.metrics import summary
from analysis.pages.report import write_report, write_run_report
from analysis.pages.tables import compared_tables, single_tables
from analysis.run import Run, load
from tandem.cli.terminal import told
from tests.support.synthetic import MS, TWO, Toy, write

MANY = Toy([i * 30 * MS for i in range(8)], prompts=[20] * 8, outputs=[4, 9, 2, 7, 1, 5, 8, 3])


@pytest.fixture
def pair(tmp_path: Path) -> Comparison:
    sim = load(write(tmp_path / "sim", MANY, provenance={"device": "toy"}))
    slow = {"backend": "cpu", "factor": lambda step: 1.001, "provenance": {"device": "toy"}}
    cpu = load(write(tmp_path / "cpu", MANY, **slow))
    played = load(write(tmp_path / "played", MANY, plans=cpu.plans.to_dict("records")))
    return compare(sim, cpu, played)


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([0.002, 0.003, 0.9], "s", ["2 ms", "3 ms", "900 ms"]),
        ([0.9, 1.1, 40.0], "s", ["0.9 s", "1.1 s", "40 s"]),
        ([2e-6, 4e-6, 0.0], "s", ["2 us", "4 us", "0 us"]),
        ([0.5, float("nan"), 3.0], "s", ["0.5 s", "n/a", "3 s"]),
        ([0.4, 0.5, 3.0], "s", ["400 ms", "500 ms", "3,000 ms"]),
        ([2**20, 3 * 2**30], "bytes", ["0.0009766 GiB", "3 GiB"]),
        ([0.0], "bytes", ["0 KiB"]),
        ([1234.5, 2.0], "tok/s", ["1,234 tok/s", "2 tok/s"]),
    ],
)
def test_numbers_that_are_read_together_have_one_unit(
    values: list[float], unit: str, expected: list[str]
) -> None:
    """That in which the middle one of them, by size, is at least 1."""
    assert units.amounts(values, unit) == expected


def test_an_axis_takes_the_unit_of_its_end() -> None:
    assert units.wide_scale([0.0005, 0.0009, 0.05], "s").unit == "ms"
    assert units.wide_scale([0.0001, 0.0002, 0.05], "s").unit == "us"
    assert units.axis_scale([0.0, 0.001, 17.0], "s") == units.Scale("s", 1.0)
    assert units.axis_scale([0.0, 0.04], "s") == units.Scale("ms", 1e-3)
    assert units.axis_scale([], "bytes").unit == "KiB"
    assert units.Scale("ms", 1e-3).of(np.array([0.002])).tolist() == pytest.approx([2.0])


def test_a_row_of_a_table_has_one_unit(pair: Comparison) -> None:
    """Of predictions and measurements side by side, and of the statistics of one metric."""
    tables = {table.title: table for table in compared_tables(pair)}
    for metric in ("ttft", "tpot", "e2e"):
        rows = [row for row in tables["Errors"].rows if row[0].text == metric]
        shown = {cell.text.split()[-1] for row in rows for cell in row[2:4]}
        assert len(rows) == 5 and len(shown) == 1
    for row in tables["Step times"].rows:
        assert len({cell.text.split()[-1] for cell in row[2:4]}) == 1
    for line in verdicts.table(pair).splitlines():
        found = re.findall(r"\d (us|ms|s) ", line)
        assert len(found) in (0, 2) and len(set(found)) < 2
        assert not re.search(r"\b0\.00\d* s\b", line)
    run = pair.measurement
    for table in single_tables(run, summary(run)):
        if table.title == "Latencies":
            for row in table.rows:
                assert len({cell.text.split()[-1] for cell in row[1:]}) == 1


def test_axes_have_the_unit_of_their_numbers(pair: Comparison) -> None:
    runs = {"prediction": pair.prediction, "measurement": pair.measurement}
    data = plots.ecdf_data(runs, "tpot")  # of 5 to 20 ms
    ax = plots.plot_ecdf(data)
    assert ax.get_xlabel() == "latency, ms"
    assert ax.lines[0].get_xdata().max() == pytest.approx(
        1e3 * data[data["run"].eq("prediction")]["seconds"].max()
    )
    assert "seconds" in data, "the CSV stays in seconds"
    ax = plots.plot_parity(plots.parity_data(pair.requests, "tpot"))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("measured, ms", "predicted, ms")
    assert ax.get_xlim()[1] > 1
    ax = plots.plot_step_time(plots.step_data(pair.prediction, pair.measurement))
    assert ax.get_xlabel() == "measured time, ms" and ax.get_ylabel().endswith("%")
    busy = timelines.occupancy_data(pair.measurement).assign(run="measurement")
    ax = timelines.plot_occupancy(busy)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time, ms", "requests")
    window = timelines.window_s(pair.measurement)
    ax = timelines.plot_gantt(timelines.gantt_data(pair.measurement, window), window=window)
    assert ax.get_xlabel() == "time, ms"
    assert ax.get_xlim() == pytest.approx((1e3 * window[0], 1e3 * window[1]))


def test_many_points_are_faint() -> None:
    assert opacity(0) == opacity(50) == 0.8
    assert opacity(400) == 0.5 and opacity(10_000) == 0.1
    assert opacity(10**9) == 0.06, "never invisible"
    faint = plots.plot_parity(
        pd.DataFrame({"prediction_s": np.ones(2500), "measurement_s": np.ones(2500)})
    )
    assert faint.collections[-1].get_alpha() == opacity(2500) == 0.2


def memory_of(run: Run, name: str) -> pd.DataFrame:
    return timelines.memory_data(run).assign(run=name)


def test_the_memory_of_both_runs_lies_in_one_figure(pair: Comparison, tmp_path: Path) -> None:
    a, b = (memory_of(run, run.name) for run in (pair.prediction, pair.measurement))
    both = pd.concat([a.assign(run="prediction"), b.assign(run="measurement")])
    ax = timelines.plot_memory(both)
    _, labels = ax.get_legend_handles_labels()
    assert {"prediction", "measurement", "weight", "kv", "read by the meter"} <= set(labels)
    parts = ["weight", "kv", "activation", "gradient", "optimizer", "buffer", "pending"]
    lines = {line.get_label(): line for line in ax.lines}
    for name, data in (("prediction", a), ("measurement", b)):
        top = data[parts].sum(axis=1).to_numpy(float) / 2**10
        assert lines[name].get_ydata() == pytest.approx(top)
    assert ax.get_ylabel() == "memory, KiB"
    page = write_report(pair, tmp_path / "report")
    kept = pd.read_csv(page.parent / "figures" / "memory.csv")
    assert set(kept["run"]) == {"prediction", "measurement"}
    svg = (page.parent / "figures" / "memory.svg").read_text(encoding="utf-8")
    assert svg.count('id="axes_') == 1, "one figure of both, not two"


def test_the_capacity_is_a_line_only_where_it_leaves_room_for_the_data(tmp_path: Path) -> None:
    """Peaks below 10 kB: the line of 12 kB is drawn; that of 100 kB would leave a tenth to them."""
    for capacity_bytes, is_line in ((12_000, True), (100_000, False)):
        run = load(write(tmp_path / str(capacity_bytes), MANY, capacity_bytes=capacity_bytes))
        peak = float((run.memory["capacity_bytes"] - run.memory["free_bytes"]).max()) / 2**10
        ax = timelines.plot_memory(memory_of(run, "measurement"))
        labels, notes = ax.get_legend_handles_labels()[1], [t.get_text() for t in ax.texts]
        assert ("capacity" in labels) is is_line
        said = f"\u2191 capacity {capacity_bytes / 2**10:.4g} KiB, above the axis"
        assert notes == ([] if is_line else [said])
        assert peak <= ax.get_ylim()[1] <= 2.2 * peak


def headline_of(page: Path) -> str:
    found = re.search(r'<section class="headline">(.*?)</section>', page.read_text("utf-8"))
    return found[1] if found else ""


def test_each_page_begins_with_what_it_says(
    pair: Comparison, tmp_path: Path, unrendered: None
) -> None:
    text = headline_of(write_report(pair, tmp_path / "pair"))
    assert text.startswith("sim, predicted, against cpu, measured on toy: a good prediction, at ")
    poor = replace(pair, errors=pair.errors.assign(error=-0.2))
    assert ": a poor prediction, by throughput (-20.0 %)." in verdicts.headline(poor)
    text = headline_of(write_run_report(pair.measurement, tmp_path / "one"))
    assert text.startswith("cpu, measured on toy: all 8 requests finished, at ")
    assert "mean TTFT " in text and "no preemption" in text
    text = headline_of(write_run_report(load(write(tmp_path / "two", TWO)), tmp_path / "two-page"))
    assert text.startswith("two, predicted on -: all 2 requests finished")


def test_pages_speak_of_operations_and_consequences(pair: Comparison, tmp_path: Path) -> None:
    page = write_report(pair, tmp_path / "report").read_text("utf-8")
    assert "Direct error of operations, and its consequence" in page
    assert "consequence for decisions (batching, preemption)" in page
    for retired in ("Timing or decisions", "timing alone", "<th>timing</th>"):
        assert retired not in page


def test_a_row_of_the_terminal_has_one_unit(pair: Comparison) -> None:
    values = {"mean": 0.974, "p50": 0.72, "p90": 1.842, "p95": 2.083, "p99": 2.995}
    run = pair.measurement
    metrics = summary(run) | {f"{stat}_e2e_s": value for stat, value in values.items()}
    plan = dict.fromkeys(("weight_bytes", "activation_bytes", "reserve_bytes"), 0)
    about = {"kv_pages": 1, "memory_plan": {**plan, "kv_bytes": 1}}
    shown = told(metrics, {**run.provenance, **about}).splitlines()
    line = next(row for row in shown if row.startswith("e2e"))
    assert re.findall(r"[\d.]+ m?s", line) == [f"{value:.3f} s" for value in values.values()]
