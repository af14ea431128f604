"""Clipping by the norm of all gradients: no update begins before the last backward has ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Compute, Copy, Free, Grow
from engine.contract.regions import Place, Work, norm
from tests.training.trainings import Trained, differing, plain, train

Begins = Grow | Copy
CLIPS = "training.recipe.clip_norm=0.5"
MARGIN = ("policy=patrickstar", "planner.chunk_elements=20000", "planner.oversize=alone")
MARGIN += ("scheduling.tasks=0", "training.num_steps=4", "budget.device_bytes=2800000")
POLICIES: dict[str, Sequence[str]] = {
    "margin": MARGIN,
    "host": (*MARGIN, "memory.updates=host"),
    "zero3_offload": ("policy=zero3_offload", "scheduling.tasks=0"),
    "fsdp2_offload": ("policy=fsdp2_offload", "scheduling.tasks=0"),
    "zero_offload": ("policy=zero_offload",),
    "all_on_device": ("policy=train_on_device",),
    "train_lru": ("policy=train_lru", "budget.device_bytes=1500000"),
}


def launches(run: Trained, work: Work) -> list[Compute]:
    ops = [span.op for span in run.recorder.spans if isinstance(span.op, Compute)]
    return [op for op in ops if op.slices[0].work is work]


def early(run: Trained) -> int:
    """Updates that begin before the last backward of their step has ended."""
    spans = {span.op: span for span in run.recorder.spans}
    last = dict[int, int]()
    for op in launches(run, Work.BACKWARD):
        step = op.slices[0].microbatch
        last[step] = max(last.get(step, 0), spans[op].end_ns)
    updates = launches(run, Work.UPDATE)
    return sum(spans[op].start_ns < last[op.slices[0].microbatch] for op in updates)


def only_norms(places: Iterable[Place]) -> list[Place]:
    return [place for place in places if place.region == norm(place.region.owner).region]


def norms(ops: Sequence[Compute]) -> set[Place]:
    return {*only_norms([place for op in ops for place in (*op.reads, *op.writes)])}


@pytest.mark.parametrize("name", POLICIES)
def test_every_update_waits_for_the_norm(name: str) -> None:
    run = train("sim", *POLICIES[name], CLIPS)
    updates = launches(run, Work.UPDATE)
    assert updates and not early(run)
    assert all(norms([op]) for op in updates)
    assert len(norms(launches(run, Work.BACKWARD))) == 1
    ops = [op for *_, plan in run.recorder.plans for op in plan.ops]
    begun = [op.place if isinstance(op, Grow) else op.dst for op in ops if isinstance(op, Begins)]
    ended = [op.place for op in ops if isinstance(op, Free)]
    assert len(only_norms(begun)) == len(only_norms(ended)) > 0, "a norm ends with its step"


@pytest.mark.parametrize("name", POLICIES)
def test_without_clipping_updates_wait_for_their_own_gradients_alone(name: str) -> None:
    run = train("sim", *POLICIES[name])
    assert not norms([*launches(run, Work.UPDATE), *launches(run, Work.BACKWARD)])
    lanes = {op.on for op in launches(run, Work.UPDATE)}
    if name == "margin":
        assert lanes == {HOST_LANE, COMPUTE_LANE}
        assert early(run), "the host updates beside the backward"


@pytest.mark.broad(3)
@pytest.mark.parametrize("clock", ["service", "wall"])
@pytest.mark.parametrize("name", ["margin", "host", "zero3_offload"])
def test_clipped_training_is_plain_training(name: str, clock: str) -> None:
    """Clipping takes effect: without it the weights would differ."""
    words = (*POLICIES[name], CLIPS)
    run = train("cpu", *words, f"backend.clock={clock}")
    assert not differing(run.result, plain(*words))
    assert differing(run.result, plain(*POLICIES[name]))


def test_groups_clip_too() -> None:
    words = ("policy=zero3_offload", "scheduling.tasks=0", "group.devices=2", CLIPS)
    run = train("sim", *words, "device.peer_bytes_per_s=1e10")
    assert norms(launches(run, Work.UPDATE)) and not early(run)
