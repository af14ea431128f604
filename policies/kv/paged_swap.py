"""Paged KV; a job that loses its pages has them copied to the host and back."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Plan, Slice
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View
from engine.memory.plan_builder import PlanBuilder
from policies.kv.paged_allocation import Seating, SeatingRules


@dataclass(frozen=True)
class PagedSwap(SeatingRules):
    """Preemption by swapping (vLLM, SOSP'23, section 4.5); restarts where the host is full.

    Each device has host memory of its own. Rests on coming bytes: the launch that takes a victim's
    pages waits for their copy.
    """

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        def preempt(draft: PlanBuilder, job: Job) -> None:
            here = kv_place(job.job_id, Tier.GPU, view.device)
            away = kv_place(job.job_id, Tier.HOST, view.device)
            if draft.held(here) <= draft.room(away.pool):
                draft.move(here, away)
            else:
                draft.free(here)
                draft.restart(job)

        return Seating(batch, view, self.paged_demand(view), preempt, self).plan()

    def stretch(self, plan: Plan, view: View, count: int) -> Plan:
        """See Memory. A job that came back holds copies that nobody finds, so a kept beginning may
        be taken before its end: whoever then finds less asks for less.
        """
        if self.prefix_caching and view.waiting:
            return plan
        return super().stretch(plan, view, count)
