"""The protocol of fidelity: turns, discarded runs, and what is done again where it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.run import load
from tandem.cli.errors import RunFailed
from tandem.config.compose import composed
from tandem.fidelity import protocol
from tandem.fidelity.protocol import ATTEMPTS, GRID, Case
from tandem.wiring.cost import profile_hash
from tandem.wiring.profile import AGAIN
from tandem.wiring.run_spec import run_spec_of
from tests.laws.test_faults import profiled


def untold(text: str) -> None:
    """Hears of work and tells nothing."""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    for name in GRID:
        (tmp_path / "calibrated" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "calibrated" / name).write_text(name)
    return Case("some", ("limit=2",), tmp_path / "case", tmp_path / "calibrated", "mine")


class Machine:
    """A machine whose probes drift by these shares, run after run; keeps what it is told to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drifts: Sequence[float]) -> None:
        self.done: list[str] = []
        self.drifts = iter(drifts)
        self.composed: list[tuple[list[str], str | None]] = []
        monkeypatch.setattr(protocol, "run", self.measure)
        monkeypatch.setattr(protocol, "drift", lambda run: next(self.drifts))
        monkeypatch.setattr(protocol, "composed", lambda *given: self.composed.append(given))
        monkeypatch.setattr(protocol, "fitted_replay", self.replay)
        monkeypatch.setattr(protocol, "refitted", lambda profile: self.done.append("fit"))
        monkeypatch.setattr(protocol, "pair", lambda case, number: f"pair {number}")

    def measure(
        self, settings: Sequence[str], folder: Path, replaces: bool, config_dir: str | None
    ) -> None:
        self.done.append(folder.parent.name)
        assert "profile" not in " ".join(settings), "a measurement takes no profile"
        assert config_dir == "mine" and not replaces

    def replay(self, point: object, profile: Path, number: int, *, streams: bool) -> None:
        assert streams
        assert sorted(path.name for path in profile.iterdir()) == sorted(GRID)
        self.done.append(f"synthetic {number}")


