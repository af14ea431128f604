"""Paged KV; a job that loses its pages computes its tokens again."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Plan, Slice
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View
from engine.memory.plan_builder import PlanBuilder
from policies.kv.paged_allocation import Seating, SeatingRules


@dataclass(frozen=True)
class PagedRestart(SeatingRules):
    """Preemption by recomputation (vLLM, SOSP'23, section 4.5). May rest on coming bytes."""

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        def preempt(draft: PlanBuilder, job: Job) -> None:
            draft.free(kv_place(job.job_id, Tier.GPU, view.device))
            draft.restart(job)

        return Seating(batch, view, self.paged_demand(view), preempt, self).plan()
