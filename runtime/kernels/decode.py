"""Paged decode: a query row per job, its keys split between programs, joined by a second kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.shapes import (
    STAGES,
    WAVES,
    keys_per_turn,
    num_programs,
    num_splits,
    warps,
)
from runtime.kernels.tile import attend_keys

LEAST_KEYS = 256  # of a split: below, joining costs more than another program earns


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
        PAGE=page_tokens, SIZE=size, PADDED=padded, KEYS=keys_per_turn(q.dtype, padded),
        LEAST=LEAST_KEYS, num_warps=4, num_stages=STAGES,
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
    SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One split of one job for all heads that share a KV head: keys and values are read once."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)  # no constant: one kernel for all of them
    length = tl.load(lengths + row).to(tl.int32)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, splits), KEYS) * KEYS, LEAST)
    start = split * each
    stop = tl.minimum(start + each, length)
    m, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    head = kv_head * SHARED + m
    spot = (row * HEADS + head) * splits + split
    is_q = (m < SHARED)[:, None] & (d < SIZE)[None, :]
    whole = q + row.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :]
    sees = tl.full([ROWS], 0, tl.int32) + (length - 1)
    best, total, summed = attend_keys(
        tl.load(whole, mask=is_q, other=0.0), sees, pages + kv_head * head_stride,
        tables + row.to(tl.int64) * table_row, start, stop, scale,
        page_stride, token_stride, value_shift, PAGE, SIZE, PADDED, ROWS, KEYS,
    )  # fmt: skip
    # What an empty split would have in `mixed` is neither written nor read.
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
    """The splits of one row and head, weighted by their sums. Nothing but empty ones give zeros."""
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
