"""Paged KV; a job that loses its pages computes its tokens again."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View
from policies.kv.paged_allocation import PagedAllocation, PagedRules


@dataclass(frozen=True)
class PagedRestart(PagedRules):
    """Preemption by recomputation (vLLM, SOSP'23, section 4.5). May rest on coming bytes."""

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        def preempt(job: Job) -> None:
            plan.free(kv_place(job.job_id, Tier.GPU, view.device))
            plan.restart(job)

        PagedAllocation(batch, view, plan, self.paged_demand(view), preempt, self).write()
