"""The engine carries training units, several devices and streamed weights from the start.

The policies here are the smallest that exercise it; those of the papers follow in their own issues.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.contract.executor import Launch
from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.regions import Kind, PageSize, Place, Region, Tier, Work
from engine.contract.rules import ContractError
from engine.contract.view import View
from tests.support.replays import Replay, replay
from traces.serving.request import TrainingJob

UNIT = PageSize(tokens=1, nbytes=10)  # capacities below are counted in units of 10 bytes
F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE


def weight(job: Job, layer: int, tier: Tier = Tier.GPU, device: int = 0) -> Place:
    return Place(Region(job.job_id, Kind.WEIGHT, layer), tier, device)


def activation(job: Job, layer: int, microbatch: int = 0, device: int = 0) -> Place:
    return Place(Region(job.job_id, Kind.ACTIVATION, layer, microbatch), Tier.GPU, device)


@dataclass(frozen=True)
class Streaming:
    """One unit a plan; a layer's weights come from the host and the least recently used leaves."""

    slots: int

    def plan(self, view: View) -> Plan:
        job = next(iter((*view.training, *view.waiting)))
        work, layer, microbatch = job.training.ahead(1)[0]
        here, home = weight(job, layer), weight(job, layer, Tier.HOST)
        ops: list = []
        loaded = [p for p in view.held_bytes if p.region.kind is Kind.WEIGHT and p.tier is Tier.GPU]
        if here not in view.held_bytes:
            if len(loaded) == self.slots:
                ops.append(Free(min(loaded, key=lambda p: view.used[p])))
            ops.append(Copy(home, here))
        tokens = job.training.spec.microbatch_tokens
        reads, writes = (here,), [activation(job, layer)]
        if work is F:
            ops.append(Grow(activation(job, layer), 10))
        if work is U:
            writes, reads = [here], ()
        piece = Slice(job, tokens, work, range(layer, layer + 1), microbatch=microbatch)
        ops.append(Compute((piece,), reads, tuple(writes)))
        if work is B:
            ops.append(Free(activation(job, layer)))
        if work is U:
            ops.append(Copy(here, home))
        return Plan(tuple(ops))


def stream(depth: int, slots: int, noise: float = 0.0, seed: int = 0) -> Replay:
    spec = TrainingJob(0, 0, num_units=6, sequence_tokens=8, num_steps=3)
    job = Job(0, 0)
    places = {weight(job, layer, Tier.HOST): 50 for layer in range(6)}
    return replay(
        Streaming(slots),
        [spec],
        pages=5 * slots + 6,
        host_pages=30,
        depth=depth,
        noise=noise,
        seed=seed,
        page=UNIT,
        layout=Layout(places),
        duration=lambda launch: 1000 if launch.pieces else 100 * launch.nbytes,
    ).check()


@pytest.mark.broad(4)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("slots", [2, 3, 6])
def test_streamed_training_obeys_the_laws_and_repeats_its_plans(depth: int, slots: int) -> None:
    runs = [stream(depth, slots, noise=0.4 if seed else 0.0, seed=seed) for seed in range(4)]
    assert all(run.log() == runs[0].log() for run in runs[1:])
    moments = runs[0].engine.state.profile.moments(0)
    assert len(moments) == 18, "6 layers forward, backward and updated"


def test_double_buffering_is_run_ahead_and_nothing_else() -> None:
    """Two slots: loads of 5 us hide behind nothing at depth 1, behind computes at depth 2.

    At depth 1 every load precedes its 1 us compute; at depth 2 the lane of copies never stands
    still, so the sweep takes as long as its loads, and the computes are hidden (law 11b holds).
    """
    one, two = stream(1, 2), stream(2, 2)
    assert one.log() == two.log()
    assert two.engine.state.env.now < one.engine.state.env.now


def test_lru_loads_of_a_sweep_are_those_of_the_paper() -> None:
    """LRU over F, B, U sweeps of 6 layers with C slots: B turns on what F left behind.

    F ends with its last C layers loaded and B begins there, so C of B's loads are saved; U starts
    from layer 0, where B has just ended, so C of its loads are saved too, and the next F starts
    far from where U ended (none saved while C < 6).
    """
    for slots in (2, 3):
        loads = [s.op for s in stream(1, slots).recorder.spans if isinstance(s.op, Copy)]
        loads = [op for op in loads if op.dst.tier is Tier.GPU]
        assert len(loads) == 3 * ((6 + (6 - slots)) + (6 - slots))


@dataclass(frozen=True)
class TwoStages:
    """Layer 0 on device 0, layer 1 on device 1; microbatches forward, then backward (GPipe)."""

    microbatches: int

    def plan(self, view: View) -> Plan:
        job = next(iter((*view.training, *view.waiting)))
        layer = view.device
        order = [(F, k) for k in range(self.microbatches)]
        order += [(B, k) for k in range(self.microbatches)]
        if view.issued >= len(order):
            return Plan()
        work, k = order[view.issued]
        forward, backward = job.training.frontier(k)
        here, there = activation(job, layer, k, layer), activation(job, layer, k, 1 - layer)
        if (work is F and layer == 1 and not forward[0]) or (
            work is B and layer == 0 and not backward[1]
        ):
            return Plan()  # only what has all its producers issued
        piece = Slice(job, 8, work, range(layer, layer + 1), microbatch=k)
        sent = activation(job, 1 - layer, k, layer)  # what the other stage has put here
        reads = (sent,) if sent in view.held_bytes else ()
        ops: list = [Grow(here, 10)] if work is F else []
        ops.append(Compute((piece,), reads, (here,), device=layer))
        if (work is F) == (layer == 0):
            ops.append(Copy(here, there))
        return Plan(tuple(ops))


@pytest.mark.parametrize("depth", [1, 2])
def test_two_devices_pass_activations_and_keep_their_own_order(depth: int) -> None:
    def run(seed: int) -> Replay:
        spec = TrainingJob(0, 0, 2, 8, microbatches=4, has_update=False)
        noise = 0.4 if seed else 0.0
        return replay(
            TwoStages(4),
            [spec],
            pages=20,
            depth=depth,
            devices=2,
            noise=noise,
            seed=seed,
            page=UNIT,
        ).check()

    runs = [run(seed) for seed in range(5)]
    for device in (0, 1):
        logs = [[body for d, body in r.log() if d == device] for r in runs]
        assert all(log == logs[0] for log in logs)


def test_two_equal_stages_take_the_time_of_the_pipeline() -> None:
    """m microbatches over d=2 equal stages: (m + d - 1) slots forward and as many backward."""
    spec = TrainingJob(0, 0, 2, 8, microbatches=4, has_update=False)

    def duration(launch: Launch) -> int:
        return 1000 if launch.pieces else 1

    run = replay(TwoStages(4), [spec], pages=20, devices=2, page=UNIT, duration=duration)
    assert abs(run.engine.state.env.now - 2 * (4 + 2 - 1) * 1000) <= 10 * 2, "plus 1 ns a transfer"


def test_work_out_of_order_is_refused_by_the_engine() -> None:
    @dataclass(frozen=True)
    class Backwards:
        def plan(self, view: View) -> Plan:
            job = next(iter((*view.training, *view.waiting)))
            return Plan((Compute((Slice(job, 8, B, range(1, 2)),)),))

    with pytest.raises(ContractError, match="backward before the forward"):
        replay(Backwards(), [TrainingJob(0, 0, 2, 8)], page=UNIT)
