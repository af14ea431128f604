"""A policy under observation: what it must not do, and what the engine must show it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from operator import attrgetter

from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Compute, Plan
from engine.contract.policy import Policy, traits_of
from engine.contract.rules import BrokenLaw
from engine.contract.view import View
from engine.loop.profile import EngineProfile
from engine.results.plan_log import encode

ANSWERS = ("cost", "kept_pages", "reads")  # functions: there is nothing in them to write to
SHOWN = [field.name for field in dataclasses.fields(View) if field.name not in ANSWERS]
TOKENS = ("known_tokens", "computed_tokens")
SLOTS = getattr(Job, "__slots__", None) or Job.__mypyc_attrs__  # type: ignore[attr-defined]
FIELDS = attrgetter(*TOKENS, *(name for name in SLOTS if not name.startswith("_")))
MUTABLE = (dict, list)


class Watched:
    """Checks laws 6 and 8 at each question, and counts for law 9."""

    def __init__(self, policy: Policy) -> None:
        self.traits = traits_of(policy)
        self._policy, self._now_ns = policy, 0
        self._wants_nothing = False  # the last answer, while no launch was in flight
        self.idle_without_a_plan = self.questions = 0

    def plan(self, view: View) -> Plan:
        if view.now_ns < self._now_ns:
            raise BrokenLaw("law 6: the clock ran back")
        self.idle_without_a_plan += self._wants_nothing and view.now_ns > self._now_ns
        self._now_ns = view.now_ns
        self.questions += 1
        before = snapshot(view)
        plan = self._policy.plan(view)
        if snapshot(view) != before:
            raise BrokenLaw("law 8: the policy changed what it was shown")
        if encode(plan) != encode(self._policy.plan(view)):
            raise BrokenLaw("law 8: equal views, other plans")
        self._wants_nothing = not (plan or any(isinstance(op, Compute) for op in view.in_flight))
        return plan


def snapshot(view: View) -> object:
    """All that a view shows, by value: a new field is in it from the start."""
    return {name: _shown(getattr(view, name)) for name in SHOWN}


def _shown(value: object) -> object:
    """What it holds now, whatever is written into it later."""
    match value:
        case Job():
            return [_kept(field) for field in FIELDS(value)]
        case Layout():
            return [_shown(getattr(value, field.name)) for field in dataclasses.fields(value)]
        case EngineProfile():
            return copy.deepcopy(vars(value))
        case Mapping():
            return dict(value)
        case list():
            return [_shown(item) for item in value]
    return value


def _kept(value: object) -> object:
    """What a field holds now, whatever is written into it later."""
    if isinstance(value, MUTABLE):
        return copy.deepcopy(value) if value else type(value)()
    return value
