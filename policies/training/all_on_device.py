"""Training with everything on the device: the reference, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract.footprint import launches_of
from engine.contract.plan import Plan, Slice
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

    recurs: ClassVar[bool] = True
    states_in: ClassVar[tuple[Tier, ...]] = (Tier.GPU,)

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        device = Residency(view, LastIn(), kinds=(), is_exclusive=True)
        for piece in batch:
            for launch in launches_of(piece, view.device):
                device.seat(launch)
                device.run(launch)
        return device.plan()
