"""Attention of a launch by the paged kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.paged_attention import decode, prefill
from runtime.kernels.rotate import store
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

    Shapes: runtime/serving/attention.py.
    """
    keys, values = (t[0].transpose(0, 1) for t in (key, value))  # [T, kv_heads, D]
    store(keys, values, meta.arena.rows(layer), meta.slots)
    return attend_stored(query[0].transpose(0, 1), meta, layer, scale).unsqueeze(0)


def attend_stored(q: Tensor, meta: AttentionRows, layer: int, scale: float | None = None) -> Tensor:
    """[T, heads, D] of as many queries, over pages that hold the rows' own tokens already."""
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
