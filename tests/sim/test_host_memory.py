"""The host's memory as one resource: a launch that starts beside others is slowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.contract.executor import Launch, Span
from engine.contract.plan import HOST_LANE, Copy
from engine.contract.regions import Tier, Work, weight
from engine.loop.state import VirtualClock
from sim.cost.roofline import Roofline
from sim.executor import HostMemory, SimExecutor
from tests.training.training_jobs import TINY, device, job_of, launch, layout_of, train, trains

GB = 10**9
OUT, UPDATE = (0, "gpu->host"), (0, HOST_LANE)


def test_launches_within_the_rate_are_not_slowed() -> None:
    memory = HostMemory(10 * GB)
    assert memory.duration_ns(OUT, 0, 100, 400) == 100  # 4 bytes a ns
    assert memory.duration_ns(UPDATE, 0, 100, 600) == 100  # and 6: all there is


def test_a_launch_beside_others_is_slowed_by_the_total_demand() -> None:
    memory = HostMemory(10 * GB)
    assert memory.duration_ns(UPDATE, 0, 1000, 8000) == 1000
    # The demand is 8 + 4 bytes a ns of 10; the update, in flight, keeps its duration.
    assert memory.duration_ns(OUT, 500, 100, 400) == 120
    assert memory.duration_ns(OUT, 1000, 100, 400) == 100, "the update has ended"
    assert memory.duration_ns((1, "gpu->host"), 1050, 100, 400) == 100, "8 of 10"
    assert memory.duration_ns(UPDATE, 1060, 1000, 8000) == 1600, "8 + 4 + 4 of 10"


@pytest.mark.parametrize("wants", [(10, 10), (9, 4, 4), (3, 8), (20, 1), (2, 3)])
def test_busy_lanes_move_the_rate_of_the_memory_together(wants: tuple[int, ...]) -> None:
    """As in fair sharing: each lane gets an equal share of its demand (bytes a ns)."""
    memory, now = HostMemory(10 * GB), dict.fromkeys(range(len(wants)), 0)
    moved, alone_ns = dict.fromkeys(now, 0), (1009, 307, 73)
    while min(now.values()) < 10**6:
        i = min(now, key=now.__getitem__)
        nbytes = wants[i] * alone_ns[i]
        now[i] += memory.duration_ns((i, "gpu->host"), now[i], alone_ns[i], nbytes)
        moved[i] += nbytes
    share = min(1.0, 10 / sum(wants))
    # A launch that starts alone, at first or at another's end, is not slowed: at most 1 of 250.
    for i, want in enumerate(wants):
        assert moved[i] / now[i] == pytest.approx(share * want, rel=4e-3)


def test_a_launch_placed_for_later_does_not_count_before_its_start() -> None:
    memory = HostMemory(10 * GB)
    assert memory.duration_ns(UPDATE, 700, 100, 900) == 100
    assert memory.duration_ns(OUT, 500, 100, 900) == 100
    assert memory.duration_ns((0, "host->gpu"), 720, 100, 900) == 180


def test_ended_launches_are_forgotten_and_an_unknown_rate_slows_none() -> None:
    memory = HostMemory(10 * GB)
    for start in range(0, 1000, 100):
        memory.duration_ns(UPDATE, start, 100, 900)
    memory.forget(950)
    assert memory.duration_ns(OUT, 960, 100, 900) == 180, "the last one still runs"
    unknown = HostMemory(None)
    assert [unknown.duration_ns(lane, 0, 100, 10**6) for lane in (OUT, UPDATE)] == [100, 100]


def durations_ns(cost: Roofline, launches: Sequence[Launch]) -> list[int]:
    env, done = VirtualClock(), list[Span]()
    executor = SimExecutor(env, cost)
    executor.prepare(launches)
    for one in launches:
        executor.run(one, done.append)
    env.run()
    by_op = {span.op: span.end_ns - span.start_ns for span in done}
    return [by_op[one.op] for one in launches]


def test_copies_and_updates_of_a_simulation_share_the_memory_of_the_host() -> None:
    """A link of 20 GB/s and an update that reaches 80 % of 40 GB/s demand 52: the later launch
    takes 1.3 times as long. Launches on the device are not slowed."""
    slow = replace(device("a100"), host_bandwidth_bytes_per_s=40e9, update_share=0.8, link_ns=0)
    slow = replace(slow, to_host_bytes_per_s=20e9)
    cost, job = Roofline(slow, TINY), trains(job_of(TINY))
    update = launch(job, Work.UPDATE, 1, on=HOST_LANE)
    copy = Launch(Copy(weight(0, 0), weight(0, 0, Tier.HOST)), nbytes=10**6)
    back = launch(job, Work.BACKWARD, 1)
    alone = cost.compute_ns(update)
    assert durations_ns(cost, [back, copy, update]) == [
        cost.compute_ns(back),
        50_000,
        round(1.3 * alone),
    ]
    assert durations_ns(cost, [update, copy]) == [alone, 65_000]
    assert cost.host_traffic(update) == 28 * TINY.layer_parameters
    assert cost.host_traffic(back) == 0
    peer = Copy(weight(0, 0), weight(0, 0, device=1))
    assert cost.host_traffic(Launch(peer, nbytes=1000)) == 0


def test_a_job_whose_host_is_slow_takes_longer_and_no_more_than_the_sum() -> None:
    """Its time lies between that with ample memory and that time times the largest slowdown."""
    fast = replace(device("a100"), host_bandwidth_bytes_per_s=1e15, update_share=4e-5)  # 40 GB/s
    tight = replace(fast, host_bandwidth_bytes_per_s=44e9, update_share=40 / 44)
    spec = job_of(TINY, num_steps=3)
    layout = layout_of(TINY, spec)
    plenty, little = (
        train(Roofline(d, TINY), spec, layout, depth=3).engine.state.env.now for d in (fast, tight)
    )
    demand = 40e9 + tight.to_host_bytes_per_s + tight.to_device_bytes_per_s
    assert plenty < little <= plenty * demand / 44e9
