"""A memory policy from outside the project: admissions leave room for jobs in service.

tandem run --config-dir examples/keeps_room/conf memory=keeps_room budget.kv_pages=512
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.view import View


@dataclass(frozen=True)
class KeepsRoom:
    """An admission leaves a share of the pool free; a job without a page restarts the last one."""

    share: float = 0.2
    traits = Traits(kv_growth="page")

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        pool = (Tier.GPU, view.device)
        kept_free = int(self.share * view.capacity_bytes[pool]) if view.serving else 0
        by_priority = dict.fromkeys([*(piece.job for piece in batch), *view.serving])
        place_of = {job: kv_place(job.job_id, *pool) for job in by_priority}
        running = [job for job in by_priority if plan.holds(place_of[job])]
        restarted, slices = set(), []
        for piece in batch:
            job, place = piece.job, place_of[piece.job]
            if job in restarted:
                continue
            need = view.page.bytes_for(job.computed_tokens + piece.tokens) - plan.held(place)
            while job in running and need > plan.room(pool) and running[-1] is not job:
                last = running.pop()
                plan.free(place_of[last])
                plan.restart(last)
                restarted.add(last)
            is_admission = not plan.holds(place)
            if need + is_admission * kept_free > plan.room(pool) or (is_admission and restarted):
                break
            plan.grow(place, need)
            slices.append(piece)
        if slices:
            plan.compute(slices, [place_of[piece.job] for piece in slices])
