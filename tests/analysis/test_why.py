"""Causes of an error: operations at equal decisions, and a simulation with measured durations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.causes import LEAST, Clock, duration_ratios, matched_steps, retimed
from analysis.run import Run, load
from benchmarks.fidelity.why_split import PERTURBED, compared, is_honest, measured
from engine.contract.executor import Launch
from sim.cost.scaled import DurationRatio, ScaledCost, kind_of
from tandem.cli.compare import compare_folders
from tandem.cli.errors import Usage
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import run_spec_of
from tests.support.synthetic import MS, Toy, write

pytestmark = pytest.mark.ci

SMALL = ("limit=40", "arrival.rate=16", "budget.kv_pages=300")


def operations(rows: list[tuple[str, float, float, float]]) -> pd.DataFrame:
    """Lane, start, measured and predicted duration in ms; without host time."""
    frame = pd.DataFrame(rows, columns=["lane", "start", "measured", "predicted"])
    columns = {
        "lane": frame["lane"],
        "start_ns_measurement": frame["start"] * MS,
        "issue_ns_measurement": frame["start"] * MS,
        "duration_s_measurement": frame["measured"] / 1e3,
        "duration_s_prediction": frame["predicted"] / 1e3,
    }
    return pd.DataFrame(columns).assign(host_s_measurement=0.0, host_s_prediction=0.0)


def test_time_passes_by_the_operation_that_computes() -> None:
    """By hand: 10 ms at double length, 5 ms idle as measured, 10 ms of a copy at half length,
    of which the last 4 lie below a launch that takes its own time, which goes on for 6."""
    clock = Clock(
        operations([("compute", 0, 10, 20), ("gpu->host", 15, 10, 5), ("compute", 21, 10, 10)])
    )
    at = np.array([0, 5, 10, 15, 21, 25, 31, 40, np.nan]) * MS
    expected = np.array([0, 10, 20, 25, 28, 32, 38, 47, np.nan]) * MS
    assert clock.ns(at) == pytest.approx(expected, nan_ok=True)


def test_equal_durations_leave_a_measurement_as_it_was(tmp_path: Path) -> None:
    run = load(write(tmp_path / "run", Toy([0, 7 * MS, 90 * MS], [9, 5, 8], [4, 3, 5])))
    same = retimed(matched_steps(run, run), run)
    for name in ("arrival_ns", "first_token_ns", "finish_ns"):
        assert same.requests[name].diff().to_numpy() == pytest.approx(
            run.requests[name].diff().to_numpy(float), nan_ok=True
        )
    assert all(
        np.diff(a) == pytest.approx(np.diff(b))
        for a, b in zip(same.requests["token_ns"], run.requests["token_ns"], strict=True)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("plain") / "run"
    run_experiment(composed([*SMALL]), folder)
    return load(folder)


def test_ratios_scale_a_simulation_to_what_was_measured(plain: Run, tmp_path: Path) -> None:
    """Operations of a run twice as slow in decodes have the ratios 2 and 1; a simulation that is
    given a ratio takes exactly so much longer."""
    rows = matched_steps(plain, plain)
    is_decode = rows["group"].eq("decode")
    slow = plain.steps.assign(
        end_ns=plain.steps["start_ns"]
        + (plain.steps["end_ns"] - plain.steps["start_ns"])
        * np.where(plain.steps["prefill_tokens"].eq(0), 2, 1)
    )
    ratios = pd.DataFrame(duration_ratios(plain, replace(plain, steps=slow)))
    assert set(ratios["group"]) == {"decode", "host", *rows["group"][~is_decode]}
    assert ratios["ratio"].to_numpy() == pytest.approx(
        np.where(ratios["group"].eq("decode"), 2.0, 1.0)
    )
    assert len(ratios) <= len(rows) / LEAST + ratios["group"].nunique()
    words = [*SMALL, "duration_ratios=[{group: decode, ratio: 2}]"]
    run_experiment(composed(words), tmp_path / "scaled")
    scaled = load(tmp_path / "scaled")
    shapes = ["group", "slices", "load", "context"]
    mine, theirs = (
        matched_steps(run, run).groupby(shapes)["duration_s_prediction"].first().rename(name)
        for run, name in ((scaled, "mine"), (plain, "theirs"))
    )
    both = pd.concat([mine, theirs], axis=1).dropna()
    factor = both["mine"] / both["theirs"]
    is_slow = both.index.get_level_values("group") == "decode"
    assert is_slow.sum() > 20
    # Equal sums of contexts need not be equal launches, and durations are whole nanoseconds.
    assert factor[is_slow].to_numpy() == pytest.approx(2.0, rel=0.01)
    assert factor[~is_slow].to_numpy() == pytest.approx(1.0, rel=0.01)
    assert scaled.cost_form == "roofline, scaled"


class Hundred:
    """A cost of 100 ns a launch."""

    form = "hundred"

    def compute_ns(self, launch: Launch) -> int:
        """Always 100."""
        return 100

    def host_ns(self, launches: object) -> int:
        """Always 0."""
        return 0

    def repeat_ns(self, launch: Launch, count: int) -> list[int]:
        """Always 100."""
        return [100] * count


def test_a_launch_takes_the_ratio_of_its_size(plain: Run) -> None:
    class Job:
        training = None

    class Slice:
        job = Job()

    class Op:
        slices = (Slice(),)

    class Piece:
        def __init__(self, tokens: int, context: int) -> None:
            self.tokens, self.context_tokens, self.samples = tokens, context, True

    def launch(*pieces: tuple[int, int]) -> Launch:
        return Launch(Op(), pieces=[Piece(*piece) for piece in pieces])  # type: ignore

    assert kind_of(launch((5, 0))) == ("prefill", (1, 5, 0))
    assert kind_of(launch((5, 0), (1, 7))) == ("mixed", (2, 6, 7))
    assert kind_of(launch((1, 9), (1, 7))) == ("decode", (2, 2, 16))
    ratios = [
        DurationRatio("decode", 2.0),
        DurationRatio("decode", 3.0, slices_from=2, load_from=2),
        DurationRatio("decode", 4.0, slices_from=2, load_from=2, context_from=20),
        DurationRatio("host", 1.0, added_ns=7),
    ]
    cost = ScaledCost(Hundred(), ratios)  # type: ignore[arg-type]
    assert cost.compute_ns(launch((1, 99))) == 200
    assert cost.compute_ns(launch((1, 9), (1, 7))) == 300
    assert cost.compute_ns(launch((1, 9), (1, 70))) == 400
    assert cost.compute_ns(launch((5, 0))) == 100, "no ratio of prompts"
    assert cost.host_ns([]) == 7
    # Each repeat adds its tokens to the context: 16, 18, 20.
    assert cost.repeat_ns(launch((1, 9), (1, 7)), 3).tolist() == [300, 300, 400]
    with pytest.raises(ValueError, match=r"ratio=-1: it must be finite and at least 0"):
        DurationRatio("decode", -1)


@pytest.mark.parametrize("name", ["all, 20 % longer", "prompts 40 % longer, decodes 30 % shorter"])
def test_durations_and_their_consequence_explain_the_error(name: str, tmp_path: Path) -> None:
    """As the claim measures it, on 40 requests; a tenth of an error is the claim's own bar."""
    found, page = compared(SMALL, PERTURBED[name], tmp_path / "load")
    rows = found.split.set_index("metric").loc[["mean ttft", "mean tpot", "mean e2e"]]
    told = rows[rows["total_share"].abs() >= 0.01]
    assert len(told) >= 2 and (told["explained"] >= 0.9).all()
    parts = rows["direct"] + rows["consequence"] + rows["rest"]
    assert parts.to_numpy() == pytest.approx(rows["total"].to_numpy())
    assert is_honest(found, page)
    if name.startswith("all"):  # at equal decisions each operation takes 1 / 1.2 of its time
        assert rows["direct_share"].to_numpy() == pytest.approx(1 / 1.2 - 1, abs=0.01)