def test_both_sides_are_measured_in_turns_and_only_synthetic_replays_are_fitted(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of synthetic requests runs before and after every run, accepted or not."""
    machine, told = Machine(monkeypatch, [0.0, 0.05, 0.01]), list[str]()
    found = protocol.reruns(case, ("backend=cpu",), 2, told.append)
    turns = [word for i in range(3) for word in (f"synthetic {i}", f"run{i}")]
    assert machine.done == [*turns, "synthetic 3", "fit"]
    assert machine.composed == [(["limit=2", "backend=cpu"], "mine")] * 4
    assert len(told) == 7 and "run 1, probes moved 5.0%: discarded, and repeated" in told[3]
    kept = [(run.number, run.moved, run.is_steady, str(run.pair)) for run in found]
    assert kept == [
        (0, 0.0, True, "pair 0"),
        (1, 0.05, False, "pair 1"),
        (2, 0.01, True, "pair 2"),
    ], "a discarded run is told, too"


def test_a_machine_that_never_rests_is_given_up(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, [0.031] * 100)
    found = protocol.reruns(case, (), 2, untold)
    assert len(found) == 2 * ATTEMPTS and not any(run.is_steady for run in found)
    assert machine.done[-2:] == [f"synthetic {2 * ATTEMPTS}", "fit"]


def test_remains_of_a_killed_replay_are_removed_and_a_finished_one_is_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their steps would be fitted, too."""
    Machine(monkeypatch, [])
    protocol.synthetic_replay(case, (), 0, untold)
    for name, text in (("fitted-1.running", ""), ("fitted-1", '{"status": "interrupted"}')):
        (case.profile / name).mkdir()
        (case.profile / name / "status.json").write_text(text)
    protocol.synthetic_replay(case, (), 1, untold)  # asserts that nothing but the grid is left
    (case.profile / "fitted-2").mkdir()
    (case.profile / "fitted-2" / "status.json").write_text('{"status": "ok"}')
    machine = Machine(monkeypatch, [])
    protocol.synthetic_replay(case, (), 2, untold)
    assert machine.done == []


def test_an_unsteady_calibration_is_discarded_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals, told = iter([0.031, -0.04, 0.029]), list[str]()

    def calibrate(point: object, folder: Path, replays: int) -> None:
        folder.mkdir()
        rows = pd.DataFrame({"total": [next(totals)]}, [f"{AGAIN}all launches"])
        rows.to_csv(folder / "errors.csv", index_label="class")

    monkeypatch.setattr(protocol, "calibrate", calibrate)
    monkeypatch.setattr(protocol, "composed", lambda *given: SimpleNamespace())
    made = protocol.calibrated([], tmp_path / "profile", 2, told.append)
    assert made == tmp_path / "profile"
    assert protocol.num_discarded(made) == 2 == len(list(tmp_path.glob("profile-unsteady?")))
    assert [text.split()[0] for text in told] == ["the", "the", "calibrated"]
    assert protocol.calibrated([], tmp_path / "profile", 2, untold) == made, "it is there"
    totals = iter([0.5] * ATTEMPTS)
    with pytest.raises(RunFailed, match="no steady calibration in 6; go on there"):
        protocol.calibrated([], tmp_path / "other", 2, untold)


def test_a_capacity_is_that_of_all_requests_at_once_whatever_arrivals_are_chosen(
    tmp_path: Path,
) -> None:
    words = ("limit=2", "model=micro_llama", "arrival=gamma", "arrival.burstiness=0.2")
    found = protocol.capacity(words, (), tmp_path / "run")
    done = load(tmp_path / "run")
    assert done.requests["arrival_ns"].eq(0).all()
    assert found == pytest.approx(2e9 / done.requests["finish_ns"].max())


@pytest.mark.parametrize("policy", ["coserve", "coserve_slo", "temporal"])
def test_what_is_served_alone_keeps_the_rules_of_the_policy(policy: str) -> None:
    served = ("limit=2", "model=micro_llama", f"policy={policy}", "scheduling.serving.max_jobs=7")
    job = (
        "training=finetune",
        "training/recipe=adamw",
        "training.rate=2",
        "planner.modes=recompute",
    )
    alone = protocol.serving_alone((*served, *job))
    assert alone == [*served, "training=none", "planner=none"]
    spec, beside = (run_spec_of(composed([*words])) for words in (alone, (*served, *job)))
    assert not spec.trainees and len(beside.trainees) == 1
    assert spec.policy == beside.policy and spec.policy.scheduling.serving.max_jobs == 7  # type: ignore[attr-defined]
    assert protocol.serving_alone(("limit=2", "policy=orca")) == ["limit=2", "policy=orca"]


def test_a_capacity_of_a_machine_that_drifts_is_discarded_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, folder, told = ("limit=2", "model=micro_llama"), tmp_path / "capacity", list[str]()
    drifts = iter([0.2, 0.031, 0.03, 0.03])
    monkeypatch.setattr(protocol, "drift", lambda run: next(drifts))
    found = protocol.steady_capacity(words, (), folder, told.append)
    assert [text.startswith("capacity: probes moved") for text in told] == [True, True, False]
    assert protocol.num_discarded(folder) == 2
    began_ns = (folder / "status.json").stat().st_mtime_ns
    assert protocol.steady_capacity(words, (), folder, untold) == found
    assert (folder / "status.json").stat().st_mtime_ns == began_ns, "it is there"
    drifts = iter([0.2] * ATTEMPTS)
    with pytest.raises(RunFailed, match="no steady run in 6; go on there"):
        protocol.steady_capacity(words, (), tmp_path / "other", untold)


@pytest.mark.parametrize("name", ["0.5,0.8", "a b", "[a]", "ä=b", "it's"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    case = Case("some", ("limit=2",), tmp_path / name, tmp_path)
    assert composed([*case.predicted]).config["profile"] == str(tmp_path / name / "profile")


def test_a_profile_that_has_grown_predicts_anew(tmp_path: Path) -> None:
    """More reruns in a folder are more replays: an earlier prediction has other costs."""
    case = Case("some", ("limit=2", "model=micro_llama"), tmp_path / "case", tmp_path)
    case.folder.mkdir()
    profiled(case.profile, 4000)
    first = protocol.prediction(case)
    assert protocol.prediction(case).provenance == first.provenance, "it is there"
    shutil.rmtree(case.profile)
    profiled(case.profile, 3000)
    again = protocol.prediction(case)
    assert again.provenance["profile_hash"] == profile_hash(case.profile)
    assert again.provenance["profile_hash"] != first.provenance["profile_hash"]


def test_predictions_vary_by_their_pace(tmp_path: Path) -> None:
    case = Case("some", ("limit=2", "model=micro_llama"), tmp_path / "case", tmp_path)
    case.folder.mkdir()
    profiled(case.profile, 4000)
    found = [*protocol.varied(case), protocol.prediction(case)]
    paces = [run.config["pace"] for run in found]
    assert sorted(paces) == [0.99, 0.9925, 0.995, 0.9975, 1.0, 1.0025, 1.005, 1.0075, 1.01]
    ends = sorted(zip(paces, [int(run.requests["finish_ns"].max()) for run in found], strict=True))
    assert [end for _, end in ends] == sorted({end for _, end in ends}), "one is slower than before"
