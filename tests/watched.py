"""A policy under observation: what it must not do, and what the engine must show it."""

from __future__ import annotations

import copy
import dataclasses
from operator import attrgetter

from engine.job import Job
from engine.plan import Plan
from engine.planlog import encode
from engine.policy import Policy
from engine.view import View

FIELDS = attrgetter(*(field.name for field in dataclasses.fields(Job)))
MUTABLE = (dict, list)


class Watched:
    """Checks laws 6 and 8 at each question, and counts for law 9."""

    def __init__(self, policy: Policy) -> None:
        self.prefix_caching = getattr(policy, "prefix_caching", False)
        self._policy, self._now_ns = policy, 0
        self._wants_nothing = False  # the last answer, while nothing was in flight
        self.idle_without_a_plan = 0

    def plan(self, view: View) -> Plan:
        assert view.now_ns >= self._now_ns, "law 6: the clock ran back"
        self.idle_without_a_plan += self._wants_nothing and view.now_ns > self._now_ns
        self._now_ns = view.now_ns
        before = snapshot(view)
        plan = self._policy.plan(view)
        assert snapshot(view) == before, "law 8: the policy changed what it was shown"
        assert encode(plan) == encode(self._policy.plan(view)), "law 8: equal views, other plans"
        self._wants_nothing = not plan and not view.in_flight
        return plan


def snapshot(view: View) -> object:
    """All that a view shows, by value."""
    jobs = [*view.serving, *view.training, *view.waiting]
    state = [[_kept(value) for value in FIELDS(job)] for job in jobs]
    ids = [[j.job_id for j in jobs] for jobs in (view.serving, view.training, view.waiting)]
    maps = (view.free_bytes, view.coming_bytes, view.held_bytes, view.written, view.used)
    return state, ids, [dict(m) for m in maps], view.in_flight


def _kept(value: object) -> object:
    """What a field holds now, whatever is written into it later."""
    return copy.deepcopy(value) if isinstance(value, MUTABLE) else value
