"""Two compute lanes in simulation: launches slow each other down by an assumed share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.contract.executor import Launch, Span
from engine.contract.plan import HOST_LANE, SECOND_LANE, Compute, Copy, Op
from engine.contract.regions import Tier, kv_place
from engine.loop.state import VirtualClock
from sim.cost.contract import LaunchCost
from sim.two_lanes import TwoLaneExecutor


class Flat(LaunchCost):
    """A constant time of launches on each compute lane; copies take a ns per byte."""

    form, provenance = "table", "a test"

    def __init__(self, serves_ns: int = 100, trains_ns: int = 300) -> None:
        self.serves_ns, self.trains_ns = serves_ns, trains_ns

    def compute_ns(self, launch: Launch) -> int:
        return self.trains_ns if launch.op.lane[1] == SECOND_LANE else self.serves_ns

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return launch.nbytes * (2 if contended else 1)

    def host_traffic(self, launch: Launch) -> int:
        return 0

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 0

    def peak_bytes(self, launch: Launch) -> int | None:
        return None


def spans(launches: Sequence[Launch], share: float = 0.5) -> dict[Op, tuple[int, int]]:
    env, done = VirtualClock(), list[Span]()
    executor = TwoLaneExecutor(env, Flat(), share)
    executor.prepare(launches)
    for launch in launches:
        executor.run(launch, done.append)
    env.run()
    ends = [span.end_ns for span in done]
    assert ends == sorted(ends) and len(done) == len(launches)
    return {span.op: (span.start_ns, span.end_ns) for span in done}


def first() -> Compute:
    return Compute(())


def second() -> Compute:
    return Compute((), on=SECOND_LANE)


@pytest.mark.parametrize(
    ("share", "ends"),
    [(0.5, (200, 400)), (1.0, (100, 300)), (0.75, (133, 334)), (0.25, (400, 600))],
)
def test_two_launches_go_on_at_a_share_of_their_rate(share: float, ends: tuple[int, int]) -> None:
    """The shorter one ends at 100 / share; the longer one has what is left of 300 then."""
    one, other = first(), second()
    found = spans([Launch(one), Launch(other)], share)
    assert found[one][0] == found[other][0] == 0
    assert (found[one][1], found[other][1]) == pytest.approx(ends, abs=1)


def test_at_one_half_both_together_take_as_long_as_in_turn() -> None:
    """Work is conserved, however many launches of one lane pass beside one of the other."""
    ops = [first() for _ in range(5)]
    other = second()
    found = spans([Launch(other), *map(Launch, ops)])
    assert found[other] == (0, 600)
    assert [found[op] for op in ops] == [(0, 200), (200, 400), (400, 600), (600, 700), (700, 800)]


def test_a_lane_alone_has_the_whole_rate() -> None:
    ops = [first(), first()]
    assert [*spans([Launch(op) for op in ops]).values()] == [(0, 100), (100, 200)]
    lone = second()
    assert spans([Launch(lone)]) == {lone: (0, 300)}


def test_a_launch_starts_when_its_waits_have_ended() -> None:
    one, other = first(), second()
    found = spans([Launch(one), Launch(other, waits=(one,))])
    assert found == {one: (0, 100), other: (100, 400)}


def test_copies_and_the_host_slow_no_launch() -> None:
    one, other, host = first(), second(), Compute((), on=HOST_LANE)
    out = Copy(kv_place(1), kv_place(1, Tier.HOST))
    back = Copy(kv_place(2, Tier.HOST), kv_place(2))
    launches = [Launch(out, nbytes=50), Launch(back, nbytes=50), Launch(host), Launch(one)]
    found = spans([*launches, Launch(other, waits=(out,))])
    assert found[out] == (0, 50) and found[back] == (0, 100), "the later one is contended"
    assert found[host] == (0, 100)
    assert found[one] == (0, 150) and found[other] == (50, 400)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_that_cannot_be_is_told(share: float) -> None:
    with pytest.raises(ValueError, match="lane_share="):
        TwoLaneExecutor(VirtualClock(), Flat(), share)


def test_no_steps_are_issued_at_once() -> None:
    executor = TwoLaneExecutor(VirtualClock(), Flat())
    assert executor.repeat(Launch(first()), 5) is None
