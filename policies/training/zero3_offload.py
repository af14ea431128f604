"""ZeRO-3 with everything offloaded: units fetch their weights, some ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.layout import TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier
from engine.contract.view import View
from policies.training.cycle import CycleLaunch
from policies.training.streaming import GRADIENTS_OUT, Streaming


@dataclass(frozen=True)
class Zero3Offload:
    """Weights are fetched per unit and dropped behind it, gradients go out, the host updates
    (ZeRO-Infinity, SC'21).

    prefetch          units to fetch for ahead
    persistent_bytes  chunks whose weights take less than that stay once they have come
    overlaps_updates  the next forward may begin before the last chunk is updated
    gradients_out     units whose gradients may be on their way out when another backward begins

    Rests on coming bytes.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, states_in=(Tier.HOST,))
    prefetch: int = 1
    persistent_bytes: int = 0
    overlaps_updates: bool = False
    gradients_out: int = GRADIENTS_OUT

    def __post_init__(self) -> None:
        for name in ("prefetch", "persistent_bytes", "gradients_out"):
            if getattr(self, name) < 0:
                raise ValueError(f"zero3_offload: {name} is {getattr(self, name)}, not at least 0")

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        how = Streaming(
            self.prefetch,
            self._stays,
            overlaps_updates=self.overlaps_updates,
            gradients_out=self.gradients_out,
        )
        how.fit(batch, view, plan)

    def _stays(self, layout: TrainingLayout, chunk: int, link: CycleLaunch) -> bool:
        return layout.chunks[chunk].weight_bytes < self.persistent_bytes
