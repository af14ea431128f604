"""A cost model whose durations vary: what must not depend on time is tested with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.executor import Launch
from sim.cost import LaunchCost


@dataclass
class Noisy:
    """Multiplies every duration by a seeded uniform draw from (1 - amplitude, 1 + amplitude)."""

    cost: LaunchCost
    amplitude: float
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.amplitude < 1:
            raise ValueError(f"noise amplitude {self.amplitude} is not in [0, 1)")
        self._random = random.Random(self.seed)

    @property
    def form(self) -> str:
        return self.cost.form

    @property
    def provenance(self) -> str:
        return f"{self.cost.provenance}, +-{self.amplitude:.0%} noise of seed {self.seed}"

    def compute_ns(self, launch: Launch) -> int:
        return self._vary(self.cost.compute_ns(launch))

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return self._vary(self.cost.copy_ns(launch, contended))

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return self._vary(self.cost.host_ns(launches))

    def peak_bytes(self, launch: Launch) -> int | None:
        return self.cost.peak_bytes(launch)

    def _vary(self, duration_ns: int) -> int:
        return round(duration_ns * self._random.uniform(1 - self.amplitude, 1 + self.amplitude))
