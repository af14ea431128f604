"""The fidelity claims: a run that proves nothing must fail them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.fidelity import Pair, judged, table_of
from analysis.run import Run, load
from benchmarks.fidelity import cases as claims
from benchmarks.fidelity.cases import finish, measured_in_parts, reported, with_earlier
from benchmarks.fidelity.swap_fidelity import swapped
from tandem.fidelity.protocol import Case
from tests.support.synthetic import TWO, write

CASE = Case("swap", (), Path("nowhere"), Path("nowhere"))
PROBED = {"probe_ratios": {"decode": 1.0}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with memory rows at issues, too, and with a copy for one request."""
    found = load(write(tmp_path / "run", replace(TWO, backend="cpu", provenance=PROBED)))
    memory = pd.concat([found.memory, found.memory.assign(cause="issue")])
    copy = found.steps.iloc[[0]].assign(lane="gpu->host", nbytes=1000)
    return replace(found, memory=memory, steps=pd.concat([found.steps, copy]))


def with_swaps(run: Run, count: int) -> Run:
    return replace(run, requests=run.requests.assign(swaps=[count, 0]))


def used(pairs: list[Pair], wanted: int = 1) -> pd.Series:
    """The used share of each row's bar."""
    rows = pd.concat([table_of(CASE.name, pairs, wanted), swapped(CASE, pairs)])
    return judged(rows, judges_ttft=False).set_index("figure")["used"]


def test_equal_runs_that_swapped_pass(run: Run) -> None:
    swap = with_swaps(run, 3)
    found = used([Pair(swap, swap, swap)])
    assert found.max() == 0


@pytest.mark.parametrize("role", ["measured", "predicted"])
def test_a_run_without_any_swap_fails_whatever_its_errors(run: Run, role: str) -> None:
    swap = with_swaps(run, 3)
    pair = replace(Pair(swap, swap, swap), **{role: with_swaps(run, 0)})
    assert used([pair])["swapped_in_every_run"] == np.inf
    assert used([Pair(swap, swap, swap), pair], 2)["swapped_in_every_run"] == np.inf


def test_a_replay_that_copies_other_bytes_fails(run: Run) -> None:
    swap = with_swaps(run, 3)
    pair = Pair(swap, swap, replace(swap, steps=run.steps.assign(nbytes=0)))
    assert used([pair])["bytes_copied_replayed_equal"] == np.inf


def test_no_steady_rerun_is_a_failure_and_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = judged(pd.concat([table_of(CASE.name, [], 5), swapped(CASE, [])]), judges_ttft=False)
    assert finish("swap_fidelity_worst", table, tmp_path / "table.csv") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "swap_fidelity_worst inf of_bar 1 fail"


def test_the_peak_of_kv_is_held_to_three_percent() -> None:
    """Also if steps 2 % slower move it by more."""
    rows = [("kv_peak_pages", 0.04), ("kv_peak_pages_at_pace_1.02", 0.08)]
    table = pd.DataFrame(rows, columns=["figure", "error"]).assign(measured=1.0, rerun_iqr=0.0)
    assert judged(table, judges_ttft=False)["used"].iloc[0] == pytest.approx(4 / 3)


def test_a_claim_that_takes_long_is_measured_in_parts(tmp_path: Path) -> None:
    """Cases that were measured earlier stand as they were; one that never was fails the claim."""
    out, cases = tmp_path / "claim.csv", ["a@50%", "a@80%", "b@50%"]

    def part(case: str, used: float) -> pd.DataFrame:
        return pd.DataFrame([{"case": case, "figure": "mean_tpot_s", "used": used}])

    first = with_earlier(part("b@50%", 0.5), cases, out)
    assert [*first["case"]] == cases and [*first["used"]] == [math.inf, math.inf, 0.5]
    first.to_csv(out, index=False)
    second = with_earlier(part("a@80%", 0.7), cases, out)
    second.to_csv(out, index=False)
    whole = with_earlier(pd.concat([part("a@50%", 0.2), part("b@50%", 0.9)]), cases, out)
    assert [*whole["case"]] == cases and [*whole["used"]] == [0.2, 0.7, 0.9]
    assert whole["commit"].notna().all()


def test_parts_are_kept_behind_each_and_a_quick_one_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped in its second part has lost neither the first nor earlier ones."""
    asked, cases = list[tuple[list[str], int, int]](), ["a@50%", "a@80%", "b@50%"]

    def parts(
        only: Sequence[str], requests: int, reruns: int, root: Path
    ) -> Iterator[pd.DataFrame]:
        asked.append(([*only], requests, reruns))
        for case in only:
            if case == "b@50%":
                raise SystemExit(143)
            yield pd.DataFrame([{"case": case, "figure": "mean_tpot_s", "used": 0.5}])

    def measured(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["claim", *words])
        return measured_in_parts("claim", "What it is.", cases, "a@80%", parts)

    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    assert measured("--only", "a@80%") == 1, "two cases were never measured"
    with pytest.raises(SystemExit, match="143"):
        measured("--only", "a@50%", "b@50%")
    kept = pd.read_csv(tmp_path / "claim.csv")
    assert dict(zip(kept["case"], kept["used"], strict=True)) == {
        "a@50%": 0.5,
        "a@80%": 0.5,
        "b@50%": math.inf,
    }
    assert measured("--quick") == 0
    assert pd.read_csv(tmp_path / "claim_part.csv")["case"].tolist() == ["a@80%"]
    assert pd.read_csv(tmp_path / "claim.csv").equals(kept)
    assert asked == [(["a@80%"], 200, 5), (["a@50%", "b@50%"], 200, 5), (["a@80%"], 20, 2)]


def test_a_command_that_was_told_to_end_ends_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """143 is the status behind SIGTERM. One that only failed has a report, or none."""
    codes = iter([143, 1, 0])
    monkeypatch.setattr(claims, "tandem", lambda words: next(codes))
    with pytest.raises(SystemExit, match="143"):
        reported("case", ["policy=orca"], [0.5], 5, tmp_path)
    assert reported("case", ["policy=orca"], [0.5], 5, tmp_path) == {}
    page = tmp_path / claims.REPORT / "fidelity.json"
    page.parent.mkdir(parents=True)
    page.write_text('{"loads": []}')
    assert reported("case", ["policy=orca"], [0.5, 0.8], 5, tmp_path) == {"loads": []}
