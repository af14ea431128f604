"""Chunks come when they are used and leave when room is needed, by LRU, FIFO or Belady's OPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.view import View
from policies.training.cycle import training_jobs, uses_of
from policies.training.eviction import FarthestUse, FirstIn, Future, LeastRecent, Order
from policies.training.out_of_memory import patient
from policies.training.residency import Residency


@dataclass(frozen=True)
class DemandPaging:
    """Nothing is fetched ahead.

    order             who leaves first: `lru`, `fifo`, or `opt` (Belady: whose next use, known from
                      the chain, is farthest)
    tiers             `exclusive`: a chunk lies in one tier, and leaving is a copy; `inclusive`: the
                      host keeps its copy, and what is as new there is dropped
    updates           on the `host`, or the `device`
    reuses_gradients  gradients take the place of their weights until the update (PatrickStar)

    Where the host has no room for what an update needs, it runs on the device. Rests on coming
    bytes.
    """

    traits: ClassVar[Traits] = Traits(recurs=True)
    order: Literal["lru", "fifo", "opt"] = "lru"
    tiers: Literal["exclusive", "inclusive"] = "exclusive"
    updates: Literal["host", "device"] = "host"
    reuses_gradients: bool = False

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        device = Residency(view, plan, self._order(view), is_exclusive=self.tiers == "exclusive")
        on = HOST_LANE if self.updates == "host" else COMPUTE_LANE
        for piece in batch:
            for launch in device.launches(piece, on, self.reuses_gradients):
                device.seat(launch)
                device.run(launch)
                device.drop_old(launch)

    def _order(self, view: View) -> Order:
        if self.order == "lru":
            return LeastRecent(view)
        if self.order == "fifo":
            return FirstIn()
        here, futures = self.updates == "device", dict[int, Future]()
        for job in training_jobs(view):
            assert job.training is not None
            uses, length = uses_of(job.training, view.device, here)
            futures[job.job_id] = Future(uses, length, view.profile.moment(job.job_id))
        return FarthestUse(futures)
