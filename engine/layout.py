"""What a planner decides once, before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from engine.plan import Place, Work
from engine.training_layout import TrainingLayout


@dataclass(frozen=True, slots=True)
class Layout:
    """What a planner hands over, frozen."""

    places: Mapping[Place, int] = field(default_factory=dict)  # bytes held before the first step
    training: Mapping[int, TrainingLayout] = field(default_factory=dict)  # by job
    orders: tuple[tuple[tuple[Work, int], ...], ...] = ()  # per device: (work, microbatch)
    cuts: tuple[range, ...] = ()  # shards or stages
    persistent: frozenset[int] = frozenset()
    buffers: int = 0

    def shown(self) -> Layout:
        """The same, read-only: what policies see of it."""
        places, training = MappingProxyType(self.places), MappingProxyType(self.training)
        return replace(self, places=places, training=training)

    def __repr__(self) -> str:
        return f"Layout({len(self.places)} places, training {dict(self.training)})"
