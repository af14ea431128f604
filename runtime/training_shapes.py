"""Microbatches to be measured: the calibration grid of training and its held-out sample."""

from __future__ import annotations

import random
from typing import NamedTuple

SHORTEST = 16  # tokens of a sequence
PARTS = (1, 4, 16)  # sequences that equal rows are cut into: tells attention from the rest


class Microbatch(NamedTuple):
    """So many sequences of so many tokens each."""

    sequences: int
    tokens: int

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.tokens


class TrainingLimits(NamedTuple):
    """What fits: positions of the model, rows of a microbatch."""

    positions: int
    rows: int

    def admit(self, shape: Microbatch) -> bool:
        """Whether it can be trained on."""
        return SHORTEST <= shape.tokens <= self.positions and shape.rows <= self.rows


def grid(limits: TrainingLimits) -> list[Microbatch]:
    """What a profile is fitted to: rows by doubling, each as few and as many sequences.

    All units of a chain are measured with each, forward and backward, kept and recomputed; so are
    the updates of its chunks, which depend on none of this. ValueError where nothing fits.
    """
    found: dict[Microbatch, None] = {}
    rows = 2 * SHORTEST
    while rows < 2 * limits.rows:
        most = min(rows, limits.rows)
        for parts in PARTS:
            tokens = min(limits.positions, most // parts)
            if tokens:
                found[Microbatch(most // tokens, tokens)] = None
        rows *= 2
    admitted = [shape for shape in found if limits.admit(shape)]
    if not admitted:
        raise ValueError(
            f"no microbatch of {SHORTEST} tokens or more fits {limits.positions} positions and "
            f"{limits.rows} rows; calibrate with longer sequences"
        )
    return admitted


def holdout(limits: TrainingLimits, seed: int, count: int = 8) -> list[Microbatch]:
    """Microbatches between those of the grid, by which a fit is judged."""
    rng, known = random.Random(seed), set(grid(limits))
    found: dict[Microbatch, None] = {}
    longest = min(limits.positions, limits.rows)
    for _ in range(100 * count):
        tokens = round(SHORTEST * (longest / SHORTEST) ** rng.random())
        shape = Microbatch(rng.randint(1, max(1, limits.rows // tokens)), tokens)
        if len(found) < count and shape not in known and limits.admit(shape):
            found[shape] = None
    return list(found)
