"""Paged KV; the pages of a preempted job are swapped out to the host."""

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
    """Preemption by swapping (vLLM, SOSP'23, section 4.5).

    The pages of a preempted job are copied to the host, and copied back when they find room. A job
    whose pages find no room on the host restarts and recomputes its tokens. Each device has host
    memory of its own. Plans use coming bytes: the launch that takes a victim's pages waits for the
    copy of these.

    Args, Raises: those of PagedRules.
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
        """Those of PagedRules, and `swaps`: a job swapped in holds copies, not kept pages."""
        return replace(super().traits, swaps=True)
