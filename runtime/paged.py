"""What the paged kernels are told about a launch: built without Triton, sent up in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

ALIGNED = 16  # bytes of a part's start, and numbers of a table's row: see table_of


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Slices first, then decodes, in the order of the rows. All tensors are int32."""

    tables: Tensor  # [slices + decodes, width] page ids; a row is read as far as its tokens go
    spans: Tensor  # [slices, 3]: first row, end row, tokens in the pages before
    tiles: Tensor  # [tiles, 2]: slice, first row
    lengths: Tensor  # [decodes]: keys of each, its own token included
    first_decode: int  # row


def paged_of(
    tables: Sequence[Sequence[int]],
    slices: Sequence[tuple[int, int]],
    contexts: Sequence[int],
    tile_rows: int,
    send: Callable[[np.ndarray], Tensor],
) -> Paged:
    """One upload. `slices` are (tokens, past), `contexts` the decodes' pasts; `tables` of both.

    Triton compiles a kernel for pointers of 16 aligned bytes and another one for all others, so
    that every part begins at such an address: the kernels are compiled once, before any launch.
    `tile_rows`: rows of a prefill tile. `send` takes an array to the device.
    """
    ends = np.cumsum([tokens for tokens, _ in slices], dtype=np.int32)
    pairs = zip(ends, slices, strict=True)
    spans = np.array([(end - n, end, past) for end, (n, past) in pairs], np.int32).reshape(-1, 3)
    lengths = np.array(contexts, dtype=np.int32) + np.int32(1)
    parts = [table_of(tables), spans, tiles_of(spans, tile_rows), lengths]
    sizes = [padded(part.size, ALIGNED // part.itemsize) for part in parts]
    whole = np.zeros(sum(sizes), np.int32)
    for part, start in zip(parts, accumulate(sizes, initial=0), strict=False):
        whole[start : start + part.size] = part.ravel()
    sent = zip(send(whole).split(sizes), parts, strict=True)
    views = [flat[: part.size].view(part.shape) for flat, part in sent]
    return Paged(views[0], views[1], views[2], views[3], int(ends[-1]) if slices else 0)


def table_of(tables: Sequence[Sequence[int]], rows: int | None = None) -> np.ndarray:
    """Page tables of unequal length as rows of one; what lies behind a table's end is not read.

    Rows are padded to ALIGNED numbers: Triton tells multiples of 16 from other strides, too.
    """
    width = padded(max((len(table) for table in tables), default=0), ALIGNED)
    whole = np.zeros((len(tables) if rows is None else rows, width), dtype=np.int32)
    for row, table in zip(whole, tables, strict=False):
        row[: len(table)] = table
    return whole


def padded(count: int, to: int) -> int:
    """The next multiple."""
    return -(-count // to) * to


def tiles_of(spans: np.ndarray, rows: int) -> np.ndarray:
    """Slices cut into tiles of so many rows, those with most keys first: they take longest."""
    found = [
        (past + min(first + rows, end) - start, piece, first)
        for piece, (start, end, past) in enumerate(spans.tolist())
        for first in range(start, end, rows)
    ]
    found.sort(key=lambda tile: (-tile[0], *tile[1:]))
    return np.array([tile[1:] for tile in found], dtype=np.int32).reshape(-1, 2)
