"""Laws 11 and 12 under pressure: every policy trains every kind of job as plain torch does.

In a sixth of the memory of its states where that is possible; else in the least in which the
simulator can (`tandem plan` names it), so that every run has to make room.
"""

from __future__ import annotations

import pytest

from engine.training_layout import Mode
from tests.pressure import (
    BF16,
    CASES,
    CLIP,
    DROPOUT,
    JOB,
    LORA,
    POLICIES,
    WHOLE,
    pressing,
)
from tests.training_runs import Result
from tests.trainings import GPU, Trained, differing, plain, state_bytes, train

EVICTING = ("train_lru", "train_fifo", "train_opt", "patrickstar")
ROOMY = "budget.device_bytes=200000000"


@pytest.mark.broad(36)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_as_plain_torch_and_is_decided_alike(policy: str, case: str) -> None:
    """To the bit, bfloat16 too: the bound is 0, since each number is computed by the same kernels
    from the same numbers in the same order, whatever lay elsewhere meanwhile."""
    words = pressing(*JOB, *POLICIES[policy], *CASES[case])
    runs = {name: train(name, *words) for name in ("sim", "lockstep", "cpu")}
    if policy not in WHOLE and LORA not in CASES[case]:
        found = runs["sim"].setting
        assert found.room.capacity_bytes[GPU] == state_bytes(found) // 6
    if policy in EVICTING:
        assert runs["sim"].log != train("sim", *words, ROOMY).log, "nobody had to make room"
    for name in ("lockstep", "cpu"):
        assert not differing(runs[name].result, trained_plainly(case))
        assert runs[name].log == runs["sim"].log, f"{name} decides otherwise"
        assert 0 < max(held_bytes(runs[name])) <= runs[name].setting.room.capacity_bytes[GPU]


@pytest.mark.broad(36)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_does_with_a_thread_for_each_lane(policy: str, case: str) -> None:
    """A job comes at the start, and no policy of training decides by a duration: so law 11 holds of
    the wall clock, too."""
    words = pressing(*JOB, *POLICIES[policy], *CASES[case])
    wall = train("cpu", *words, "backend.clock=wall")
    assert not differing(wall.result, trained_plainly(case))
    assert wall.log == train("sim", *words).log


@pytest.mark.broad(9)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", ["train_lru", "train_opt", "patrickstar"])
def test_gradients_may_take_the_place_of_weights(policy: str, mode: Mode) -> None:
    """In bfloat16 with one microbatch a step."""
    words = (*JOB, *POLICIES[policy], f"planner.modes={mode}", BF16, CLIP, DROPOUT)
    words = pressing(*words, "memory.reuses_gradients=true")
    found = train("lockstep", *words)
    assert not differing(found.result, plain("policy=train_on_device", *JOB, BF16, CLIP, DROPOUT))
    assert found.log == train("sim", *words).log == train("cpu", *words).log


def trained_plainly(case: str) -> Result:
    """What plain torch makes of a case: the same for every policy."""
    return plain("policy=train_on_device", *JOB, *CASES[case])


def held_bytes(found: Trained) -> list[int]:
    """What is used of the device, at each row."""
    rows = found.recorder.tables()["memory"].to_pylist()
    return [r["capacity_bytes"] - r["free_bytes"] for r in rows if r["tier"] == "gpu"]
