"""A measured plan log of training played back: equal bytes, copies and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.run import Run, load
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tests.support.pressure import CASES, JOB, POLICIES, pressing
from tests.training.trainings import SMALL

pytestmark = pytest.mark.ci

BYTES = ("kv", "weight", "gradient", "optimizer", "activation", "buffer")
CHOSEN = ("policy=", "planner.", "memory.")  # by the run that is played back
PAIRS = [
    (policy, clock, [*CASES][(2 * i + 5 * k) % len(CASES)])
    for i, policy in enumerate(POLICIES)
    for k, clock in enumerate(("service", "wall"))
]


@pytest.mark.broad(16)
@pytest.mark.parametrize(("policy", "clock", "case"), PAIRS)
def test_a_replay_has_identical_bytes_copies_and_losses(
    policy: str, clock: str, case: str, tmp_path: Path, short_probes: None
) -> None:
    """On the chunks of the run that is played back, which need no layout of their own. A
    replay can be played back in its turn."""
    words = pressing(*JOB, *POLICIES[policy], *CASES[case])
    measured = run(tmp_path / "a", *words, "backend=cpu", f"backend.clock={clock}")
    job = [word for word in words if not word.startswith(CHOSEN)]
    replay = [*job, "policy=recorded"]
    played = run(tmp_path / "b", *replay, "backend=lockstep", f"replayed={tmp_path / 'a'}")
    again = run(tmp_path / "c", *replay, "backend=sim", f"replayed={tmp_path / 'b'}")
    assert booked(again) == booked(played) == booked(measured)
    assert copies(again) == copies(played) == copies(measured)
    assert played.training["loss"].tolist() == measured.training["loss"].tolist()
    assert copies(measured) or policy == "train_on_device"


PROTRAIN = ("model.num_layers=6", "training.num_steps=2")


def test_plans_of_a_search_are_played_back_in_more_memory(tmp_path: Path) -> None:
    """In which the planner itself would find another configuration."""
    small = ("policy=protrain", "budget.device_bytes=1200000", *PROTRAIN, "backend=sim")
    first = run(tmp_path / "a", *small)
    replay = ["policy=recorded", f"replayed={tmp_path / 'a'}", *PROTRAIN, "backend=sim"]
    played = run(tmp_path / "b", *replay, "budget.device_bytes=40000000")
    assert copies(played) == copies(first) != []
    more = "budget.device_bytes=40000000"
    large = run(tmp_path / "c", "policy=protrain", more, *PROTRAIN, "backend=sim")
    assert copies(large) != copies(first)


def test_chunks_of_another_size_are_refused(tmp_path: Path) -> None:
    """PatrickStar's planner chooses the size of chunks by the memory."""
    run(tmp_path / "a", "policy=patrickstar", "budget.device_bytes=2000000", "backend=sim")
    replay = ["policy=recorded", f"replayed={tmp_path / 'a'}", "backend=sim"]
    with pytest.raises(ValueError, match=r"layout.json holds no layout .*chunks of other sizes"):
        run(tmp_path / "b", *replay, "budget.device_bytes=200000000")


def test_a_damaged_layout_is_told(tmp_path: Path) -> None:
    run(tmp_path / "a", "policy=protrain", *PROTRAIN, "backend=sim")
    path = tmp_path / "a" / "layout.json"
    path.write_text(path.read_text()[:-9])
    replay = ["policy=recorded", f"replayed={tmp_path / 'a'}", *PROTRAIN, "backend=sim"]
    with pytest.raises(ValueError, match=r"layout.json is damaged") as caught:
        run(tmp_path / "b", *replay)
    assert "play plans back on" not in str(caught.value)


def test_a_layout_of_another_job_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", "policy=protrain", *PROTRAIN, "backend=sim")
    replay = ["policy=recorded", f"replayed={tmp_path / 'a'}", "backend=sim"]
    with pytest.raises(ValueError, match=r"layout.json holds no layout of this job .*; play plans"):
        run(tmp_path / "b", *replay, "model.num_layers=5")


def test_a_replay_takes_no_planner_of_its_own(tmp_path: Path) -> None:
    run(tmp_path / "a", "policy=zero3_offload", "training.num_steps=1", "backend=sim")
    replay = ["policy=recorded", f"replayed={tmp_path / 'a'}", "backend=sim"]
    with pytest.raises(ValueError, match="planner: plans are played back on the chunks of the run"):
        run(tmp_path / "b", *replay, "+planner=unit_chunks", "training.num_steps=1")


def test_serving_plans_train_nothing(tmp_path: Path) -> None:
    """Told as ever where the run that is played back had no planner."""
    run_experiment(composed(["model=micro_llama", "limit=1", "backend=sim"]), tmp_path / "a")
    with pytest.raises(ValueError, match="training needs a policy that trains"):
        run(tmp_path / "b", "policy=recorded", f"replayed={tmp_path / 'a'}", "backend=sim")


def run(folder: Path, *words: str) -> Run:
    run_experiment(composed([*SMALL, *words]), folder)
    return load(folder)


def booked(run: Run) -> list[tuple[Any, ...]]:
    """Bytes of each tier after each booking, by kind."""
    columns = ["step", "tier", "capacity_bytes", *(f"{kind}_bytes" for kind in BYTES)]
    rows = run.memory[run.memory["cause"].eq("issue")]
    return [*rows[columns].itertuples(index=False, name=None)]


def copies(run: Run) -> list[tuple[Any, ...]]:
    """Every copy: its plan, direction and bytes."""
    rows = run.steps[run.steps["lane"].str.contains("->")]
    return sorted(rows[["step", "lane", "nbytes"]].itertuples(index=False, name=None))
