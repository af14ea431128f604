"""What a packed forward reads: the rows of many jobs as index tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.executor import Piece
from runtime.attention import Rows


class Draw(NamedTuple):
    """The rows of a launch that yield a token, and where the tokens go."""

    pieces: tuple[Piece, ...]
    rows: Tensor  # [R]
    tickets: Tensor  # [R] slots of the ring
    uniform: Tensor | None  # [R] numbers in [0, 1), None if greedy


class Packed(NamedTuple):
    """One packed forward: prefill slices first, then one row per decode."""

    pieces: tuple[Piece, ...]  # in the order of the rows
    ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    rows: Rows
    late: tuple[Tensor, Tensor] | None  # rows whose token is in flight, and their tickets
    draw: Draw | None

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """Those that yield a token."""
        return () if self.draw is None else self.draw.pieces
