"""ZeRO-3 with all states offloaded: weights are prefetched unit by unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.layout import TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier
from engine.contract.view import View
from policies.training.cycle import CycleLaunch
from policies.training.residency import Residency
from policies.training.streaming import GRADIENTS_OUT, Streaming


@dataclass(frozen=True)
class Zero3Offload:
    """Weights are fetched for each unit and dropped behind it, gradients are offloaded, and the
    host updates (ZeRO-Infinity, SC'21).

    Plans use coming bytes.

    Args:
        prefetch: units whose weights are fetched ahead of time.
        persistent_bytes: a chunk whose weights take fewer bytes stays on the device once it came.
        overlaps_updates: the next forward may begin before the last chunk is updated.
        gradients_out: units whose gradients may still be copied out when another backward begins.

    Raises:
        ValueError: a number is below 0.
        OutOfMemory: from `fit`, a launch can never fit.
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
        self._how().fit(batch, view, plan)

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """See Resident."""
        return self._how().resident(view, plan)

    def _how(self) -> Streaming:
        return Streaming(
            self.prefetch,
            self._stays,
            overlaps_updates=self.overlaps_updates,
            gradients_out=self.gradients_out,
        )

    def _stays(self, layout: TrainingLayout, chunk: int, link: CycleLaunch) -> bool:
        return layout.chunks[chunk].weight_bytes < self.persistent_bytes
