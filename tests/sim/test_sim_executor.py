"""The virtual executor: spans from the cost model, in lane order, copies contended or alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.contract.executor import Executor, Launch, Span
from engine.contract.plan import Collective, Compute, Copy, Pattern
from engine.contract.regions import Tier, kv_place
from engine.loop.state import VirtualClock
from sim.cost.contract import LaunchCost
from sim.executor import SimExecutor
from sim.two_lanes import TwoLaneExecutor


class Flat(LaunchCost):
    """Compute 100 ns, copies a ns per byte (double when contended), 7 ns of host a plan."""

    form, provenance = "table", "a test"

    def compute_ns(self, launch: Launch) -> int:
        return 100

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return launch.nbytes * (2 if contended else 1)

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 7 * len(launches)

    def peak_bytes(self, launch: Launch) -> int | None:
        return 4096


def copies() -> tuple[Copy, Copy]:
    one, two = kv_place(1), kv_place(2)
    host = (kv_place(1, Tier.HOST), kv_place(2, Tier.HOST))
    return Copy(one, host[0]), Copy(host[1], two)


def spans(cost: LaunchCost, launches: Sequence[Launch]) -> list[Span]:
    env, done = VirtualClock(), list[Span]()
    executor: Executor = SimExecutor(env, cost)
    executor.prepare(launches)
    for launch in launches:
        executor.run(launch, done.append)
    executor.release((Tier.GPU, 0), [1, 2])
    env.run()
    return done


def test_workspace_is_predicted_of_launches_only() -> None:
    executor = SimExecutor(VirtualClock(), Flat())
    launches = [Launch(Compute(())), Launch(copies()[0], nbytes=5)]
    assert [executor.peak_bytes(launch) for launch in launches] == [4096, None]


def test_preparing_takes_the_predicted_host_time() -> None:
    assert SimExecutor(VirtualClock(), Flat()).prepare([Launch(Compute(()))] * 3) == 21


def test_launches_of_a_lane_run_in_sequence() -> None:
    first, second = Compute(()), Compute(())
    done = spans(Flat(), [Launch(first), Launch(second)])
    assert [(s.op, s.start_ns, s.end_ns) for s in done] == [(first, 0, 100), (second, 100, 200)]


def test_a_copy_follows_its_waits_and_overlaps_other_launches() -> None:
    out, _ = copies()
    before, after = Compute(()), Compute(())
    launches = [Launch(before), Launch(out, waits=(before,), nbytes=30), Launch(after)]
    at = {s.op: (s.start_ns, s.end_ns) for s in spans(Flat(), launches)}
    assert at == {before: (0, 100), out: (100, 130), after: (100, 200)}


def test_a_copy_is_contended_while_the_other_direction_runs() -> None:
    out, back = copies()
    at = {s.op: s.end_ns for s in spans(Flat(), [Launch(out, nbytes=50), Launch(back, nbytes=50)])}
    assert at == {out: 50, back: 100}
    first, second = copies()
    launches = [Launch(first, nbytes=50), Launch(second, waits=(first,), nbytes=50)]
    assert {s.op: s.end_ns for s in spans(Flat(), launches)} == {first: 50, second: 100}


class OverTheHost(Flat):
    """Collectives of a ns per byte, which leave copies a quarter of their rate."""

    @property
    def copy_share(self) -> float:
        return 0.25

    def collective_ns(self, launch: Launch) -> int:
        return launch.nbytes


@pytest.mark.parametrize("executor", [SimExecutor, TwoLaneExecutor])
def test_a_copy_beside_a_collective_keeps_a_share_of_its_rate(executor: type[SimExecutor]) -> None:
    """Where cards reach each other over the host. Ahead of it and behind it copies have it all."""
    out = copies()[0]
    again, last = Copy(out.src, out.dst), Copy(out.src, out.dst)
    env, done = VirtualClock(), list[Span]()
    world = executor(env, OverTheHost())
    before, gather = Compute(()), Collective(Pattern.ALL_GATHER, (), (), 100)
    launches = [Launch(before), Launch(gather, waits=(before,), nbytes=100)]
    launches += [Launch(out, nbytes=50), Launch(again, waits=(before,), nbytes=50)]
    for launch in (*launches, Launch(last, waits=(gather,), nbytes=50)):
        world.run(launch, done.append)
    env.run()
    assert {s.op: (s.start_ns, s.end_ns) for s in done} == {
        before: (0, 100),
        gather: (100, 200),
        out: (0, 50),
        again: (100, 300),
        last: (300, 350),
    }


def test_a_clock_passes_over_time_without_an_event_and_events_count_from_there() -> None:
    env, ends = VirtualClock(), list[int]()
    env.timeout(10).callbacks.append(lambda _: ends.append(env.now))
    assert not env.passes_to(10) and not env.passes_to(11) and env.now == 0, "an event lies there"
    assert env.passes_to(7) and env.now == 7
    env.timeout(5).callbacks.append(lambda _: ends.append(env.now))  # counts from 7
    env.run()
    assert ends == [10, 12] and env.now == 12
    assert env.passes_to(20) and env.now == 20
    env.timeout(0).callbacks.append(lambda _: ends.append(env.now))
    env.run(until=25)
    assert ends[-1] == 20 and env.now == 25
