"""Attention of a tile of query rows over a stretch of paged keys: what decode and prefill share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and exp2 is one instruction
FLOOR = tl.constexpr(-1e30)  # instead of -inf: the difference of two is no NaN


@triton.jit
def attend_keys(
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