def test_reruns_of_a_simulated_machine_have_no_spread(tmp_path: Path) -> None:
    """Equal reruns hide nothing, and the page no longer says that their spread is unknown."""
    predicted, *machines = (tmp_path / name for name in ("predicted", "a", "b"))
    run_experiment(composed([*SMALL]), predicted)
    for folder in machines:
        measured(SMALL, PERTURBED["all, 20 % longer"], folder)
    found, page = compare_folders(predicted, machines[0], tmp_path / "page", reruns=[machines[1]])
    assert (found.split["spread"] == 0).all() and found.within_spread == ()
    assert "spread of reruns is not known" not in page.read_text("utf-8")
    assert "rerun 1 of the measurement" in page.read_text("utf-8")
    with pytest.raises(Usage, match=r"--rerun .*predicted: a simulation has no spread; give a mea"):
        compare_folders(predicted, machines[0], tmp_path / "other", reruns=[predicted])
    assert not (tmp_path / "other-replay").exists(), "nothing is half-written"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[{group: decode, ratio: -2}]", "duration_ratios[0].ratio=-2.0: it must be finite and at"),
        ("[{grup: decode}]", "duration_ratios[0].grup: sim.cost.scaled.DurationRatio has no such"),
        ("[{ratio: 2}]", "duration_ratios[0].group: sim.cost.scaled.DurationRatio needs a value"),
    ],
)
def test_a_ratio_that_means_nothing_is_refused(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        run_spec_of(composed([*SMALL, f"duration_ratios={given}"]))


def test_ratios_are_of_simulations_alone() -> None:
    words = [*SMALL, "backend=cpu", "duration_ratios=[{group: decode, ratio: 2}]"]
    with pytest.raises(ValueError, match="duration_ratios scales a simulation; set"):
        run_spec_of(composed(words))
