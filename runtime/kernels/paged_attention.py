"""Paged attention of a launch: a row per decode, and prefill slices of any length and past."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.rotate import store
from runtime.kernels.shapes import (
    STAGES,
    WAVES,
    kv_tokens_per_turn,
    num_programs,
    num_splits,
    rows_per_tile,
    warps,
)
from runtime.serving.paged import AttentionRows


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    meta: AttentionRows,
    layer: int,
    scale: float | None = None,
) -> Tensor:
    """Writes keys and values into their pages, then attends.

    Shapes as in runtime.serving.attention.attend.
    """
    keys, values = (t[0].transpose(0, 1) for t in (key, value))  # [T, kv_heads, D]
    store(keys, values, meta.arena.rows(layer), meta.slots)
    return attend_stored(query[0].transpose(0, 1), meta, layer, scale).unsqueeze(0)


def attend_stored(q: Tensor, meta: AttentionRows, layer: int, scale: float | None = None) -> Tensor:
    """Attention of queries, [T, heads, D], over pages that hold the rows' own tokens already.

    Returns [T, heads, D].
    """
    paged, pages = meta.paged, meta.arena.layer(layer)
    assert paged is not None, "packed for another attention"
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    slices, first = len(paged.spans), paged.first_decode
    if slices:
        prefill(q, pages, paged.tables, paged.spans, paged.tiles, out, scale)
    if len(paged.lengths):
        decode(q[first:], pages, paged.tables[slices:], paged.lengths, out[first:], scale)
    return out


LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and exp2 is one instruction
FLOOR = tl.constexpr(-1e30)  # instead of -inf: the difference of two is no NaN


@triton.jit
def attend_stretch(
    q,  # [ROWS, PADDED], zeros behind SIZE
    sees,  # [ROWS] the last position that each row may read
    pages,  # of one layer: page, token, key or value, KV head, number
    table,  # page ids of the job
    start,
    stop,  # the keys [start, stop)
    scale,
    page_stride,
    token_stride,
    value_shift,  # from a key to its value
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Largest score (in units of exp2), sum of weights and weighted values, all in float32.

    `pages` points at the KV head. A row that sees no key in the stretch ends with sum 0.
    """
    d = tl.arange(0, PADDED)
    best = tl.full([ROWS], FLOOR, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(start, stop, KEYS):
        at = first + tl.arange(0, KEYS)
        there = at < stop
        # Elements of an arena exceed 32 bits.
        page = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
        spots = (page * page_stride + (at % PAGE) * token_stride)[:, None] + d[None, :]
        is_held = there[:, None] & (d < SIZE)[None, :]
        k = tl.load(pages + spots, mask=is_held, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        may = (at[None, :] <= sees[:, None]) & there[None, :]
        scores = tl.where(may, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(best - higher)
        v = tl.load(pages + value_shift + spots, mask=is_held, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        best = higher
    return best, total, mixed


MIN_SPLIT_KEYS = 256  # below, joining splits costs more than another program saves


def decode(
    q: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    splits: int | None = None,
) -> None:
    """Attention of q [rows, heads, D] into out, of the same shape; sums in float32.

    `pages` is one layer of the arena, [pages, page_tokens, 2, kv_heads, D]; `tables` [rows, width]
    holds each row's page ids and `lengths` [rows] its keys, this token's included. A row of length
    0 reads nothing and gives zeros. Lengths are read on the device: the launch may be captured.
    """
    rows, heads, size = q.shape
    page_tokens, kv_heads = pages.shape[1], pages.shape[3]
    shared, padded = heads // kv_heads, triton.next_power_of_2(size)
    count = splits or num_splits(rows, kv_heads, WAVES * num_programs(q.device))
    mixed = torch.empty((rows, heads, count, size), dtype=torch.float32, device=q.device)
    logs = torch.empty((rows, heads, count), dtype=torch.float32, device=q.device)
    _split[(rows, kv_heads, count)](
        q, pages, tables, lengths, mixed, logs, scale,
        q.stride(0), q.stride(1), pages.stride(0), pages.stride(1), pages.stride(2),
        pages.stride(3), tables.stride(0),
        HEADS=heads, SHARED=shared, ROWS=max(16, triton.next_power_of_2(shared)),
        PAGE=page_tokens, SIZE=size, PADDED=padded, KEYS=kv_tokens_per_turn(q.dtype, padded),
        MIN_KEYS=MIN_SPLIT_KEYS, num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    _join[(rows, heads)](
        mixed, logs, out, out.stride(0), out.stride(1),
        HEADS=heads, SIZE=size, PADDED=padded, SPLITS=count, num_warps=2 * warps(size),
    )  # fmt: skip


@triton.jit
def _split(
    q, pages, tables, lengths, mixed, logs, scale,
    q_row, q_head, page_stride, token_stride, value_shift, head_stride, table_row,
    HEADS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, MIN_KEYS: tl.constexpr,
):  # fmt: skip
    """One split of one job for all heads that share a KV head: keys and values are read once."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)  # no constant: one kernel for every number of splits
    length = tl.load(lengths + row).to(tl.int32)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS, MIN_KEYS)
    start = split * each
    stop = tl.minimum(start + each, length)
    m, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    head = kv_head * SHARED + m
    spot = (row * HEADS + head) * splits + split
    is_q = (m < SHARED)[:, None] & (d < SIZE)[None, :]
    whole = q + row.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :]
    sees = tl.full([ROWS], 0, tl.int32) + (length - 1)
    best, total, summed = attend_stretch(
        tl.load(whole, mask=is_q, other=0.0), sees, pages + kv_head * head_stride,
        tables + row.to(tl.int64) * table_row, start, stop, scale,
        page_stride, token_stride, value_shift, PAGE, SIZE, PADDED, ROWS, KEYS,
    )  # fmt: skip
    # An empty split's part of `mixed` is neither written nor read.
    places = mixed + spot[:, None].to(tl.int64) * SIZE + d[None, :]
    total = tl.where(start < stop, total, 1.0)
    tl.store(places, summed / total[:, None], mask=is_q & (start < stop))
    log = tl.where(start < stop, best + tl.log2(total), float("-inf"))
    tl.store(logs + spot, log, mask=m < SHARED)


@triton.jit
def _join(
    mixed, logs, out, out_row, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head, weighted by their sums. Only empty splits give zeros."""
    row, head = tl.program_id(0), tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    first = (row * HEADS + head) * SPLITS
    log = tl.load(logs + first + s)
    weight = tl.exp2(log - tl.maximum(tl.max(log, 0), -1e30))
    is_there = (log > float("-inf"))[:, None] & (d < SIZE)[None, :]
    places = mixed + (first + s)[:, None].to(tl.int64) * SIZE + d[None, :]
    parts = tl.load(places, mask=is_there, other=0.0)
    total = tl.maximum(tl.sum(weight, 0), 1e-30)
    value = tl.sum(parts * weight[:, None], 0) / total
    place = out + row.to(tl.int64) * out_row + head * out_head + d
    tl.store(place, value.to(out.dtype.element_ty), mask=d < SIZE)


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
    [n, 2] names a slice and the first row of a tile in it, see runtime.serving.paged.tiles_of.
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
        PAGE=page_tokens, SIZE=size, PADDED=padded, KEYS=kv_tokens_per_turn(q.dtype, padded),
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
    _, total, summed = attend_stretch(
        tl.load(q + places, mask=is_q, other=0.0), past + row - start,
        pages + kv_head * head_stride, tables + piece.to(tl.int64) * table_row, 0,
        past + end - start, scale, page_stride, token_stride, value_shift, PAGE, SIZE, PADDED,
        ROWS, KEYS,
    )  # fmt: skip
    value = (summed / total[:, None]).to(out.dtype.element_ty)
    places = row[:, None].to(tl.int64) * out_row + head[:, None] * out_head + d[None, :]
    tl.store(out + places, value, mask=is_q)
