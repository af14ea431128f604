"""What a View says of the decodes in service spares a policy work and changes no answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from engine.contract.plan import Grow, Plan
from engine.contract.policy import Traits
from engine.contract.view import View
from engine.fast_forward.decode_batch import GrowCycle
from engine.results.plan_log import encode
from policies.composed import Composed
from tests.laws.test_fast_forward import MEMORY, SCHEDULING
from tests.support.jumps import Shaped, simulated
from tests.support.replays import random_requests
from tests.support.stretches import grows_at, slices_at, stretched_plan

STEPS = (*range(8), 13, 21, 34)  # of a stretched plan that are compared: pages grow every fourth


@dataclass
class Twice:
    """Asks a policy with and without them, and stretches both answers."""

    policy: Composed
    shown: int = 0  # views that had some
    asked: int = 0

    @property
    def traits(self) -> Traits:
        return self.policy.traits

    def plan(self, view: View) -> Plan:
        alone = replace(view, running=None)
        plan, other = self.policy.plan(view), self.policy.plan(alone)
        assert encode(plan) == encode(other)
        self.asked += 1
        cycle = None
        if view.running is not None and view.running.slices:
            self.shown += 1
            self._check(view)
            cycle = cycle_of(view)
        if plan.ops and self.traits.kv_growth != "asked":
            self._compare(plan, view, cycle)
        return plan

    def _compare(self, plan: Plan, view: View, cycle: GrowCycle | None) -> None:
        alone = replace(view, running=None)
        one = stretched_plan(self.policy, plan, view, cycle)
        other = stretched_plan(self.policy, plan, alone, None)
        assert one.steps == other.steps
        for step in (n for n in STEPS if n < one.steps):
            assert slices_at(one, step) == slices_at(other, step)
            assert grows_at(one, step) == grows_at(other, step)

    @staticmethod
    def _check(view: View) -> None:
        """Against the jobs themselves and what they hold."""
        assert view.running is not None
        slices, places, full = view.running
        jobs = [job for job in view.serving if not job.is_prefilling]
        assert [(s.job, s.tokens) for s in slices] == [(job, 1) for job in jobs]
        assert [place.region.owner for place in places] == [job.job_id for job in jobs]
        assert full == cycle_of(view).by_step[0]


def cycle_of(view: View) -> GrowCycle:
    """The page that each running decode takes, and when, by what it holds."""
    assert view.running is not None
    tokens, nbytes = view.page
    turns: list[list[Grow]] = [[] for _ in range(tokens)]
    for piece, place in zip(view.running.slices, view.running.places, strict=True):
        spare = view.held_bytes[place] // nbytes * tokens - piece.job.computed_tokens
        turns[spare].append(Grow(place, nbytes))
    return GrowCycle(tuple(map(tuple, turns)), len(view.running.slices))


@pytest.mark.broad(2)
@pytest.mark.parametrize(("pages", "depth"), [(60, 2), (400, 1)])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_a_policy_answers_the_same_without_them(
    scheduling: str, memory: str, pages: int, depth: int
) -> None:
    policy = Twice(Composed(SCHEDULING[scheduling], MEMORY[memory]))
    requests = random_requests(depth, 20, rate=1500)
    simulated(policy, requests, True, Shaped(0), pages, 40, depth)  # type: ignore[arg-type]
    if pages == 400 and memory != "reservation":
        # Plans of prompts alone come between the decodes of continuous batching: it is shown most.
        least = {"chunked": 0.3, "continuous": 0.7}.get(scheduling, 0.0)
        assert policy.shown >= least * policy.asked, "it is about something"
