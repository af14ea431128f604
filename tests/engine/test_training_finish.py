"""A step of training ends with the last of its updates, wherever that runs, and so does a job."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest

from engine.contract.job import Job
from engine.contract.plan import HOST_LANE, Compute, Op, Slice
from engine.contract.regions import Work
from engine.contract.training_progress import TrainingProgress
from engine.loop.completions import Completions
from engine.loop.state import JobLists
from tests.training.trainings import differing, plain, train
from traces.serving.request import TrainingJob

TWO_LANES = ("policy=patrickstar", "planner.chunk_elements=20000", "planner.oversize=alone")
TWO_LANES += ("scheduling.tasks=0", "training.num_steps=4")


@pytest.mark.parametrize("device_bytes", [2_800_000, 3_200_000])
def test_a_step_is_told_to_end_with_its_last_update(device_bytes: int) -> None:
    run = train("sim", *TWO_LANES, f"budget.device_bytes={device_bytes}")
    ends: dict[int, dict[str, int]] = {}  # of updates, by step and lane
    for span in run.recorder.spans:
        if isinstance(span.op, Compute) and span.op.slices[0].work is Work.UPDATE:
            lanes = ends.setdefault(span.op.slices[0].microbatch, {})
            lanes[span.op.on] = max(lanes.get(span.op.on, 0), span.end_ns)
    assert any(len(lanes) == 2 for lanes in ends.values()), "updates on both sides"
    rows = run.recorder.tables()["training"].to_pylist()
    assert [row["end_ns"] for row in rows] == [max(ends[row["step"]].values()) for row in rows]


@pytest.mark.parametrize("clock", ["service", "wall"])
def test_a_job_keeps_its_memory_until_all_updates_have_ended(clock: str) -> None:
    words = (*TWO_LANES, "budget.device_bytes=2800000")
    run = train("cpu", *words, f"backend.clock={clock}")
    assert not differing(run.result, plain(*words))


class Flying:
    """One training job whose step is issued whole: updates on both sides are in flight."""

    def __init__(self, num_steps: int) -> None:
        spec = TrainingJob(0, 0, 2, 8, num_steps=num_steps)
        self.job, self.jobs = Job.trains(TrainingProgress(spec), 0), JobLists()
        self.jobs.wait(self.job)
        self.jobs.start(self.job)
        self.before, self.device, self.host, self.behind = (
            Compute((Slice(self.job, 1, Work.UPDATE, range(u, u + 1)),), on=on)
            for u, on in enumerate(("compute", "compute", HOST_LANE, "compute"))
        )
        open_ops: Mapping[Op, None] = dict.fromkeys(
            (self.before, self.host, self.device, self.behind)
        )
        self.ends = Completions(self.jobs, open_ops, lambda jobs: None, lambda: None)
        self.ends.step_with(self.device, self.job, 0)


@pytest.mark.parametrize("is_host_first", [False, True])
def test_whichever_launch_is_the_last_a_step_ends_when_all_have(is_host_first: bool) -> None:
    """It ends at the latest moment, also where an earlier one is heard of later."""
    flying = Flying(num_steps=1)
    assert not flying.jobs and list(flying.ends) == [flying.job] and flying.ends
    assert not flying.ends.settle(flying.before, 3, 0, 0), "a lane is first-in-first-out"
    first, last = flying.device, flying.host
    if is_host_first:
        first, last = last, first
    assert not flying.ends.settle(first, 7, 0, 2)
    assert flying.ends and list(flying.ends) == [flying.job]
    (end,) = flying.ends.settle(last, 5, 0, 1)
    assert (end.job, end.step, end.is_last, end.end_ns) == (flying.job, 0, True, 7)
    assert end.plans == {0: 2}, "its plan of each device"
    assert not flying.ends and not list(flying.ends)
    assert not flying.ends.settle(flying.behind, 9, 0, 3), "what is issued behind it is not its own"


def test_a_job_stays_behind_a_step_that_is_not_its_last() -> None:
    flying = Flying(num_steps=2)
    assert flying.jobs.training == [flying.job] and not flying.ends
    for order in permutations((flying.host, flying.device)):
        found = [end for op in order for end in flying.ends.settle(op, 1, 0, 0)]
        assert all(not end.is_last for end in found)
