"""`Plan.wake_ns`: the policy is asked again at a moment that it has named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from engine.contract.plan import Plan
from engine.contract.policy import Traits
from engine.contract.view import View
from engine.loop.engine import Stalled
from tests.support.jumps import Shaped, both_replayed, both_simulated, jumped_steps
from tests.support.replays import composed, replay
from traces.serving.request import Request

MS = 1_000_000
CHUNKED = composed("chunked", "restart")


@dataclass(frozen=True)
class Gate:
    """Lets request 0 in at once, all others at a moment that it names at every question before."""

    opens_ns: int
    traits: ClassVar[Traits] = CHUNKED.traits

    def plan(self, view: View) -> Plan:
        if view.now_ns >= self.opens_ns:
            return CHUNKED.plan(view)
        early = [job for job in view.waiting if job.job_id == 0]
        return replace(CHUNKED.plan(replace(view, waiting=early)), wake_ns=self.opens_ns)


def test_an_idle_policy_is_asked_again_at_its_moment() -> None:
    run = replay(Gate(5 * MS), [Request(1, 0, 10, 4), Request(2, 0, 10, 4)]).check()
    assert [outcome.scheduled_ns for outcome in run.recorder.outcomes.values()] == [5 * MS] * 2
    assert run.engine.asked < 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_moment_is_kept_while_decodes_go_on(depth: int) -> None:
    """The decodes of request 0 take 200 steps, some 10 ms; the gate opens in their midst.

    A plan that names a moment holds for one step; behind the moment a plan stands.
    """
    requests = [Request(0, 0, 10, 200), Request(1, 0, 10, 4)]
    fast, _ = both_replayed(Gate(5 * MS), requests, pages=80, depth=depth)  # type: ignore[arg-type]
    setting = {"pages": 80, "host_pages": 0, "depth": depth}
    jumping, _ = both_simulated(Gate(5 * MS), requests, Shaped(700), **setting)  # type: ignore[arg-type]
    for engine in (fast.engine, jumping):
        scheduled_ns = engine.recorder.outcomes[1].scheduled_ns
        assert scheduled_ns is not None and 5 * MS <= scheduled_ns < 5.2 * MS, "two steps"
        early = sum(at_ns < 5 * MS for _, _, at_ns, _, _ in engine.recorder.plans)
        assert early <= engine.asked <= early + 5 < engine.steps - 90
    assert jumped_steps(jumping) > 0, "behind its last moment it jumps"


def test_a_moment_that_has_passed_wakes_no_policy() -> None:
    with pytest.raises(Stalled, match=r"waiting \[1\]"):
        replay(WakesAtPresent(), [Request(1, 0, 10, 4)])


class WakesAtPresent:
    """Names the present."""

    def plan(self, view: View) -> Plan:
        return Plan(wake_ns=view.now_ns)
