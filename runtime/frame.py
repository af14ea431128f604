"""A step of decodes as a graph is fed with it: columns of a bucket's length, padded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from torch import Tensor

from engine.executor import Piece

RING = 1 << 16  # sampled tokens that may be in flight at once


class Column(IntEnum):
    """What is said of a row, one number each."""

    TOKEN = 0  # if it is known
    POSITION = 1
    SLOT = 2  # for its keys and values
    SOURCE = 3  # where in the ring its token lies
    TICKET = 4  # where in the ring the token goes that it yields
    LENGTH = 5  # keys, its own included
    UNIFORM = 6  # its draw: the bits of a float64


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one replay reads. Rows behind `pieces` are padding: they read and write nothing."""

    pieces: tuple[Piece, ...]  # one token each, and each yields one
    bucket: int
    columns: Tensor  # [len(Column), bucket], int64
    tables: Tensor  # [pieces, width] page ids, int32

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """Those that yield a token."""
        return self.pieces


def buckets_of(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `most`, which is always one. None for 0."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most) if most else ()


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket for so many rows; None where there is none."""
    at = bisect_left(buckets, rows)
    return buckets[at] if rows and at < len(buckets) else None


def ring_size(most: int) -> int:
    """Tokens in flight, then a place per row for those that are known, then one for nobody's."""
    return RING + most + 1


def columns_of(
    bucket: int,
    most: int,
    index: np.ndarray,
    late: Sequence[tuple[int, int]],
    tickets: Sequence[int],
    uniform: np.ndarray | None,
) -> np.ndarray:
    """All columns of a bucket, padding included.

    `index` is [3, rows]: tokens (0 where it is `late`: row, place in the ring), positions, slots.
    `most` is the largest bucket there is.
    """
    rows = index.shape[1]
    columns = padding(bucket, most)
    columns[[Column.TOKEN, Column.POSITION, Column.SLOT], :rows] = index
    for row, place in late:
        columns[Column.SOURCE, row] = place
    columns[Column.TICKET, :rows] = tickets
    columns[Column.LENGTH, :rows] = index[1] + 1
    if uniform is not None:
        columns[Column.UNIFORM, :rows] = uniform.view(np.int64)
    return columns


def padding(bucket: int, most: int) -> np.ndarray:
    """Columns of rows that are nobody's: no keys, no slot, a token that goes nowhere."""
    columns = np.zeros((len(Column), bucket), dtype=np.int64)
    columns[Column.SLOT] = -1
    columns[Column.SOURCE] = RING + np.arange(bucket)
    columns[Column.TICKET] = RING + most
    return columns
