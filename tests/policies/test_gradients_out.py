"""Gradients on their way to the host: streaming policies let only so many pile up."""

from __future__ import annotations

import random

import pytest

from engine.contract.executor import Launch
from engine.contract.plan import Compute, Copy
from engine.contract.regions import Kind, Tier, Work
from engine.results.plan_log import decode, encode
from policies.training.fsdp2_offload import Fsdp2Offload
from policies.training.streaming import GRADIENTS_OUT
from policies.training.zero3_offload import Zero3Offload
from policies.training.zero_offload import ZeroOffload
from tandem.config.compose import composed
from tests.support import offload
from tests.support.offload import duration_ns, job_of, laid_out, launches, run, shape_of
from tests.support.replays import Replay


@pytest.mark.broad(3)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("tasks", [1, 0])
def test_gradients_on_their_way_out_do_not_pile_up(
    tasks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there is room for all of them at once, and the way out is slow."""
    monkeypatch.setattr(offload, "duration_ns", slow_out_ns)
    shape = shape_of(random.Random(14), layers=7)
    layout, job = laid_out(shape), job_of(shape, microbatches=microbatches)
    bounded = [Zero3Offload(gradients_out=count) for count in (0, 1, 2)]
    for memory in (*bounded, Fsdp2Offload(), ZeroOffload()):
        most = most_out(run(memory, layout, job, tasks=tasks))
        assert most == getattr(memory, "gradients_out", GRADIENTS_OUT)
    assert most_out(run(Zero3Offload(gradients_out=99), layout, job, tasks=tasks)) > 3


def slow_out_ns(launch: Launch) -> int:
    """As always, and four times that for copies to the host."""
    is_out = isinstance(launch.op, Copy) and launch.op.dst.tier is Tier.HOST
    return duration_ns(launch) * (4 if is_out else 1)


def most_out(found: Replay) -> int:
    """Copies of gradients that a backward has found on their way, at the most."""
    copies, most = list[Copy](), 0
    for op in [op for plan in found.plans for op in plan.ops]:
        if isinstance(op, Copy) and op.src.region.kind is Kind.GRADIENT:
            copies += [op] if op.src.tier is Tier.GPU else []
        elif isinstance(op, Compute) and op.slices[0].work is Work.BACKWARD:
            begins_ns = found.spans[op].start_ns
            most = max(most, sum(found.spans[copy].end_ns > begins_ns for copy in copies))
    return most


def test_plan_logs_keep_what_a_launch_waits_for() -> None:
    shape = shape_of(random.Random(15), layers=4)
    found = run(Zero3Offload(gradients_out=0), laid_out(shape), job_of(shape))
    waiting = {op.after for op in launches(found)} - {()}
    jobs = {0: next(op for op in launches(found)).slices[0].job}
    again = [decode(encode(plan), jobs) for plan in found.plans]
    assert waiting
    assert {op.after for plan in again for op in plan.ops if isinstance(op, Compute)} >= waiting


def test_fewer_than_none_is_refused() -> None:
    with pytest.raises(ValueError, match="gradients_out is -1, not at least 0"):
        Zero3Offload(gradients_out=-1)


@pytest.mark.parametrize(
    ("policy", "setting"),
    [("protrain", "memory"), ("time_shared_protrain", "memory.training")],
)
def test_the_planner_counts_what_its_memory_policy_leaves_out(policy: str, setting: str) -> None:
    words = ["training=random", f"policy={policy}", f"{setting}.gradients_out=5"]
    assert composed(words).config["planner"]["gradients_out"] == 5
