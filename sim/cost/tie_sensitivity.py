"""How far a prediction hangs on a tie: the same costs, and copies to the host a little later."""

from __future__ import annotations

from typing import Any

from engine.contract.executor import Launch
from engine.contract.plan import Copy
from engine.contract.regions import Tier


class Late:
    """A cost model in all but one thing: copies to the host take a share longer.

    Where a link is what a step waits for, units of equal size are fetched and sent in equal time,
    and whether the last one is gone when the next one comes is anybody's guess.
    """

    def __init__(self, cost: Any, share: float) -> None:
        """`cost`: a sim.cost.contract.LaunchCost. `share`: 0.03 for 3 % longer."""
        self._cost, self._share = cost, share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cost, name)

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """See LaunchCost."""
        alone_ns: int = self._cost.copy_ns(launch, contended)
        is_out = isinstance(launch.op, Copy) and launch.op.dst.tier is Tier.HOST
        return alone_ns + int(self._share * alone_ns) if is_out else alone_ns
