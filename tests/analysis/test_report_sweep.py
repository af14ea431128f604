"""The page of a sweep accords with the runs, and is self-contained."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from analysis.figures import style as policy_style
from analysis.figures.sweep_plots import TEXTS, plot_rate
from analysis.figures.sweep_points import by_rate, capacity, frontier, points_of
from tandem.cli.__main__ import main
from tandem.cli.catalog import options
from tandem.cli.collect import collect
from tests.support.sweeps import failed, finished, grid


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grid(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def points(root: Path) -> pd.DataFrame:
    return points_of(collect(root))


@pytest.fixture(scope="module")
def page(root: Path) -> Path:
    assert main(["report", str(root)]) == 0
    return root / "report" / "report.html"


def test_seeds_are_put_together(points: pd.DataFrame) -> None:
    rows = by_rate(points, "goodput").set_index(["series", "rate"])
    assert set(rows["runs"]) == {2}
    row = rows.loc[("slow", 8.0)]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((2.0, 1.9, 2.1))


def test_capacity_is_the_last_rate_before_the_first_miss(points: pd.DataFrame) -> None:
    assert capacity(points, 0.9) == {"fast": 4.0, "slow": 2.0}
    lucky = points.copy()  # a higher rate that attains again does not count
    lucky.loc[lucky["series"].eq("slow") & lucky["rate"].eq(8.0), "slo_attainment"] = 1.0
    assert capacity(lucky, 0.9)["slow"] == 2.0


def test_nothing_beats_a_point_of_the_frontier(points: pd.DataFrame) -> None:
    rows = frontier(points, "output_throughput", "p99_ttft_s")
    for _, row in rows.iterrows():
        others = rows.drop(index=row.name)
        beaten = (others["gain"] >= row["gain"]) & (others["price"] <= row["price"])
        assert bool(row["is_best"]) != bool(beaten.any())


def test_another_swept_key_makes_a_series(tmp_path: Path) -> None:
    for number, words in enumerate((["policy=a", "depth=1"], ["policy=a", "depth=2"])):
        finished(tmp_path, str(number), [*words, f"seed={number}"], 1.0, output_throughput=1.0)
    found = points_of(collect(tmp_path))
    assert list(found["series"]) == ["a depth=1", "a depth=2"]
    assert found["rate"].isna().all()


def test_the_rates_of_a_recording_are_rates_too(tmp_path: Path) -> None:
    for rate in (2.0, 4.0):
        words = ["trace=recorded", f"trace.rate={rate:g}", "policy=a"]
        finished(tmp_path, f"{rate:g}", words, rate, rate_of="trace", output_throughput=rate)
    found = points_of(collect(tmp_path))
    assert list(found["series"]) == ["a", "a"] and list(found["rate"]) == [2.0, 4.0]


def test_every_figure_has_its_numbers(page: Path) -> None:
    folder = page.parent / "figures"
    names = {path.stem for path in folder.glob("*.svg")}
    assert names == set(TEXTS) == {path.stem for path in folder.glob("*.csv")}
    assert all(len(pd.read_csv(folder / f"{name}.csv")) for name in names)
    goodput = pd.read_csv(folder / "goodput.csv").set_index(["series", "rate"])["mean"]
    assert goodput[("fast", 8.0)] == pytest.approx(4.0)


def test_the_page_is_self_contained_with_headline_and_errors(page: Path, root: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"|@import|url\((?!#)', text) == []
    assert len(text) < 1_000_000
    assert (
        "16 of 17 runs finished. Most goodput: 4.1 req/s, fast at 4 requests/s (and 1 more)."
        in text
    )
    assert "killed by SIGKILL, 3 times" in text
    assert f"tandem report {root}" in text
    assert "Capacity" in text and "Best of each metric" in text


def test_goodput_can_be_judged_by_another_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unrendered: None
) -> None:
    # the toy's two requests have TTFTs of 10 and 15 ms
    for rate in (1.0, 2.0):
        finished(tmp_path, f"{rate:g}", ["policy=a"], rate, goodput=9.0, output_throughput=1.0)
    assert main(["report", str(tmp_path), "--ttft", "0.012", "--out", str(tmp_path / "r")]) == 0
    rows = pd.read_csv(tmp_path / "r" / "figures" / "attainment.csv")
    assert list(rows["mean"]) == [0.5, 0.5]
    assert "--ttft 0.012" in (tmp_path / "r" / "report.html").read_text()
    capsys.readouterr()


def test_points_without_a_rate_still_have_a_page(tmp_path: Path) -> None:
    finished(tmp_path, "a", ["policy=a"], 1.0, output_throughput=1.0, p99_ttft_s=1.0)
    finished(tmp_path, "b", ["policy=b"], 1.0, output_throughput=2.0)
    assert main(["report", str(tmp_path)]) == 0
    names = {path.stem for path in (tmp_path / "report" / "figures").glob("*.svg")}
    assert names == {"frontier", "heatmap"}


def test_a_sweep_without_a_finished_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed(tmp_path, "a", "no")
    assert main(["report", str(tmp_path)]) == 2
    assert "none of its 1 runs has finished" in capsys.readouterr().err


def test_one_run_has_its_own_page(tmp_path: Path, unrendered: None) -> None:
    folder = finished(tmp_path, "run", [], 1.0)
    assert main(["report", str(folder)]) == 0
    assert (tmp_path / "run-report" / "report.html").is_file()


def test_every_named_policy_has_a_colour_of_its_own() -> None:
    named = set(options("policy"))
    assert named == set(policy_style.COLORS)
    assert len(set(policy_style.COLORS.values())) == len(named)
    assert policy_style.policy_color("mine") == policy_style.policy_color("mine")


def test_a_policy_is_drawn_in_its_colour(points: pd.DataFrame) -> None:
    renamed = by_rate(points, "goodput").replace({"fast": "vllm_v1", "slow": "orca"})
    lines = {line.get_label(): line.get_color() for line in plot_rate(renamed).lines}
    assert lines["orca"] == policy_style.COLORS["orca"]
    assert lines["vllm_v1"] == policy_style.COLORS["vllm_v1"]
