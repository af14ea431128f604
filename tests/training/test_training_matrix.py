"""Laws 11 and 12 under pressure: every policy trains every kind of job as plain torch does.

In a sixth of the memory of its states where that is possible; else in the least in which the
simulator can (`tandem plan` names it), so that every run has to make room.
"""

from __future__ import annotations

import pytest

from engine.contract.layout import Mode
from tests.support.pressure import (
    BF16,
    CASES,
    CLIP,
    DROPOUT,
    GRID,
    JOB,
    POLICIES,
    Words,
    has_sixth,
    job_of,
    pressing,
)
from tests.training.training_runs import Result
from tests.training.trainings import GPU, Trained, differing, plain, state_bytes, train

EVICTING = ("train_lru", "train_fifo", "train_opt", "patrickstar")
SIX = "training.num_steps=6"
TWO = "training.microbatches=2"
INPUTS_OUT = "planner.offloads_inputs=true"
ROOMY = "budget.device_bytes=200000000"
EAGER = "planner.updates=eager"
RECURRING: dict[str, Words] = {
    "protrain": ("policy=protrain",),
    "protrain given": (
        *("policy=protrain", "planner.persistent=1", "planner.buffers=1"),
        *("planner.swaps=0", "planner.checkpoints=1"),
    ),
    "zero3_offload": ("policy=zero3_offload", EAGER),
    "patrickstar": (*POLICIES["patrickstar"], EAGER),
}


@pytest.mark.broad(36)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_backends_train_as_plain_torch_and_decide_alike(policy: str, case: str) -> None:
    """To the bit, bfloat16 too: the bound is 0, since each number is computed by the same kernels
    from the same numbers in the same order, whatever lay elsewhere meanwhile."""
    trains_plainly_and_alike(policy, CASES[case])


@pytest.mark.broad(144)
@pytest.mark.parametrize("case", GRID)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_mode_trains_as_plain_torch_with_each_accumulation_full_and_lora(
    policy: str, case: str
) -> None:
    """In fp32."""
    trains_plainly_and_alike(policy, GRID[case])


@pytest.mark.broad(16)
@pytest.mark.parametrize("mode", ["recompute", "offload"])
@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_of_layers_may_wait_on_the_host(policy: str, mode: str) -> None:
    trains_plainly_and_alike(policy, (f"planner.modes={mode}", INPUTS_OUT, TWO, CLIP, DROPOUT))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_are_planned_unasked_train_the_same(policy: str) -> None:
    """From the fourth step on; PatrickStar, which warms up in the first, from the fifth."""
    traits = ("planner.modes=offload", CLIP, DROPOUT, SIX)
    runs = trains_plainly_and_alike(policy, traits)
    for found in runs.values():
        assert 3 * found.asked <= 2 * found.plans, "two of six steps at least recur"


@pytest.mark.slow
@pytest.mark.parametrize("words", RECURRING.values(), ids=RECURRING)
def test_steps_of_protrain_and_of_eager_updates_recur(words: Words) -> None:
    given = pressing(*JOB, *words, DROPOUT, SIX)
    runs = {name: train(name, *given) for name in ("sim", "lockstep", "cpu")}
    expected = plain("policy=train_on_device", *JOB, DROPOUT, SIX)
    for found in runs.values():
        assert found.log == runs["sim"].log
        assert 3 * found.asked <= 2 * found.plans, "two of six steps at least recur"
    assert not differing(runs["lockstep"].result, expected)
    assert not differing(runs["cpu"].result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_thread_for_each_lane_trains_as_plain_torch(policy: str, case: str) -> None:
    """A job comes at the start, and no policy of training decides by a duration: so law 11 holds of
    the wall clock, too."""
    words = pressing(*job_of(policy, *CASES[case]))
    wall = train("cpu", *words, "backend.clock=wall")
    assert not differing(wall.result, trained_plainly(CASES[case]))
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


def trains_plainly_and_alike(policy: str, traits: Words) -> dict[str, Trained]:
    """In the simulator, in lockstep and on the CPU, in scarce memory."""
    words = pressing(*job_of(policy, *traits))
    runs = {name: train(name, *words) for name in ("sim", "lockstep", "cpu")}
    capacity_bytes = runs["sim"].setting.room.capacity_bytes[GPU]
    if has_sixth(policy, *traits):
        assert capacity_bytes == state_bytes(runs["sim"].setting) // 6
    if policy in EVICTING:
        assert runs["sim"].log != train("sim", *words, ROOMY).log, "no policy had to make room"
    for name in ("lockstep", "cpu"):
        found = runs[name]
        assert not differing(found.result, trained_plainly(traits))
        assert found.log == runs["sim"].log, f"{name} decides otherwise"
        assert found.setting.room.capacity_bytes[GPU] == capacity_bytes
        assert 0 < max(measured_bytes(found)) <= capacity_bytes
    return runs


def trained_plainly(traits: Words) -> Result:
    """The result of plain torch, equal for every policy."""
    return plain("policy=train_on_device", *JOB, *traits)


def measured_bytes(found: Trained) -> list[int]:
    """Bytes of torch's storages on the device, at each row that the meter has read."""
    rows = found.recorder.tables()["memory"].to_pylist()
    measured = [r["measured_bytes"] for r in rows if r["tier"] == "gpu"]
    return [nbytes for nbytes in measured if nbytes is not None]
