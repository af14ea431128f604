"""Pages in a browser: nothing is cut, and no words of a figure lie over others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.__main__ import main
from tests.analysis.browser import faults_of, in_browser

pytestmark = [pytest.mark.slow, in_browser]
RUN = ["run", "model=micro_llama", "limit=40"]


def run(name: str, *words: str) -> str:
    assert main([*RUN, *words, f"hydra.run.dir={name}"]) == 0
    return name


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_page_of_a_run(tmp_path: Path) -> None:
    assert main(["report", run("one"), "--out", "page"]) == 0
    assert faults_of(tmp_path / "page/report.html", tmp_path) == []


def test_the_page_of_a_prediction_and_its_measurement(tmp_path: Path) -> None:
    assert main(["compare", run("sim"), run("cpu", "backend=cpu"), "--out", "page"]) == 0
    assert faults_of(tmp_path / "page/report.html", tmp_path) == []


@pytest.mark.parametrize(
    "policies",
    [
        ("scheduling=chunked_prefill", "scheduling=orca"),
        ("policy=chunked_restart", "policy=vllm_v1"),
        ("policy=chunked_restart", "policy=continuous_swap", "policy=static_reservation"),
    ],
)
def test_the_page_of_policies(policies: tuple[str, ...], tmp_path: Path) -> None:
    folders = [run(f"{i}", word, "budget.kv_pages=600") for i, word in enumerate(policies)]
    assert main(["compare", *folders, "--out", "page"]) == 0
    assert faults_of(tmp_path / "page/report.html", tmp_path) == []


def test_faults_are_seen(tmp_path: Path) -> None:
    words = "".join(
        f'<g id="text_{i}"><!-- {text} --><rect x="{x}" y="10" width="50" height="10"/></g>'
        for i, (text, x) in enumerate([("one", 0), ("other", 40), ("far", 580)])
    )
    wide = '<section style="width:200px"><h2>Wide</h2><div style="width:400px">x</div></section>'
    page = tmp_path / "page.html"
    page.write_text(f'<html><body>{wide}<svg width="600" height="50">{words}</svg></body></html>')
    assert faults_of(page, tmp_path) == ["cut: Wide", "outside: far", "overlap: one | other"]
