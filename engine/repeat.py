"""Plans that hold for many steps: when the same slices are wanted again, and how far one got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.job import Job
from engine.plan import Compute, Grow, Plan
from engine.view import View

FOREVER = 1 << 30


def steps_again(plan: Plan, view: View) -> int:
    """For how many steps a plan's slices are wanted, if nobody arrives, ends or comes in.

    All in service must have one: single tokens, or the last a prompt cut by the budget, as long as
    more than one slice of it is left. Anything else than growth and one launch is not repeated.
    """
    if not plan.ops or plan.restart or plan.refuse or view.training:
        return 1
    *before, launch = plan.ops
    if not isinstance(launch, Compute) or not all(type(op) is Grow for op in before):
        return 1
    last = launch.slices[-1]
    is_cut = last.tokens < last.job.remaining_tokens
    decodes = launch.slices[:-1] if is_cut else launch.slices
    is_new = is_cut and not last.job.computed_tokens
    if len(launch.slices) - is_new != len(view.serving):
        return 1
    for piece in decodes:
        job = piece.job
        if job.known_tokens - job.computed_tokens != 1 or not job.computed_tokens:
            return 1
    return -(-last.job.remaining_tokens // last.tokens) - 1 if is_cut else FOREVER


@dataclass(slots=True)
class Repeat:
    """A repeated plan under way."""

    plan: Plan
    done: int = 0  # steps issued

    def next(self) -> Plan:
        """The next step as a plan of its own."""
        self.done += 1
        return self.plan.at(self.done - 1)

    def without(self, jobs: Sequence[Job]) -> Repeat | None:
        """What is left of a run of decodes when some have ended and nobody waits for their room.

        None where a budget has cut a prompt: it would take more now.
        """
        launch = self.plan.ops[-1]
        assert isinstance(launch, Compute)
        if launch.slices[-1].tokens < launch.slices[-1].job.remaining_tokens:
            return None
        gone = {job.job_id for job in jobs}
        slices = tuple(s for s in launch.slices if s.job.job_id not in gone)
        if not slices:
            return None
        writes = tuple(p for p in launch.writes if p.region.owner not in gone)
        ops = [op for op in self.plan.ops[:-1] if op.place.region.owner not in gone]  # type: ignore[union-attr]
        launch = replace(launch, slices=slices, writes=writes)
        return Repeat(replace(self.plan, ops=(*ops, launch)), self.done)

    @property
    def left(self) -> int:
        return self.plan.repeats - self.done
