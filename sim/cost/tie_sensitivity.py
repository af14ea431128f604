"""Sensitivity of a prediction to ties: a cost model with slower copies to the host."""

from __future__ import annotations

from typing import Any

from engine.contract.executor import Launch
from engine.contract.plan import Copy
from engine.contract.regions import Tier


class SlowerCopies:
    """Another cost model with slower copies to the host; all other prices pass through.

    Where a step is bound by the link, units of equal size are fetched and sent in equal time. A
    tie then decides whether the place of the last unit is free when the next one arrives. A
    prediction that moves with slightly slower copies hangs on such a tie.
    """

    def __init__(self, cost: Any, share: float) -> None:
        """A slower copy of a cost model.

        Args:
            cost: a sim.cost.contract.LaunchCost.
            share: extra time of a copy to the host; 0.03 is 3 %.
        """
        self._cost, self._share = cost, share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cost, name)

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """Duration of a copy, longer where it goes to the host.

        Args:
            launch: a Copy with its `nbytes`.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds on the copy's lane.

        Raises:
            ValueError: the cost has no copies in that direction.
        """
        alone_ns: int = self._cost.copy_ns(launch, contended)
        is_out = isinstance(launch.op, Copy) and launch.op.dst.tier is Tier.HOST
        return alone_ns + int(self._share * alone_ns) if is_out else alone_ns
