"""Where a job moves on: records, versions of weights, recomputation, and the device asked first."""

from __future__ import annotations

import pytest

from engine.contract.job import Job
from engine.contract.plan import Compute, Plan, Slice
from engine.contract.progress import advance_serving, advance_training, check_order
from engine.contract.regions import Work
from engine.contract.rules import ContractError
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from policies.routing.round_robin import RoundRobin
from tests.support.replays import composed, replay
from tests.support.states import job
from traces.serving.request import Request, TrainingJob

F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE


def test_a_record_has_no_gap() -> None:
    one = job(0, 12)
    assert not advance_serving(Slice(one, 2))
    assert not advance_serving(Slice(one, 4, record=True))
    assert not advance_serving(Slice(one, 2))
    assert (one.recorded_tokens, one.computed_tokens, one.may_record) == (6, 8, False)
    with pytest.raises(AssertionError, match="no gap"):
        advance_serving(Slice(one, 4, record=True))


def trains(spec: TrainingJob) -> Job:
    return Job.trains(TrainingProgress(spec), 0)


def training_of(job: Job) -> TrainingProgress:
    assert job.training is not None
    return job.training


def test_a_slice_runs_on_a_version_of_the_weights_that_exists() -> None:
    """Version n of a layer is there once its n-th update has been issued."""
    one = trains(TrainingJob(0, 0, num_units=1, sequence_tokens=4, num_steps=2))
    ahead = Slice(one, 4, F, microbatch=1, version=1)
    with pytest.raises(ContractError, match="weight version 1 of unit 0 does not exist"):
        check_order(ahead, training_of(one))
    for work in (F, B, U):
        advance_training(Slice(one, 4, work))
    assert one.training is not None and one.training.step == 1
    advance_training(ahead)
    assert one.training.frontier(1)[0] == [4]


def test_a_frontier_counts_the_tokens_of_all_sequences() -> None:
    one = trains(TrainingJob(0, 0, num_units=2, sequence_tokens=4, sequences=3))
    assert one.training is not None
    for tokens in (4, 8):
        assert one.training.ahead(1) == [(F, 0, 0)]
        advance_training(Slice(one, tokens, F, range(1)))
    assert one.training.frontier(0)[0] == [12, 0]
    assert one.training.ahead(1) == [(F, 1, 0)]
    with pytest.raises(ContractError, match="forward of unit 0 out of order"):
        check_order(Slice(one, 1, F, range(1)), training_of(one))


class Recomputes:
    """Runs each layer's forward again before its backward."""

    def plan(self, view: View) -> Plan:
        one = next(iter((*view.training, *view.waiting)))
        work, layer, _ = one.training.ahead(1)[0]
        piece = Slice(one, 8, work, range(layer, layer + 1))
        again = [Compute((piece._replace(work=F),), again=True)] if work is B else []
        return Plan((*again, Compute((piece,))))


def test_what_is_computed_again_moves_no_frontier() -> None:
    """It takes its time on the lane, and is a moment of its step like any other launch."""
    run = replay(Recomputes(), [TrainingJob(0, 0, 2, 8, has_update=False)]).check()
    spans = sorted(run.recorder.spans, key=lambda span: span.start_ns)
    launched = [(span.op.slices[0].work, span.op.again) for span in spans]
    assert launched == [(F, False), (F, False), (F, True), (B, False), (F, True), (B, False)]
    assert len(run.engine.state.profile.moments(0)) == 6


def test_idle_devices_are_asked_first() -> None:
    """Two devices, two plans ahead: each gets its first before one of them gets its second."""
    requests = [Request(i, 0, 40, 20) for i in range(8)]
    run = replay(composed("chunked", "restart"), requests, devices=2, router=RoundRobin(), depth=2)
    assert [device for device, _ in run.log()][:4] == [0, 1, 0, 1]
