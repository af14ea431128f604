"""Paged KV; a job that loses its pages computes its tokens again."""

from __future__ import annotations

from dataclasses import dataclass

from engine.draft import Draft
from engine.job import Job
from engine.plan import Plan, Slice, Tier, kv_place
from engine.view import View
from policies.seating import Seating, SeatingRules


@dataclass(frozen=True)
class PagedRestart(SeatingRules):
    """Preemption by recomputation (vLLM, SOSP'23, section 4.5). May rest on coming bytes."""

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        def preempt(draft: Draft, job: Job) -> None:
            draft.free(kv_place(job.job_id, Tier.GPU, view.device))
            draft.restart(job)

        return Seating(batch, view, self.paged_demand(view), preempt, self).plan()
