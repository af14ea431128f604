"""Prices of slices that train, remembered: a step repeats a few works of its units for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.model import ModelSpec
from engine.plan import Compute, Slice
from sim.trained import Trained, is_light, trained_of
from sim.training_operators import training_operators

Key = tuple[Any, ...]


class Prices:
    """What slices that train take, and what they move: one look-up after the first.

    The key is all that a price depends on. The job is in it by its own progress: of another run
    with the same id it is another.
    """

    def __init__(self, model: ModelSpec, price: Callable[[Trained], int]) -> None:
        self._model, self._price = model, price
        self._ns: dict[Key, int] = {}
        self._moved: dict[Key, int] = {}

    def ns(self, op: Compute, piece: Slice) -> int:
        """Duration of a slice."""
        key = _key(op, piece)
        ns = self._ns.get(key)
        if ns is None:
            found = trained_of(op, piece, self._model)
            ns = self._ns[key] = sum(self._price(trained) for trained in found)
        return ns

    def moved_bytes(self, op: Compute, piece: Slice) -> int:
        """What it reads and writes."""
        key = _key(op, piece)
        nbytes = self._moved.get(key)
        if nbytes is None:
            found = trained_of(op, piece, self._model)
            kernels = [k for trained in found for k in training_operators(self._model, trained)]
            nbytes = self._moved[key] = sum(k.repeats * k.nbytes for k in kernels)
        return nbytes


def _key(op: Compute, piece: Slice) -> Key:
    job, tokens, work, layers = piece[:4]
    return job.training, tokens, work, layers, op.on, op.again, is_light(op, piece)
