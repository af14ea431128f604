"""Paged KV; a job that loses its pages has them copied to the host and back."""

from __future__ import annotations

from dataclasses import dataclass

from engine.draft import Draft
from engine.job import Job
from engine.plan import Plan, Slice, Tier, kv_place
from engine.view import View
from policies.seating import Seating


@dataclass(frozen=True)
class PagedSwap:
    """Preemption by swapping (vLLM, SOSP'23, section 4.5); restarts where the host is full.

    Rests on coming bytes: the launch that takes a victim's pages waits for their copy.
    """

    watermark: float = 0.01  # share of the pool that admissions leave free

    def __post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise ValueError(f"paged swap: watermark is {self.watermark}, must be in [0, 1)")

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        def demand(piece: Slice) -> int:
            return view.page.bytes_for(piece.job.computed_tokens + piece.tokens)

        def preempt(draft: Draft, job: Job) -> None:
            here = kv_place(job.job_id, Tier.GPU, view.device)
            away = kv_place(job.job_id, Tier.HOST)
            if draft.held(here) <= draft.room(away.pool):
                draft.move(here, away)
            else:
                draft.free(here)
                draft.restart(job)

        return Seating(batch, view, demand, preempt, self.watermark).plan()
