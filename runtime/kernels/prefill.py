"""Paged prefill of slices of any length behind any past; a decode is a slice of one row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.shapes import keys_per_turn, rows_per_tile, warps
from runtime.kernels.tile import attend_keys


def prefill(
    q: Tensor,
    pages: Tensor,
    tables: Tensor,
    spans: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    """Causal attention of q [T, heads, D] into out, of the same shape; sums in float32.

    `spans` [slices, 3] holds first row, end row and past tokens of each slice, `tables`
    [slices, width] its page ids, past and own tokens, which must be in the pages already. `tiles`
    [n, 2] names a slice and the first row of a tile in it, see runtime.paged.tiles_of.
    `pages` as in decode().
    """
    _, heads, size = q.shape
    page_tokens, kv_heads = pages.shape[1], pages.shape[3]
    shared, padded = heads // kv_heads, triton.next_power_of_2(size)
    rows = rows_per_tile(shared, q.dtype)
    _tile[(len(tiles), kv_heads)](
        q, pages, tables, spans, tiles, out, scale,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), pages.stride(0), pages.stride(1),
        pages.stride(2), pages.stride(3), tables.stride(0),
        SHARED=shared, TOKENS=rows, ROWS=max(16, triton.next_power_of_2(rows * shared)),
        PAGE=page_tokens, SIZE=size, PADDED=padded, KEYS=keys_per_turn(q.dtype, padded),
        num_warps=4 * warps(size, shared), num_stages=2,
    )  # fmt: skip


@triton.jit
def _tile(
    q, pages, tables, spans, tiles, out, scale,
    q_row, q_head, out_row, out_head, page_stride, token_stride, value_shift, head_stride,
    table_row,
    SHARED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a slice for all heads that share a KV head, row by row, head by head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    piece, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start, end, past = (
        tl.load(spans + 3 * piece), tl.load(spans + 3 * piece + 1), tl.load(spans + 3 * piece + 2)
    )  # fmt: skip
    end = tl.minimum(end, first + TOKENS)
    m, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    row, head = first + m // SHARED, kv_head * SHARED + m % SHARED
    is_q = (row < end)[:, None] & (d < SIZE)[None, :]
    places = row[:, None].to(tl.int64) * q_row + head[:, None] * q_head + d[None, :]
    _, total, summed = attend_keys(
        tl.load(q + places, mask=is_q, other=0.0), past + row - start,
        pages + kv_head * head_stride, tables + piece.to(tl.int64) * table_row, 0,
        past + end - start, scale, page_stride, token_stride, value_shift, PAGE, SIZE, PADDED,
        ROWS, KEYS,
    )  # fmt: skip
    value = (summed / total[:, None]).to(out.dtype.element_ty)
    places = row[:, None].to(tl.int64) * out_row + head[:, None] * out_head + d[None, :]
    tl.store(out + places, value, mask=is_q)
