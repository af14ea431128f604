"""Law 15 of training: steps that recur are planned as they would be decided, byte for byte."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan import Plan, Slice
from engine.policy import Composed, Memory
from engine.training_layout import Mode
from engine.view import View
from policies.demand_paging import DemandPaging
from policies.out_of_memory import OutOfMemory
from policies.patrickstar import PatrickStar
from policies.training_order import TrainingOrder
from policies.zero3_offload import Zero3Offload
from tests.offload import MEMORIES, job_of, laid_out, least_device_bytes, shape_of, trained
from tests.replays import Replay
from tests.strategies import cases

STEPS = 7


def both(memory: Memory, seed: int, mode: Mode, spare: float, **how: Any) -> tuple[Replay, Replay]:
    """With and without asking for each step. `spare`: of what all would take, beyond the least."""
    shape = shape_of(random.Random(seed), layers=4, tied=bool(seed % 2))
    job = job_of(shape, num_steps=STEPS, microbatches=1 + seed % 3)
    layout = laid_out(shape, mode)
    least = least_device_bytes(layout.training[0], job, True, True)
    gpu = least + int(spare * sum(c.optimizer_bytes for c in layout.training[0].chunks))
    policy = Composed(TrainingOrder(0), memory)
    runs = [trained(policy, [job], layout, gpu, fast_forward=fast, **how) for fast in (True, False)]
    return runs[0], runs[1]


@pytest.mark.parametrize("name", MEMORIES)
@given(
    seed=st.integers(0, 99),
    mode=st.sampled_from(Mode),
    spare=st.floats(0, 2),
    depth=st.integers(1, 3),
)
@cases(20)
def test_a_step_that_recurs_is_planned_as_it_would_be_decided(name: str, **setting: Any) -> None:
    try:
        fast, slow = both(MEMORIES[name], **setting)
    except OutOfMemory:
        return  # in both
    assert fast.engine.asked <= slow.engine.asked == STEPS
    tables = fast.recorder.tables(), slow.recorder.tables()
    assert tables[0] == tables[1]


@pytest.mark.parametrize("name", ["patrickstar", "zero3_offload", "lru", "opt_on_device"])
def test_most_steps_recur(name: str) -> None:
    """The property above is not about nothing."""
    fast, slow = both(MEMORIES[name], 3, Mode.OFFLOAD, 0.5, depth=2)
    assert fast.engine.asked <= 5 < slow.engine.asked == STEPS


@dataclass(frozen=True)
class Moody:
    """Goes by what it says that it does not know."""

    recurs: ClassVar[bool] = True

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        memory = DemandPaging() if view.issued == STEPS - 1 else Zero3Offload()
        return memory.fit(batch, view)


def test_who_goes_by_more_than_he_says_is_not_asked() -> None:
    fast, slow = both(Moody(), 3, Mode.KEEP, 0.5)
    assert fast.log() != slow.log()
    assert fast.log()[:-1] == slow.log()[:-1]


def test_a_part_of_a_step_is_always_asked_for() -> None:
    shape = shape_of(random.Random(0))
    layout, job = laid_out(shape), job_of(shape, num_steps=STEPS)
    found = trained(Composed(TrainingOrder(2), PatrickStar()), [job], layout)
    assert found.engine.asked == found.engine.steps > STEPS
