"""Training with everything on the device: the reference without offloading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.footprint import launches_of
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier
from engine.contract.view import View
from policies.training.eviction import LastIn
from policies.training.out_of_memory import patient
from policies.training.residency import Residency


@dataclass(frozen=True)
class AllOnDevice:
    """All model states stay on the device, and updates run there: training without offloading.

    Only activations that their units save for the host leave the device. States that lie on the
    host at the start come at their first use. Plans use coming bytes.

    Raises:
        OutOfMemory: from `fit`, a launch can never fit.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, states_in=(Tier.GPU,))

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        device = Residency(view, plan, LastIn(), kinds=(), is_exclusive=True)
        for piece in batch:
            for launch in launches_of(piece, view.device):
                device.make_resident(launch)
                device.run(launch)
