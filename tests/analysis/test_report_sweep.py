"""The page of a sweep accords with the runs, and is self-contained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from math import dist
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from analysis.figures import style as policy_style
from analysis.figures.sweep_plots import ASKED, TEXTS, drawn, looks_of, plot_heatmap, plot_over_x
from analysis.figures.sweep_points import by_x, capacity, frontier, points_of
from analysis.metric_names import BEST
from analysis.swept import axis_of
from tandem.cli.__main__ import main
from tandem.cli.catalog import options
from tandem.cli.collect import collect
from tests.analysis.browser import faults_of, in_browser, is_in_browser
from tests.laws.house import ROOT
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
    rows = by_x(points, "goodput").set_index(["series", "x"])
    assert set(rows["runs"]) == {2}
    row = rows.loc[("slow", 8.0)]
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((2.0, 1.9, 2.1))


def test_capacity_is_the_last_rate_before_the_first_miss(points: pd.DataFrame) -> None:
    assert capacity(points, 0.9) == {"fast": 4.0, "slow": 2.0}
    lucky = points.copy()  # a higher rate that attains again does not count
    lucky.loc[lucky["series"].eq("slow") & lucky["x"].eq(8.0), "slo_attainment"] = 1.0
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
    assert found["x"].isna().all()


def test_the_rates_of_a_recording_are_rates_too(tmp_path: Path) -> None:
    for rate in (2.0, 4.0):
        words = ["trace=recorded", f"trace.rate={rate:g}", "policy=a"]
        finished(tmp_path, f"{rate:g}", words, rate, rate_of="trace", output_throughput=rate)
    found = points_of(collect(tmp_path))
    assert list(found["series"]) == ["a", "a"] and list(found["x"]) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("key", "values", "label"),
    [
        ("arrival.rate", (1.0, 2.0, 4.0), "arrivals, requests/s"),
        ("replicas", (1, 2, 4), "replicas"),
        ("budget.kv_pages", (100, 200, 400), "KV of a device, pages"),
        ("budget.device_bytes", (2**31, 2**32, 2**33), "device budget, GiB"),
        ("device.to_device_bytes_per_s", (1e9, 2e9, 4e9), "link to the device, GB/s"),
        ("scheduling.token_budget", (64, 128, 256), "scheduling.token_budget, tokens"),
        ("memory.max_tokens", (64, 128, 256), "memory.max_tokens, tokens"),
        ("scheduling.tokens_per_s", (50, 100, 200), "scheduling.tokens_per_s, tokens/s"),
        ("scheduling.tokens_per_ms", (50, 100, 200), "scheduling.tokens_per_ms, tokens/ms"),
        ("scheduling.wait_ms", (5, 10, 20), "scheduling.wait_ms, ms"),
    ],
)
def test_the_numeric_setting_that_varies_is_the_x_axis(
    key: str, values: tuple[float, ...], label: str, tmp_path: Path
) -> None:
    for policy in ("a", "b"):
        for value in values:
            words = [f"policy={policy}", f"{key}={value}", "seed=3"]
            metrics = {"output_throughput": value, "p99_ttft_s": 1 / value, "slo_attainment": 0.95}
            folder = finished(tmp_path, f"{policy}{value}", words, 1.0, **metrics)
            config = yaml.safe_load((folder / "config.yaml").read_text())
            OmegaConf.update(made := OmegaConf.create(config), key, value, force_add=True)
            (folder / "config.yaml").write_text(OmegaConf.to_yaml(made))
    found = points_of(collect(tmp_path))
    assert list(found["series"]) == ["a"] * 3 + ["b"] * 3
    assert list(found["x"]) == [*values, *values] and set(found["setting"]) == {key}
    assert plot_over_x(by_x(found, "slo_attainment")).get_xlabel() == label
    assert set(capacity(found, 0.9)) == {"a", "b"}


SERVED = "model=micro_llama limit=8 slo=chat slo.ttft_s=0.05 slo.tpot_s=0.01 policy=chunked_swap"
TRAINED = "trace=none training=random training.num_steps=2 model=micro_llama policy=zero3_offload"
SWEEPS = {
    "arrival.rate=4,16": (SERVED, "arrivals, requests/s"),
    "replicas=1,2": (f"{SERVED} router=round_robin", "replicas"),
    "budget.kv_pages=60,120": (SERVED, "KV of a device, pages"),
    "budget.device_bytes=1e8,2e8": (TRAINED, "device budget, MiB"),
    "device.to_device_bytes_per_s=1e8,1e9": (SERVED, "link to the device, GB/s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("swept", SWEEPS)
def test_a_real_sweep_is_drawn_over_what_it_varies(swept: str, tmp_path: Path) -> None:
    words, label = SWEEPS[swept]
    key, _, values = swept.partition("=")
    out = ["--out", str(tmp_path / "out"), "--engine", "serial"]
    assert main(["sweep", *words.split(), swept, *out]) == 0
    assert main(["report", str(tmp_path / "out")]) == 0
    figures = tmp_path / "out" / "report" / "figures"
    name = "training" if words is TRAINED else "latency"
    drawn = pd.read_csv(figures / f"{name}.csv")
    assert set(drawn["setting"]) == {key}
    assert sorted(set(drawn["x"])) == [float(value) for value in values.split(",")]
    assert ("limit" in drawn and set(drawn["limit"]) == {0.05, 0.01}) == (name == "latency")
    text = (tmp_path / "out" / "report" / "report.html").read_text(encoding="utf-8")
    assert f"<!-- {label} -->" in text, "matplotlib writes each text as a comment"
    assert name == "training" or {"<!-- 50 ms SLO -->", "<!-- 10 ms SLO -->"} <= {
        line.strip() for line in text.splitlines()
    }
    if is_in_browser():
        assert faults_of(tmp_path / "out" / "report" / "report.html", tmp_path, 1200) == []


def numeric_settings(node: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Keys of the numbers in a yaml."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from numeric_settings(inner, (*path, str(name)))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield ".".join(path)


def test_a_setting_of_tokens_bytes_pages_or_time_has_its_unit_on_an_axis() -> None:
    """Of all numbers in conf/; what is left without a unit are counts, shares and factors."""
    files = [path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "experiment"]
    found = [key for path in files for key in numeric_settings(yaml.safe_load(path.read_text()))]
    bare = {key.rpartition(".")[2] for key in found if not axis_of(key, 1.0).unit}
    measure = re.compile(r"token|byte|page(?!s_)|window|(?:^|_)(?:n|m|u)?s(?:_|$)")
    assert len(found) > 100 and not [name for name in bare if measure.search(name)]


@pytest.mark.slow
@in_browser
def test_nothing_of_the_page_is_cut(tmp_path: Path) -> None:
    for rate in (1.0, 2.0, 4.0):
        for policy in ("chunked_reservation", "continuous_reservation"):
            words = [f"policy={policy}", "scheduling.token_budget=512", f"arrival.rate={rate}"]
            name = f"policy@{policy}+scheduling.token_budget@512+arrival.rate@{rate}-{'0a' * 8}"
            known = {metric: 1234.56 for metric in (*BEST, "mean_train_step_s")}
            finished(tmp_path, name, words, rate, **known)
    failed(tmp_path, "dead", "a long reason of many words " * 20)
    assert main(["report", str(tmp_path)]) == 0
    assert faults_of(tmp_path / "report" / "report.html", tmp_path, 1200) == []


def test_of_two_numeric_settings_that_with_most_values_is_drawn_along_x(tmp_path: Path) -> None:
    for depth in (1, 2):
        for rate in (1.0, 2.0, 4.0):
            words = ["policy=a", f"depth={depth}", f"arrival.rate={rate:g}"]
            finished(tmp_path, f"{depth}-{rate:g}", words, rate, output_throughput=rate)
    found = points_of(collect(tmp_path))
    assert set(found["series"]) == {"a depth=1", "a depth=2"}
    assert set(found["x"]) == {1.0, 2.0, 4.0}


def test_of_a_resource_the_least_that_is_enough_is_told(tmp_path: Path) -> None:
    for replicas, met in ((1, 0.2), (2, 0.95), (4, 0.8), (8, 0.97), (16, 1.0)):
        folder = finished(
            tmp_path, f"{replicas}", ["policy=a", f"replicas={replicas}"], 1.0, slo_attainment=met
        )
        with (folder / "config.yaml").open("a") as file:
            file.write(f"replicas: {replicas}\n")
    found = points_of(collect(tmp_path))
    assert capacity(found, 0.9) == {"a": 8.0}  # 2 are enough, and 4 again are not
    assert capacity(found, 0.99) == {"a": 16.0}


def test_a_half_of_the_policy_that_varies_is_told_once(tmp_path: Path) -> None:
    for memory in ("paged_restart", "paged_swap"):
        words = [f"memory={memory}", "depth=2"]
        finished(tmp_path, memory, words, 1.0, output_throughput=1.0)
    named = ["policy=orca", "memory=paged_swap", "depth=2"]
    finished(tmp_path, "named", named, 1.0, output_throughput=1.0)
    assert list(points_of(collect(tmp_path))["series"]) == [
        "ChunkedPrefill+paged_restart",
        "ChunkedPrefill+paged_swap",
        "orca memory=paged_swap",
    ]


def test_the_page_tells_means_over_seeds_in_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    best = text[text.index("Best of each metric") :].partition("</table>")[0]
    assert "Means over seeds." in best and "4.1 req/s" not in best and "4 req/s" in best
    assert "p99 TTFT" in text and "p99_ttft_s" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.S)
    assert "p99 ttft s" not in text


def test_the_rate_asked_for_is_told_where_it_is_drawn(page: Path, tmp_path: Path) -> None:
    assert ASKED.strip() in page.read_text(encoding="utf-8")
    for replicas in (1, 2):
        words = ["policy=a", f"replicas={replicas}"]
        folder = finished(tmp_path, f"{replicas}", words, 1.0, request_throughput=1.0)
        with (folder / "config.yaml").open("a") as file:
            file.write(f"replicas: {replicas}\n")
    [goodput, *_] = drawn(points_of(collect(tmp_path)), tmp_path / "figures")
    assert "over replicas" in goodput.title and "Black line" not in goodput.caption


@pytest.mark.parametrize(("second", "num_colours"), [(1.009, 1), (1.02, 2)])
def test_values_of_a_heatmap_that_hardly_differ_have_one_colour(
    second: float, num_colours: int
) -> None:
    rows = {"metric": "goodput", "series": ["a", "a"], "setting": "depth", "x": [1.0, 2.0]}
    ax = plot_heatmap(pd.DataFrame({**rows, "mean": [3474.0, 3474.0 * second]}))
    [image] = ax.images
    assert len({tuple(c) for c in image.cmap(image.norm(image.get_array()))[0]}) == num_colours


def test_ticks_have_no_offset() -> None:
    assert policy_style.RC["axes.formatter.useoffset"] is False


def test_series_differ_in_colour_marker_and_line() -> None:
    names = [f"orca scheduling.token_budget={budget}" for budget in range(6)]
    looks = looks_of(pd.DataFrame({"series": names, "policy": "orca"}))
    for part in ("color", "marker", "linestyle"):
        assert len({str(look[part]) for look in looks.values()}) == len(names)
    assert looks[names[0]]["color"] == policy_style.COLORS["orca"]


def test_a_line_of_the_objective_carries_its_value(points: pd.DataFrame) -> None:
    limited = by_x(points, "p99_ttft_s").assign(limit=0.012)
    texts = {text.get_text() for text in plot_over_x(limited).texts}
    assert texts == {"12 ms SLO"}
    texts = {text.get_text() for text in plot_over_x(by_x(points, "slo_attainment")).texts}
    assert texts == {"90 %", "99 %"}


def test_every_figure_has_its_numbers(page: Path) -> None:
    folder = page.parent / "figures"
    names = {path.stem for path in folder.glob("*.svg")}
    assert names == {*TEXTS} - {"training"} == {path.stem for path in folder.glob("*.csv")}
    assert all(len(pd.read_csv(folder / f"{name}.csv")) for name in names)
    goodput = pd.read_csv(folder / "goodput.csv").set_index(["series", "x"])["mean"]
    assert goodput[("fast", 8.0)] == pytest.approx(4.0)


def test_the_page_is_self_contained_with_headline_and_errors(page: Path, root: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"|@import|url\((?!#)', text) == []
    assert len(text) < 1_000_000
    assert (
        "16 of 17 runs finished. Most goodput: 4 req/s, fast at 4 requests/s (and 1 more)." in text
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
    assert names == {"frontier"}


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


def test_colours_of_policies_differ_clearly() -> None:
    """Distances in CIELAB, where 2.3 is just noticeable side by side and thin lines need ten times.

    Two blues at 23 were once taken for one in a legend. Policies of training are seldom in one
    figure with those of serving: 16, seven times what is noticeable.
    """
    colours = policy_style.COLORS
    names = [*colours]
    serving = set(names[: names.index("recorded") + 1])
    for one, other in combinations(names, 2):
        distance = dist(_cielab(colours[one]), _cielab(colours[other]))
        assert distance > (25 if {one, other} <= serving else 16), (one, other, distance)


def _cielab(colour: str) -> tuple[float, float, float]:
    """CIE 1976 L*a*b* under D65, of sRGB (IEC 61966-2-1)."""
    coded = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in coded]
    x = (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047
    y = 0.2126729 * r + 0.7151522 * g + 0.0721750 * b
    z = (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883
    edge = 6 / 29
    fx, fy, fz = [v ** (1 / 3) if v > edge**3 else v / (3 * edge**2) + 4 / 29 for v in (x, y, z)]
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_a_policy_is_drawn_in_its_colour(points: pd.DataFrame) -> None:
    renamed = by_x(points, "goodput").replace({"fast": "vllm_v1", "slow": "orca"})
    lines = {line.get_label(): line.get_color() for line in plot_over_x(renamed).lines}
    assert lines["orca"] == policy_style.COLORS["orca"]
    assert lines["vllm_v1"] == policy_style.COLORS["vllm_v1"]
