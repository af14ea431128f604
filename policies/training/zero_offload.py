"""ZeRO-Offload: weights on the device, gradients and optimizer on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.layout import TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier
from engine.contract.view import View
from policies.training.cycle import CycleLaunch
from policies.training.streaming import Streaming


@dataclass(frozen=True)
class ZeroOffload:
    """Gradients are offloaded during the backward, the host updates, and new weights are copied
    back (Ren et al., ZeRO-Offload, ATC'21).

    Accumulated gradients come back for the next microbatch. Plans use coming bytes.

    Args:
        overlaps_updates: the next forward may begin before the last chunk is updated; in the
            original it waits.

    Raises:
        OutOfMemory: from `fit`, a launch can never fit.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, states_in=(Tier.HOST,))
    overlaps_updates: bool = False

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        Streaming(0, _always, False, self.overlaps_updates).fit(batch, view, plan)


def _always(layout: TrainingLayout, chunk: int, link: CycleLaunch) -> bool:
    return True
