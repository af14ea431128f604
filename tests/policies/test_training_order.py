"""What trains next, and several jobs in turn; and training beside serving on one device."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.contract.layout import Layout
from engine.contract.plan import Compute, Copy, Slice
from engine.contract.regions import PageSize, Tier, Work
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.planners.unit_chunks import UnitChunks
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.time_shared import DividedMemory, TakeTurns
from policies.training.demand_paging import DemandPaging
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from tests.support.offload import (
    ROOMY,
    job_of,
    laid_out,
    min_device_bytes,
    run,
    shape_of,
    trained,
)
from tests.support.replays import Replay, random_requests, replay
from traces.serving.request import Request, TrainingJob


def tasks_of(found: Replay) -> list[tuple[int, Work, int, int]]:
    """Job, work, part and microbatch of each launch."""
    pieces: list[Slice] = [
        op.slices[0]
        for plan in found.plans
        for op in plan.ops
        if isinstance(op, Compute) and op.slices[0].job.training is not None
    ]
    return [
        (p.job.job_id, p.work, p.layers.start, p.microbatch) for p in pieces if p.layers is not None
    ]


def test_a_step_goes_forward_backward_and_updates() -> None:
    shape = shape_of(random.Random(0), layers=1)
    job = job_of(shape, num_steps=1, microbatches=2)
    found = run(Zero3Offload(), laid_out(shape), job)
    forward, backward, update = Work.FORWARD, Work.BACKWARD, Work.UPDATE
    expected = [
        (0, work, u, k)
        for k in (0, 1)
        for work, units in ((forward, (0, 1, 2)), (backward, (2, 1, 0)))
        for u in units
    ]
    assert tasks_of(found) == [*expected, *((0, update, c, 1) for c in range(3))]


@pytest.mark.parametrize("tasks", [0, 1, 4])
def test_a_plan_holds_so_many_tasks_and_ends_with_its_step(tasks: int) -> None:
    shape = shape_of(random.Random(0), layers=1)
    found = run(Zero3Offload(), laid_out(shape), job_of(shape), tasks=tasks)
    counts = [sum(isinstance(op, Compute) for op in plan.ops) for plan in found.plans]
    step = {0: [9], 1: [1] * 9, 4: [4, 4, 1]}[tasks]
    assert counts == step * 3


@pytest.mark.parametrize("tasks", [1, 4])
def test_updates_may_come_in_one_plan(tasks: int) -> None:
    shape = shape_of(random.Random(0), layers=1)
    policy = Composed(TrainingOrder(tasks, updates="together"), Zero3Offload())
    found = trained(policy, [job_of(shape)], laid_out(shape))
    counts = [sum(isinstance(op, Compute) for op in plan.ops) for plan in found.plans]
    assert counts == {1: [1, 1, 1, 1, 1, 1, 3], 4: [4, 4, 1]}[tasks] * 3
    apart = run(Zero3Offload(), laid_out(shape), job_of(shape), tasks=tasks)
    assert tasks_of(found) == tasks_of(apart)


def two_jobs(turns: str, memory: Any = None, **how: Any) -> Replay:
    shapes = {i: shape_of(random.Random(i), layers=2) for i in (0, 1)}
    jobs = [job_of(shapes[i], i, num_steps=2) for i in (0, 1)]
    roomy = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
    layout = UnitChunks().prepare(shapes, jobs, roomy)
    policy = Composed(TrainingOrder(turns=turns), memory or Zero3Offload())  # type: ignore[arg-type]
    return trained(policy, jobs, layout, **how)


def changes(found: Replay) -> list[int]:
    """Whose turn it was, in order."""
    jobs = [job for job, *_ in tasks_of(found)]
    return [job for i, job in enumerate(jobs) if not i or jobs[i - 1] != job]


def test_jobs_take_turns_by_job_step_or_task() -> None:
    assert changes(two_jobs("job")) == [0, 1]
    assert changes(two_jobs("step")) == [0, 1, 0, 1]
    assert changes(two_jobs("task"))[:6] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("memory", [PatrickStar(), DemandPaging("opt"), Zero3Offload()])
@pytest.mark.parametrize("turns", ["job", "step", "task"])
def test_jobs_in_turn_share_little_memory(turns: str, memory: Any) -> None:
    """Activations of both may be there at once; states of the one leave for the other."""
    shapes = [shape_of(random.Random(i), layers=2) for i in (0, 1)]
    least = [
        min_device_bytes(laid_out(shape).training[0], job_of(shape), False, True)
        for shape in shapes
    ]
    two_jobs(turns, memory, gpu=sum(least) if turns == "task" else max(least))


# ---- beside serving
PAGE = PageSize(tokens=4, nbytes=4000)


def beside(
    requests: list[Request], memory: Any, every: int = 3, share: float = 0.5, **how: Any
) -> Replay:
    shape = shape_of(random.Random(3), layers=3, item_bytes=40, optimizer_item_bytes=80)
    job = TrainingJob(1000, 0, len(shape.units), 8, num_steps=4)
    capacity = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
    layout = UnitChunks().prepare({1000: shape}, [job], capacity)
    policy = Composed(
        TakeTurns(ChunkedPrefill(token_budget=48, max_jobs=12), TrainingOrder(), every),
        DividedMemory(how.pop("serving", PagedRestart()), memory, share),
    )
    work = [job, *requests] if requests else [job]
    return replay(policy, work, page=PAGE, layout=layout, host_pages=60, **how).check()


@pytest.mark.broad(6)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("memory", [Zero3Offload(), PatrickStar(), DemandPaging("opt")])
@pytest.mark.parametrize("serving", [PagedRestart(), PagedSwap()])
def test_training_beside_serving_obeys_the_laws(memory: Any, serving: Any, depth: int) -> None:
    found = beside(random_requests(depth, 20), memory, depth=depth, serving=serving, pages=80)
    assert len([task for task in tasks_of(found) if task[1] is Work.UPDATE]) == 4 * 5


def test_every_nth_plan_trains_while_both_have_work() -> None:
    found = beside(random_requests(1, 20), Zero3Offload(), every=4, depth=1, pages=80)
    trains = [
        any(
            piece.job.training is not None
            for op in plan.ops
            if isinstance(op, Compute)
            for piece in op.slices
        )
        for plan in found.plans
    ]
    last = len(trains) - trains[::-1].index(False)  # serving ends
    assert trains[: min(last, 60)] == [i % 4 == 3 for i in range(min(last, 60))]


def test_one_side_alone_goes_on_at_once() -> None:
    alone = beside([], Zero3Offload(), pages=80)
    assert all(plan.ops for plan in alone.plans)
    policy = Composed(
        TakeTurns(ChunkedPrefill(48, 12), TrainingOrder()),
        DividedMemory(PagedRestart(), Zero3Offload(), 0.0),
    )
    replay(policy, random_requests(2, 10), pages=60).check()


def test_plans_beside_serving_do_not_depend_on_durations() -> None:
    logs = [
        beside(random_requests(4, 20), PatrickStar(), pages=80, noise=noise, seed=i).log()
        for i, noise in enumerate((0.0, 0.4, 0.4))
    ]
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("share", [0.15, 0.3])
def test_kv_in_the_share_of_serving_takes_nothing_of_a_memory_budget(share: float) -> None:
    """Training beside serving moves and updates what it does alone in its share."""
    watched = [
        beside(requests, PatrickStar(), share=share, pages=60)
        for requests in ([], random_requests(1, 20))
    ]
    alone, served = [found.engine.state.profile.moments(1000) for found in watched]
    assert not any(moment.kv_bytes for moment in alone)
    most = int(60 * PAGE.nbytes * share)
    assert max(moment.kv_bytes for moment in served) > most, "it would take the whole share"
    assert trained_operations(watched[0]) == trained_operations(watched[1])
    assert any(" update on compute" in op for op in trained_operations(watched[0]))


def trained_operations(found: Replay) -> list[str]:
    """Copies and launches of the training job, in issue order."""
    ops = list[str]()
    for op in [op for plan in found.plans for op in plan.ops]:
        if isinstance(op, Copy) and op.src.region.owner == 1000:
            ops.append(f"{op.src} to {op.dst.tier}")
        elif isinstance(op, Compute) and (piece := op.slices[0]).job.training is not None:
            ops.append(f"{piece.layers} {piece.work} on {op.on}")
    return ops


def test_settings_of_turns_are_checked() -> None:
    with pytest.raises(ValueError, match="every is 1"):
        TakeTurns(ChunkedPrefill(), TrainingOrder(), 1)
    with pytest.raises(ValueError, match="device_share is 2"):
        DividedMemory(PagedRestart(), Zero3Offload(), 2)
    with pytest.raises(ValueError, match="tasks is -1"):
        TrainingOrder(-1)
    empty = Composed(TrainingOrder(), Zero3Offload())
    job = TrainingJob(0, 0, 3, 8)
    with pytest.raises(ValueError, match="choose a planner that cuts chunks at units"):
        replay(empty, [job], layout=Layout())
