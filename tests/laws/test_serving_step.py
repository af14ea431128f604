"""One step of serving passes through few files and lines. Each bar is shown to see a fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.same_behaviour import Checkout
from benchmarks.serving_step import ENGINE_FILES, Step, median_and_worst, steps_of
from tests.laws.house import PACKAGES, ROOT

# What 28 files of engine/ executed in these steps, by benchmarks/serving_step.py: (events, distinct
# lines). The tree is at 789 and 508 in the median, 863 and 566 in the worst step.
LINES_BEFORE = {"median": (1287, 629), "worst": (1379, 692)}


def traced(code: Path, out: Path) -> list[Step]:
    """The steps of a checkout."""
    out.mkdir()
    return steps_of(Checkout(code, out))


def above_the_bars(steps: list[Step]) -> set[str]:
    """Which bars the steps miss."""
    counts = {which: step.counts for which, step in median_and_worst(steps).items()}
    wrong = {"files"} if any(len(step.engine_files) > ENGINE_FILES for step in steps) else set()
    for which, (events, lines) in LINES_BEFORE.items():
        wrong |= {"events"} if counts[which]["events"] > events else set()
        wrong |= {"lines"} if counts[which]["lines"] > lines else set()
    return wrong


def test_a_step_of_serving_keeps_its_bars(tmp_path: Path) -> None:
    steps = traced(ROOT, tmp_path / "now")
    assert above_the_bars(steps) == set()
    decodes = [step for step in steps if "engine/loop/issuing.py" in step.events]
    assert len(decodes) == len(steps), "every step issues a plan"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hop", "missed"),
    [
        ("def hop():\n    pass\n", {"files"}),
        pytest.param(
            "def hop():\n    for i in range(400):\n        i += 1\n",
            {"files", "events"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "def hop():\n" + "    x = 1\n" * 150, {"files", "lines"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_hop_more_is_seen(hop: str, missed: set[str], tmp_path: Path) -> None:
    code = tmp_path / "code"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pyc*"))
    (code / "engine/loop/hop.py").write_text(hop)
    path = code / "engine/loop/engine.py"
    head, settle, rest = path.read_text("utf-8").partition("        self._moments, state = 0,")
    assert settle
    path.write_text(f"{head}        __import__('engine.loop.hop').loop.hop.hop()\n{settle}{rest}")
    assert above_the_bars(traced(code, tmp_path / "now")) == missed
