"""What a View says of the decodes in service spares a policy work and changes no answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from engine.contract.plan import Plan
from engine.contract.view import View
from engine.results.plan_log import encode
from policies.composed import Composed
from tests.laws.test_fast_forward import MEMORY, SCHEDULING
from tests.support.jumps import Shaped, simulated
from tests.support.replays import random_requests

STEPS = (*range(8), 13, 21, 34)  # of a repeated plan that are compared: pages grow every fourth


@dataclass
class Twice:
    """Asks a policy with and without them."""

    policy: Composed
    shown: int = 0  # views that had some
    asked: int = 0

    def plan(self, view: View) -> Plan:
        plan, alone = self.policy.plan(view), self.policy.plan(replace(view, decodes=None))
        assert plan.repeats == alone.repeats
        for step in (n for n in STEPS if plan and n < plan.repeats):
            assert encode(plan.at(step)) == encode(alone.at(step))
        self.asked += 1
        if view.decodes is not None and view.decodes.slices:
            self.shown += 1
            self._check(view)
        return plan

    @staticmethod
    def _check(view: View) -> None:
        """Against the jobs themselves and what they hold."""
        assert view.decodes is not None
        slices, places, growth = view.decodes
        jobs = [job for job in view.serving if not job.is_prefilling]
        assert [(s.job, s.tokens) for s in slices] == [(job, 1) for job in jobs]
        assert [place.region.owner for place in places] == [job.job_id for job in jobs]
        tokens, nbytes = view.page
        for job, place in zip(jobs, places, strict=True):
            spare = view.held_bytes[place] // nbytes * tokens - job.computed_tokens
            assert place in [op.place for op in growth.by_step[spare]]


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
    if (scheduling, pages) == ("chunked", 400) and memory != "reservation":
        assert policy.shown > 0.3 * policy.asked, "it is about something"
