"""The host's memory as one resource: who starts while others use it gets his part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.contract.executor import Launch, Span, VirtualClock
from engine.contract.plan import HOST_LANE, Copy
from engine.contract.regions import Tier, Work, weight
from sim.cost.roofline import Roofline
from sim.devices.host_memory import HostMemory
from sim.executor import SimExecutor
from tests.training.training_jobs import TINY, device, job_of, launch, layout_of, train, trains

GB = 10**9
OUT, UPDATE = (0, "gpu->host"), (0, HOST_LANE)


def test_alone_and_together_within_the_rate_nobody_waits() -> None:
    memory = HostMemory(10 * GB)
    assert memory.duration_ns(OUT, 0, 100, 400) == 100  # 4 bytes a ns
    assert memory.duration_ns(UPDATE, 0, 100, 600) == 100  # and 6: all there is


def test_who_starts_beside_others_is_slowed_by_what_all_want() -> None:
    memory = HostMemory(10 * GB)
    assert memory.duration_ns(UPDATE, 0, 1000, 8000) == 1000
    # 8 + 4 bytes a ns are wanted of 10; the update, under way, keeps its time.
    assert memory.duration_ns(OUT, 500, 100, 400) == 120
    assert memory.duration_ns(OUT, 1000, 100, 400) == 100, "the update has ended"
    assert memory.duration_ns((1, "gpu->host"), 1050, 100, 400) == 100, "8 of 10"
    assert memory.duration_ns(UPDATE, 1060, 1000, 8000) == 1600, "8 + 4 + 4 of 10"


@pytest.mark.parametrize("wants", [(10, 10), (9, 4, 4), (3, 8), (20, 1), (2, 3)])
def test_lanes_that_are_busy_for_long_move_together_what_there_is(wants: tuple[int, ...]) -> None:
    """As if all shared fairly at any time: each the same part of what it wants (bytes a ns)."""
    memory, now = HostMemory(10 * GB), dict.fromkeys(range(len(wants)), 0)
    moved, alone_ns = dict.fromkeys(now, 0), (1009, 307, 73)
    while min(now.values()) < 10**6:
        i = min(now, key=now.__getitem__)
        nbytes = wants[i] * alone_ns[i]
        now[i] += memory.duration_ns((i, "gpu->host"), now[i], alone_ns[i], nbytes)
        moved[i] += nbytes
    share = min(1.0, 10 / sum(wants))
    # Who starts alone, at first or just when another ends, is not slowed: 1 of 250 here at most.
    for i, want in enumerate(wants):
        assert moved[i] / now[i] == pytest.approx(share * want, rel=4e-3)


def test_what_is_placed_for_later_does_not_count_before_it_starts() -> None:
    memory = HostMemory(10 * GB)
    assert memory.duration_ns(UPDATE, 700, 100, 900) == 100
    assert memory.duration_ns(OUT, 500, 100, 900) == 100
    assert memory.duration_ns((0, "host->gpu"), 720, 100, 900) == 180


def test_what_has_ended_is_forgotten_and_an_unknown_rate_slows_nobody() -> None:
    memory = HostMemory(10 * GB)
    for start in range(0, 1000, 100):
        memory.duration_ns(UPDATE, start, 100, 900)
    memory.forget(950)
    assert memory.duration_ns(OUT, 960, 100, 900) == 180, "the last one still runs"
    unknown = HostMemory(None)
    assert [unknown.duration_ns(lane, 0, 100, 10**6) for lane in (OUT, UPDATE)] == [100, 100]


def ends(cost: Roofline, launches: Sequence[Launch]) -> list[int]:
    env, done = VirtualClock(), list[Span]()
    executor = SimExecutor(env, cost)
    executor.prepare(launches)
    for one in launches:
        executor.run(one, done.append)
    env.run()
    by_op = {span.op: span.end_ns - span.start_ns for span in done}
    return [by_op[one.op] for one in launches]


def test_copies_and_updates_of_a_simulation_share_the_memory_of_the_host() -> None:
    """A link of 20 GB/s and an update that reaches 80 % of 40 GB/s want 52: the later one of them
    takes 1.3 times as long. Launches on the device take what they take."""
    slow = replace(device("a100"), host_bandwidth_bytes_per_s=40e9, update_share=0.8, link_ns=0)
    slow = replace(slow, to_host_bytes_per_s=20e9)
    cost, job = Roofline(slow, TINY), trains(job_of(TINY))
    update = launch(job, Work.UPDATE, 1, on=HOST_LANE)
    copy = Launch(Copy(weight(0, 0), weight(0, 0, Tier.HOST)), nbytes=10**6)
    back = launch(job, Work.BACKWARD, 1)
    alone = cost.compute_ns(update)
    assert ends(cost, [back, copy, update]) == [cost.compute_ns(back), 50_000, round(1.3 * alone)]
    assert ends(cost, [update, copy]) == [alone, 65_000]
    assert cost.host_traffic(update) == 28 * TINY.layer_parameters
    assert cost.host_traffic(back) == 0
    peer = Copy(weight(0, 0), weight(0, 0, device=1))
    assert cost.host_traffic(Launch(peer, nbytes=1000)) == 0


def test_a_job_whose_host_is_slow_takes_longer_and_no_more_than_the_sum() -> None:
    """Between what it takes with memory to spare and that times the largest slowing there is."""
    fast = replace(device("a100"), host_bandwidth_bytes_per_s=1e15, update_share=4e-5)  # 40 GB/s
    tight = replace(fast, host_bandwidth_bytes_per_s=44e9, update_share=40 / 44)
    spec = job_of(TINY, num_steps=3)
    layout = layout_of(TINY, spec)
    plenty, little = (
        train(Roofline(d, TINY), spec, layout, depth=3).engine.state.env.now for d in (fast, tight)
    )
    wanted = 40e9 + tight.to_host_bytes_per_s + tight.to_device_bytes_per_s
    assert plenty < little <= plenty * wanted / 44e9
