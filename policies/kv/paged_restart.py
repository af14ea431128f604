"""Paged KV; a preempted job recomputes its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View
from policies.kv.paged_allocation import PagedAllocation, PagedRules


@dataclass(frozen=True)
class PagedRestart(PagedRules):
    """Preemption by recomputation (vLLM, SOSP'23, section 4.5).

    A preempted job frees its pages and later recomputes its tokens. Plans use coming bytes.

    Args, Raises: those of PagedRules.
    """

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        def preempt(job: Job) -> None:
            plan.free(kv_place(job.job_id, Tier.GPU, view.device))
            plan.restart(job)

        PagedAllocation(batch, view, plan, self.paged_demand(view), preempt, self).write()

    @property
    def traits(self) -> Traits:
        """Those of PagedRules, which `fit` keeps: promises hold of the class that declares them."""
        return super().traits
