"""The most that one training step takes where all model states stay on the device.

A formula of its own over the shapes that the ledger books by: it schedules nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from models.training.shape import TrainingShape, UnitShape


class StepPeak(NamedTuple):
    """Bytes on the device at the fullest moment of a step, by what they are."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # hidden states and what is saved
    buffer_bytes: int  # gradients that flow between units, and workspace

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self)


def step_peak(
    shape: TrainingShape, microbatches: int = 1, recomputed: Collection[int] = ()
) -> StepPeak:
    """Of microbatches one after the other; `recomputed` units keep only their input.

    Gradients take no bytes before the first backward that adds to them; then they lie beside what
    that backward has made afresh. The head always keeps.
    """
    again = frozenset(recomputed) - {len(shape.units) - 1}
    return max(_moments(shape, microbatches, again), key=sum)


def _moments(
    shape: TrainingShape, microbatches: int, recomputed: frozenset[int]
) -> Iterator[StepPeak]:
    parameters, units = shape.parameters, shape.units
    weights = sum(p.elements for p in parameters) * shape.item_bytes
    trained = [[p for p in unit.parameters if parameters[p].trains] for unit in units]
    states = sum(p.elements for p in parameters if p.trains) * shape.optimizer_item_bytes
    first = next(u for u, own in enumerate(trained) if own)
    begun = set[int]()
    for _ in range(microbatches):
        held = 0
        for u, unit in enumerate(units):
            output, keeps = _output_bytes(units, u), u >= first and u not in recomputed
            saved, work = (unit.saved_bytes, unit.forward_bytes) if keeps else (0, unit.light_bytes)
            held += output + saved
            yield StepPeak(weights, _bytes(shape, begun), states, held, work)
            if u < first:
                held -= unit.input_bytes
        for u in reversed(range(first, len(units))):
            unit, output = units[u], _output_bytes(units, u)
            begun.update(trained[u])
            gradients = _bytes(shape, begun)
            flows = output + (unit.input_bytes if u > first else 0)
            if u in recomputed:
                held += unit.saved_bytes
                yield StepPeak(
                    weights, gradients, states, held, flows + unit.forward_bytes + output
                )
            yield StepPeak(weights, gradients, states, held, flows + unit.backward_bytes)
            held -= unit.saved_bytes + unit.input_bytes
        assert held == 0, "all activations are gone behind the last backward"


def _output_bytes(units: tuple[UnitShape, ...], unit: int) -> int:
    """Hidden states that a unit hands on; the head's loss is none."""
    return units[unit + 1].input_bytes if unit + 1 < len(units) else 0


def _bytes(shape: TrainingShape, gradients: set[int]) -> int:
    return sum(shape.parameters[p].elements for p in gradients) * shape.item_bytes
