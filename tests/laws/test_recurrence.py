"""Law 15 of training: steps that recur are planned as they would be decided, byte for byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.layout import Layout, Mode
from engine.contract.plan import Slice
from engine.contract.policy import Memory, PlanBuilder, Traits
from engine.contract.regions import Tier
from engine.contract.view import View
from policies.composed import Composed
from policies.planners.unit_chunks import UnitChunks
from policies.training.demand_paging import DemandPaging
from policies.training.out_of_memory import OutOfMemory
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from tests.support.offload import (
    MEMORIES,
    ROOMY,
    job_of,
    laid_out,
    min_device_bytes,
    shape_of,
    trained,
)
from tests.support.replays import Replay
from tests.support.strategies import cases
from traces.serving.request import TrainingJob

STEPS = 6


def both(
    memory: Memory, seed: int, mode: Mode, spare: float, tasks: int = 0, **how: Any
) -> tuple[Replay, Replay]:
    """With and without asking for each step. `spare`: of what all would take, beyond the least."""
    shape = shape_of(random.Random(seed), layers=3, tied=bool(seed % 2))
    job = job_of(shape, num_steps=STEPS, microbatches=1 + seed % 3)
    layout = laid_out(shape, mode)
    least = min_device_bytes(layout.training[0], job, True, True)
    gpu = least + int(spare * sum(c.optimizer_bytes for c in layout.training[0].chunks))
    policy = Composed(TrainingOrder(tasks), memory)
    slow = trained(policy, [job], layout, gpu, fast_forward=False, **how)
    try:
        return trained(policy, [job], layout, gpu, **how), slow
    except OutOfMemory as error:
        raise AssertionError("only the fast run is out of memory") from error


@pytest.mark.broad(6)
@pytest.mark.parametrize("name", MEMORIES)
@given(
    seed=st.integers(0, 99),
    mode=st.sampled_from(Mode),
    spare=st.floats(0, 2),
    depth=st.integers(1, 3),
    tasks=st.integers(0, 4),
)
@cases(20)
def test_a_step_that_recurs_is_planned_as_it_would_be_decided(name: str, **setting: Any) -> None:
    try:
        fast, slow = both(MEMORIES[name], **setting)
    except OutOfMemory:
        return  # step by step, too
    assert fast.engine.asked <= slow.engine.asked == slow.engine.steps
    tables = fast.recorder.tables(), slow.recorder.tables()
    assert tables[0] == tables[1]


@pytest.mark.broad(3)
@pytest.mark.parametrize("tasks", [0, 1])
@pytest.mark.parametrize("name", ["patrickstar", "zero3_offload", "lru"])
def test_most_steps_recur(name: str, tasks: int) -> None:
    """The property above is not about nothing."""
    fast, slow = both(MEMORIES[name], 3, Mode.OFFLOAD, 0.5, tasks)
    assert fast.engine.asked <= 4 / STEPS * slow.engine.asked


@dataclass(frozen=True)
class Moody:
    """Reads what its traits say that it does not read."""

    traits: ClassVar[Traits] = Traits(recurs=True)

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        memory = DemandPaging() if view.issued == STEPS - 1 else Zero3Offload()
        memory.fit(batch, view, plan)


def test_a_policy_that_reads_more_than_its_traits_say_is_not_asked() -> None:
    fast, slow = both(Moody(), 3, Mode.KEEP, 0.5)
    assert fast.log() != slow.log()
    assert fast.log()[:-1] == slow.log()[:-1]


@pytest.mark.broad(4)
@pytest.mark.parametrize("tasks", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_an_arrival_in_between_ends_it(tasks: int, seed: int) -> None:
    """A second job arrives somewhere in a step that recurs, and ends before the first."""
    arrival_ns = random.Random(seed).randrange(120_000, 200_000)
    jobs, policy, layout = two_jobs(arrival_ns, tasks)
    fast, slow = (trained(policy, jobs, layout, fast_forward=is_fast) for is_fast in (True, False))
    assert fast.engine.asked < slow.engine.asked
    assert fast.recorder.tables() == slow.recorder.tables()


def two_jobs(arrival_ns: int, tasks: int = 1) -> tuple[list[TrainingJob], Composed, Layout]:
    """A long one and, from then on, a short one beside it."""
    shapes = {i: shape_of(random.Random(i)) for i in (0, 1)}
    jobs = [job_of(shapes[0], num_steps=20), replace(job_of(shapes[1], 1), arrival_ns=arrival_ns)]
    roomy = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
    layout = UnitChunks().prepare(shapes, jobs, roomy)
    return jobs, Composed(TrainingOrder(tasks, turns="step"), PatrickStar()), layout


@pytest.mark.broad(2)
@pytest.mark.parametrize("beside_ns", [-1, 0, 1])
def test_the_hosts_time_passes_as_with_an_event_of_its_own(
    beside_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a job arrives just when it is over."""
    jobs, policy, layout = two_jobs(10_000_000)
    rows = trained(policy, jobs, layout, host_ns=300).recorder.steps
    ready_ns = next(at_ns + host_ns for _, at_ns, host_ns, *_ in rows[100:] if host_ns)
    found = []
    for skips in (True, False):
        if not skips:
            monkeypatch.setattr("engine.loop.engine.passed_to", lambda *_: False)
        jobs, policy, layout = two_jobs(ready_ns + beside_ns)
        found.append(trained(policy, jobs, layout, host_ns=300).recorder.tables())
    assert found[0] == found[1]
