"""Paged KV; a job that loses its pages has them copied to the host and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View
from policies.kv.paged_allocation import PagedAllocation, PagedRules


@dataclass(frozen=True)
class PagedSwap(PagedRules):
    """Preemption by swapping (vLLM, SOSP'23, section 4.5); restarts where the host is full.

    Each device has host memory of its own. Rests on coming bytes: the launch that takes a victim's
    pages waits for their copy.
    """

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        def preempt(job: Job) -> None:
            here = kv_place(job.job_id, Tier.GPU, view.device)
            away = kv_place(job.job_id, Tier.HOST, view.device)
            if plan.held(here) <= plan.room(away.pool):
                plan.move(here, away)
            else:
                plan.free(here)
                plan.restart(job)

        PagedAllocation(batch, view, plan, self.paged_demand(view), preempt, self).write()

    @property
    def traits(self) -> Traits:
        """As paged; a job that came back holds copies that are not kept pages."""
        return replace(super().traits, swaps=True)
