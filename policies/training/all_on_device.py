"""Training with everything on the device: the reference, and what does not fit."""

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
    """Nothing leaves the device but what units save for the host; updates run there.

    States that lie on the host at the start come at their first use. Rests on coming bytes.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, states_in=(Tier.GPU,))

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        device = Residency(view, plan, LastIn(), kinds=(), is_exclusive=True)
        for piece in batch:
            for launch in launches_of(piece, view.device):
                device.seat(launch)
                device.run(launch)
