"""FSDP2 with CPU offloading: all states on the host, weights prefetched one unit ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.layout import TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier, Work
from engine.contract.view import View
from policies.training.cycle import CycleLaunch
from policies.training.residency import Residency
from policies.training.streaming import Streaming


@dataclass(frozen=True)
class Fsdp2Offload:
    """PyTorch's `fully_shard` with CPUOffloadPolicy.

    Weights of a unit are prefetched while the unit before it runs, gradients are offloaded, and the
    host updates behind the whole backward. Plans use coming bytes.

    Args:
        keeps_root: weights of the embedding and the head stay from forward to backward, since
            FSDP2 does not reshard the root module behind its forward.

    Raises:
        OutOfMemory: from `fit`, a launch can never fit.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, states_in=(Tier.HOST,))
    keeps_root: bool = True

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        Streaming(1, self._stays).fit(batch, view, plan)

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """See Resident."""
        return Streaming(1, self._stays).resident(view, plan)

    def _stays(self, layout: TrainingLayout, chunk: int, link: CycleLaunch) -> bool:
        if not self.keeps_root or link.work is not Work.FORWARD or link.again:
            return False
        return chunk in layout.units[0].chunks or chunk in layout.units[-1].chunks
