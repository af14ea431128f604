"""Chunks are fetched at their use and evicted when room is needed: LRU, FIFO or Belady's OPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.view import View
from policies.training.cycle import training_jobs, uses_of
from policies.training.eviction import FarthestUse, FirstIn, Future, LeastRecent, Order
from policies.training.out_of_memory import patient
from policies.training.residency import Residency


@dataclass(frozen=True)
class DemandPaging:
    """Demand paging of chunks: none is prefetched (Belady, IBM Systems Journal 1966, for OPT).

    An update for which the host has no room runs on the device. Plans use coming bytes.

    Args:
        order: which chunk is evicted first: the least recently used (`lru`), the first to come
            (`fifo`), or the one whose next use in the step is farthest (`opt`).
        tiers: `exclusive`: a chunk lies in one tier, and an eviction copies it. `inclusive`: the
            host keeps its copy, and an eviction copies only what is newer on the device.
        updates: on the `host`, or on the `device`.
        reuses_gradients: gradients take the place of their weights until the update (PatrickStar).

    Raises:
        OutOfMemory: from `fit`, a launch can never fit.
    """

    order: Literal["lru", "fifo", "opt"] = "lru"
    tiers: Literal["exclusive", "inclusive"] = "exclusive"
    updates: Literal["host", "device"] = "host"
    reuses_gradients: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(reuses_gradients=self.reuses_gradients, recurs=True)

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        device = self.resident(view, plan)
        on = HOST_LANE if self.updates == "host" else COMPUTE_LANE
        for piece in batch:
            for launch in device.launches(piece, on, self.reuses_gradients):
                device.make_resident(launch)
                device.run(launch)
                device.drop_stale(launch)

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """See Resident."""
        return Residency(view, plan, self._order(view), is_exclusive=self.tiers == "exclusive")

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
