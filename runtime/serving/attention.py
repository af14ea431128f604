"""Attention over paged KV, behind transformers' public attention interface."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from runtime.serving.paged import AttentionRows, DecodeGroup, PrefillSlice, kv_views

NAME = "tandem"  # of the attention, as transformers knows it


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    meta: AttentionRows,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the rows' keys and values into their pages, then attends; transformers calls it.

    query is [1, heads, T, D], key and value [1, kv_heads, T, D]; returns [1, T, heads, D].
    AttentionRows packed for the kernels go to them.
    """
    if meta.paged is not None:
        from runtime.kernels.paged_attention import attend as attend_paged  # imports Triton

        return attend_paged(query, key, value, meta, module.layer_idx, scaling), None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    held = meta.arena.rows(module.layer_idx)
    held.select(1, 0).index_copy_(0, meta.slots, k)
    held.select(1, 1).index_copy_(0, meta.slots, v)
    return attended(q, k, v, meta, module.layer_idx, scaling).unsqueeze(0), None


def store(pairs: Tensor, rows: AttentionRows, layer: int) -> None:
    """Writes keys and values of all rows, [T, 2, kv_heads, D], into their pages."""
    rows.arena.rows(layer).index_copy_(0, rows.slots, pairs)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: AttentionRows,
    layer: int,
    scaling: float | None,
) -> Tensor:
    """Attention of rows whose keys and values are in their pages already.

    query is [T, heads, D], key and value [T, kv_heads, D]; returns [T, heads, D].
    A slice, and on the CPU a decode, costs one SDPA call, which was the fastest exact way measured
    on a CPU. A GPU would take a kernel per decode: its decodes come in groups. Heads that share
    keys read them through a view, without a copy.
    """
    pages = rows.arena.layer(layer)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for part in rows.prefills:
        _prefill(part, query, key, value, pages, rows, scaling, output)
    if rows.decodes:
        _decode(query, pages, rows, key.shape[1], scaling, output)
    for group in rows.groups:
        _decode_group(group, query, pages, scaling, output)
    return output


def _prefill(
    segment: PrefillSlice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    rows: AttentionRows,
    scaling: float | None,
    output: Tensor,
) -> None:
    """One prefill slice: causal on its own rows, masked behind a past."""
    start, stop, past = segment.start, segment.stop, segment.past
    shared = query.shape[1] // key.shape[1]
    q = _by_head(query[start:stop], shared)
    if past:
        gathered = pages.index_select(0, segment.table)
        k, v = kv_views(gathered, past + stop - start, shared)
        mask = _mask(segment, query.dtype, rows)
    else:
        k, v = (_by_head(t[start:stop], 1).expand_as(q) for t in (key, value))
        mask = None
    out = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    _by_head(output[start:stop], shared).copy_(out)


def _by_head(rows: Tensor, shared: int) -> Tensor:
    """[n, kv_heads * shared, D] as [kv_heads, shared, n, D], a view."""
    heads: Tensor = rows.unflatten(1, (-1, shared))
    return heads.permute(1, 2, 0, 3)


def _mask(segment: PrefillSlice, dtype: torch.dtype, rows: AttentionRows) -> Tensor:
    """[n, past + n], added to the scores: row i sees the past and rows up to its own."""
    masks = rows.scratch.masks
    if segment not in masks:
        start, stop, past = segment.start, segment.stop, segment.past
        shape = (stop - start, past + stop - start)
        mask = torch.full(shape, float("-inf"), dtype=dtype, device=segment.table.device)
        masks[segment] = mask.triu_(past + 1)
    return masks[segment]


def _decode(
    query: Tensor,
    pages: Tensor,
    rows: AttentionRows,
    kv_heads: int,
    scaling: float | None,
    output: Tensor,
) -> None:
    """Attends each decode over all pages of its job."""
    first, scratch = rows.first_decode, rows.scratch
    if not scratch.keys:
        scratch.lay_out(rows.decodes, pages)
    queries = query[first:].unflatten(1, (1, kv_heads, -1)).unbind(0)
    pairs = zip(queries, scratch.keys, strict=True)
    outputs = []
    for part, gathered in zip(rows.decodes, scratch.gathered, strict=True):
        torch.index_select(pages, 0, part.table, out=gathered)
        outputs += [sdpa(q, *keys, scale=scaling) for q, keys in islice(pairs, len(part.tokens))]
    torch.cat(outputs, out=output[first:].unflatten(1, (kv_heads, -1)))


def _decode_group(
    group: DecodeGroup, query: Tensor, pages: Tensor, scaling: float | None, output: Tensor
) -> None:
    """Attends all decodes of a group at once, over keys padded to the longest."""
    kv_heads, size = pages.shape[3:]
    gathered = pages.index_select(0, group.table)
    count, tokens = group.stop - group.start, group.mask.shape[-1]
    shape, row = (count, kv_heads, tokens, size), 2 * kv_heads * size
    strides = (tokens * row, size, row, 1)
    k = gathered.as_strided(shape, strides)
    v = gathered.as_strided(shape, strides, kv_heads * size)
    q = query[group.start : group.stop].unflatten(1, (kv_heads, -1))
    out = sdpa(q, k, v, attn_mask=group.mask, scale=scaling)
    output[group.start : group.stop].copy_(out.flatten(1, 2))


def register() -> None:
    """Registers `attend` with transformers, and keeps it from building masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
