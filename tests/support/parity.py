"""What runs of every backend share, whose decisions have to be the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.contract.executor import Launch
from engine.contract.regions import PageSize
from runtime.executors.wall import Link
from sim.cost.contract import LaunchCost
from tests.support.hand_made import FAMILIES
from tests.support.serving import PAGE_TOKENS

SPEC = replace(FAMILIES["llama"], name="tiny-flat", num_layers=1)  # decisions know no layers
PAGE = PageSize.of(SPEC, PAGE_TOKENS)
GPU_PAGES = 26
LINKS = {name: Link(200e6, 20_000) for name in ("gpu->host", "host->gpu")}
BACKENDS = ("sim", "lockstep", "cpu", "wall")


@dataclass(frozen=True)
class SyntheticCost(LaunchCost):
    """Durations for the virtual clocks; their size must not matter."""

    speed: int = 1
    form, provenance = "made up", "a test"

    def compute_ns(self, launch: Launch) -> int:
        return (200_000 + 5_000 * sum(piece.tokens for piece in launch.pieces)) // self.speed

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return (20_000 + 5 * launch.nbytes) // self.speed

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 40_000 // self.speed

    def peak_bytes(self, launch: Launch) -> int | None:
        return None
