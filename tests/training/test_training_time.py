"""Where the time of training goes: parts that add up, on the screen and in the report."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.metric_names import TIMES, percents
from analysis.metrics import summary
from analysis.pages.training_tables import training_table
from analysis.run import Run
from analysis.training import time_shares
from tandem.cli.__main__ import main
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tests.support.strategies import cases
from tests.training.trainings import SMALL

STEPS = ["lane", "work", "start_ns", "end_ns"]
POLICIES = (
    ("policy=train_on_device", "planner.modes=recompute"),
    ("policy=zero3_offload", "memory.overlaps_updates=true"),
    ("policy=patrickstar", "planner.chunk_elements=15000", "planner.oversize=alone"),
)


def run_of(*steps: tuple[str, str | None, int, int]) -> Run:
    """The parts of one training job that was issued at 100 and ended at 200."""
    training = pd.DataFrame({"start_ns": [100, 150], "end_ns": [150, 200]})
    tables = {name: pd.DataFrame() for name in ("requests", "memory", "plans")}
    rows = pd.DataFrame(steps, columns=STEPS)
    return Run(Path(), steps=rows, training=training, **tables, provenance={}, config={})


def test_parts_by_hand() -> None:
    """On the host 110-120 runs beside a forward, 160-170 alone but for a copy, which is waiting."""
    found = time_shares(
        run_of(
            ("compute", "serve", 80, 105),  # of which 5 are in the time of training
            ("compute", "forward", 105, 125),
            ("cpu", "update", 110, 120),
            ("compute", "again", 125, 135),
            ("compute", "backward", 135, 155),
            ("cpu", "update", 150, 170),
            ("cpu", "update", 165, 172),
            ("gpu->host", None, 150, 190),
            ("net", "reduce_scatter", 172, 180),
            ("compute", "update", 190, 195),
            ("compute", "mixed", 195, 220),
        )
    )
    wanted = {"forward": 0.2, "again": 0.1, "backward": 0.2, "update": 0.22, "mixed": 0.05}
    assert found == pytest.approx(wanted | {"serving": 0.05, "waiting": 0.18})


def test_a_device_that_never_rests_waits_for_nothing() -> None:
    assert time_shares(run_of(("compute", "forward", 100, 200), ("cpu", "update", 120, 199))) == {
        "forward": 1.0
    }


def test_launches_whose_clocks_overlap_count_once() -> None:
    run = run_of(("compute", "forward", 100, 160), ("compute", "backward", 150, 200))
    assert time_shares(run) == {"forward": 0.6, "backward": 0.4}


@pytest.mark.parametrize("words", POLICIES, ids=[words[0] for words in POLICIES])
def test_parts_of_a_run_add_up(words: tuple[str, ...]) -> None:
    """Each part equals a count over the moments at which a span begins or ends."""
    run = plan_run(composed([*SMALL, *words, "backend=sim"])).run
    found, rows = time_shares(run), run.steps[run.steps["lane"].isin(("compute", "cpu"))]
    assert sum(found.values()) == pytest.approx(1)
    times = sorted({*run.training["start_ns"], *rows["start_ns"], *rows["end_ns"]})
    seen = dict.fromkeys(TIMES, 0)
    for begin, end in pairwise(times):
        now = rows[rows["start_ns"].le(begin) & rows["end_ns"].ge(end)].set_index("lane")["work"]
        seen[now.get("compute", now.get("cpu", "waiting"))] += end - begin
    whole = sum(seen.values())
    assert found == pytest.approx({k: ns / whole for k, ns in seen.items() if ns})


@cases(60)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=7).filter(any), st.integers(0, 2))
def test_percents_add_up(parts: list[int], decimals: int) -> None:
    shares = {str(i): part / sum(parts) for i, part in enumerate(parts)}
    told = {part: float(text) for part, text in percents(shares, decimals).items()}
    assert sum(told.values()) == pytest.approx(100)
    for part, share in shares.items():
        assert abs(told[part] - 100 * share) < 10**-decimals + 1e-9


def test_what_plan_run_and_report_print_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "policy=zero3_offload", "planner.modes=offload"]
    assert main(["plan", "--no-largest", *words]) == main(["run", "backend=sim", *words]) == 0
    times = re.findall(r"^time: (.*); lanes busy: ", capsys.readouterr().out, re.MULTILINE)
    assert len(times) == 2
    for line in times:
        assert sum(map(int, re.findall(r"(\d+)%", line))) == 100 and "waiting " in line
    table = training_table(summary(plan_run(composed([*words, "backend=sim"])).run))
    shown = {row[0].text: row[1].text for row in table.rows}
    parts = [float(v.removesuffix(" %")) for k, v in shown.items() if k.startswith("time of")]
    assert sum(parts) == pytest.approx(100) and "time of waiting" in shown
