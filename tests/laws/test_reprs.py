"""Objects that hold much say little of it: an assertion that fails over them must not hang."""

from __future__ import annotations

import random

from engine.contract.plan import Plan
from engine.contract.view import View
from policies.composed import Composed
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from tests.support.offload import job_of, laid_out, shape_of, trained


def test_plans_and_views_are_told_in_a_line() -> None:
    shown: list[str] = []

    class Told:
        def plan(self, view: View) -> Plan:
            plan = Composed(TrainingOrder(tasks=0), PatrickStar()).plan(view)
            shown.extend(map(repr, (plan, view, view.layout, *view.training)))
            return plan

    shape = shape_of(random.Random(3), layers=20)
    trained(Told(), [job_of(shape)], laid_out(shape))
    assert shown and max(map(len, shown)) < 120
    assert any("Job(0: 1 training steps done)" in line for line in shown)
