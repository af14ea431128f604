"""How the packed rows of a launch lie, for torch's attention and for the paged kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from runtime.serving.kv import Arena


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlice:
    """The rows [start, stop) of one prefill slice, behind `past` tokens in the pages."""

    start: int
    stop: int
    past: int
    table: Tensor  # the page ids that hold past and own tokens


class DecodeGroup(NamedTuple):
    """The rows [start, stop) of decodes with contexts of similar length, attended as one batch."""

    start: int
    stop: int
    table: Tensor  # [rows * pages] page ids; short tables repeat their last page
    mask: Tensor  # [rows, 1, 1, pages * page_tokens], added to the scores


class GatheredDecodes(NamedTuple):
    """Neighbouring decodes whose pages are gathered at once, into the scratch of the launch."""

    table: Tensor  # [pages] page ids, those of the first decode first
    counts: Sequence[int]  # pages of each decode
    tokens: Sequence[int]  # keys of each, its own included


class AttentionRows(NamedTuple):
    """How the packed rows of one launch lie: prefill slices first, then one row per decode."""

    arena: Arena
    slots: Tensor  # [T] where each row's keys and values go, see Arena.row_of
    prefills: tuple[PrefillSlice, ...]
    decodes: tuple[GatheredDecodes, ...]  # empty where decodes are padded
    groups: tuple[DecodeGroup, ...]  # the decodes where they are padded, else empty
    scratch: Scratch
    paged: Paged | None = None  # for the kernels, instead of prefills, decodes and groups

    @property
    def first_decode(self) -> int:
        """The row of the first decode."""
        return self.prefills[-1].stop if self.prefills else 0


class Scratch:
    """What all layers of one launch share: made at the first layer, dropped after the last."""

    def __init__(self) -> None:
        self.masks: dict[PrefillSlice, Tensor] = {}  # of slices with a past
        self.gathered: list[Tensor] = []  # pages of each GatheredDecodes; all share one place
        self.keys: list[tuple[Tensor, Tensor]] = []  # keys and values per decode, in that place

    def clear(self) -> None:
        """Gives the memory back."""
        self.masks.clear()
        self.gathered.clear()
        self.keys.clear()

    def lay_out(self, decodes: Sequence[GatheredDecodes], pages: Tensor) -> None:
        """Makes the place for gathered pages like `pages`, with views of each decode's keys."""
        room = pages.new_empty((max(len(part.table) for part in decodes), *pages.shape[1:]))
        for part in decodes:
            self.gathered.append(room[: len(part.table)])
            each = room[: len(part.table)].split_with_sizes(part.counts)
            self.keys += map(kv_views, each, part.tokens)


def kv_views(gathered: Tensor, tokens: int, shared: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values in gathered pages, [pages, page_tokens, 2, kv_heads, D], without a copy.

    Each [1, kv_heads, tokens, D], or [kv_heads, shared, tokens, D] where `shared` heads read the
    same keys. Strides are given outright: the four equivalent view operators cost more.
    """
    kv_heads, size = gathered.shape[3:]
    half, row = kv_heads * size, 2 * kv_heads * size
    if shared:
        shape, strides = (kv_heads, shared, tokens, size), (size, 0, row, 1)
    else:
        shape, strides = (1, kv_heads, tokens, size), (0, size, row, 1)
    at = gathered.storage_offset()
    return gathered.as_strided(shape, strides), gathered.as_strided(shape, strides, at + half)


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
    """Builds the index tensors of a launch and sends them to the device as one.

    Triton compiles one kernel for pointers aligned to 16 bytes and another for all others. So every
    part begins at an aligned address, and the kernels are compiled once, before any launch.

    Args:
        tables: Page ids of each slice, then of each decode.
        slices: (tokens, past tokens) of each prefill slice.
        contexts: Tokens in the pages before each decode.
        tile_rows: Rows of a prefill tile.
        send: Copies an array to the device.

    Returns:
        The tensors, views of one.
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
    """Page tables of unequal length as rows of one array; nothing behind a table's end is read.

    Rows are padded to ALIGNED numbers: Triton tells multiples of 16 from other strides, too.
    """
    width = padded(max((len(table) for table in tables), default=0), ALIGNED)
    whole = np.zeros((len(tables) if rows is None else rows, width), dtype=np.int32)
    for row, table in zip(whole, tables, strict=False):
        row[: len(table)] = table
    return whole


def padded(count: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-count // to) * to


def tiles_of(spans: np.ndarray, rows: int) -> np.ndarray:
    """Slices cut into tiles of `rows`; tiles with most keys come first, as they take longest."""
    found = [
        (past + min(first + rows, end) - start, piece, first)
        for piece, (start, end, past) in enumerate(spans.tolist())
        for first in range(start, end, rows)
    ]
    found.sort(key=lambda tile: (-tile[0], *tile[1:]))
    return np.array([tile[1:] for tile in found], dtype=np.int32).reshape(-1, 2)
