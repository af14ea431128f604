"""Attention over paged KV, behind transformers' public attention interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from runtime.kv import Arena
from runtime.paged import Paged

NAME = "tandem"  # under which transformers knows our attention


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The rows [start, stop) of one prefill slice, behind `past` tokens in the pages."""

    start: int
    stop: int
    past: int
    table: Tensor  # the page ids that hold past and own tokens


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The rows [start, stop) of decodes with about as long contexts, attended as one batch."""

    start: int
    stop: int
    table: Tensor  # [rows * pages] page ids; short tables repeat their last page
    mask: Tensor  # [rows, 1, 1, pages * page_tokens], added to the scores


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """How the packed rows of one launch lie: prefill slices first, then one row per decode."""

    arena: Arena
    slots: Tensor  # [T] where each row's keys and values go, see Arena.row_of
    prefills: tuple[Segment, ...]
    decodes: tuple[tuple[Tensor, int], ...]  # per decode row: page ids, tokens with this one
    groups: tuple[Group, ...]  # the same rows where decodes are padded; decodes is empty then
    masks: dict[Segment, Tensor]  # of slices with a past; made at the first layer, then shared
    paged: Paged | None = None  # for the kernels, instead of prefills, decodes and groups

    @property
    def first_decode(self) -> int:
        """The row of the first decode."""
        return self.prefills[-1].stop if self.prefills else 0


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    meta: Rows,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the rows' keys and values into their pages, then attends.

    query is [1, heads, T, D], key and value [1, kv_heads, T, D]; returns [1, T, heads, D].
    A slice, and on the CPU a decode, costs one gather and one SDPA call: there the fastest of what
    was measured (RUNTIME.md 2.2), and exact. A GPU cannot wait for so many launches: its decodes
    come in groups. Heads that share keys read them through a view, without a copy.
    Rows packed for our kernels are left to those.
    """
    if meta.paged is not None:
        from runtime.kernels.attention import attend as attend_paged  # Triton, where it was chosen

        return attend_paged(query, key, value, meta, module.layer_idx, scaling), None
    _store(key, value, meta, module.layer_idx)
    pages = meta.arena.layer(module.layer_idx)
    outputs = [_prefill(part, query, key, value, pages, meta, scaling) for part in meta.prefills]
    if meta.decodes:
        outputs.append(_decode(query, pages, meta, key.shape[1], scaling))
    outputs += [_decode_group(group, query, pages, scaling) for group in meta.groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unsqueeze(0), None


def _store(key: Tensor, value: Tensor, meta: Rows, layer: int) -> None:
    pairs = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)  # [T, 2, kv_heads, D]
    meta.arena.rows(layer).index_copy_(0, meta.slots, pairs)


def _prefill(
    segment: Segment,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    meta: Rows,
    scaling: float | None,
) -> Tensor:
    """[rows, heads, D] of one slice: causal on its own rows, masked behind a past."""
    start, stop, past = segment.start, segment.stop, segment.past
    kv_heads, heads = key.shape[1], query.shape[1]
    q = query[0, :, start:stop].unflatten(0, (kv_heads, -1))  # [kv_heads, shared, rows, D]
    if past:
        gathered = pages.index_select(0, segment.table)
        k, v = _views(gathered, past + stop - start, heads // kv_heads)
        mask = _mask(segment, query.dtype, meta)
    else:
        k, v, mask = key[0, :, start:stop], value[0, :, start:stop], None
        k, v = (t.unsqueeze(1).expand(-1, heads // kv_heads, -1, -1) for t in (k, v))
    out = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out.permute(2, 0, 1, 3).reshape(stop - start, heads, -1)


def _mask(segment: Segment, dtype: torch.dtype, meta: Rows) -> Tensor:
    """[rows, past + rows], added to the scores: row i sees the past and rows up to its own."""
    if segment not in meta.masks:
        start, stop, past = segment.start, segment.stop, segment.past
        shape = (stop - start, past + stop - start)
        mask = torch.full(shape, float("-inf"), dtype=dtype, device=segment.table.device)
        meta.masks[segment] = mask.triu_(past + 1)
    return meta.masks[segment]


def _decode(
    query: Tensor, pages: Tensor, meta: Rows, kv_heads: int, scaling: float | None
) -> Tensor:
    """[decodes, heads, D]: each row over all pages of its job."""
    heads, first = query.shape[1], meta.first_decode
    rows = query[0, :, first:].transpose(0, 1)  # [decodes, heads, D]
    queries = rows.unflatten(1, (1, kv_heads, heads // kv_heads)).unbind(0)
    outputs = []
    for q, (table, tokens) in zip(queries, meta.decodes, strict=True):
        # Nothing names the gathered pages: they must be gone before the next gather.
        outputs.append(sdpa(q, *_views(pages.index_select(0, table), tokens), scale=scaling))
    return torch.cat(outputs).flatten(1, 2)


def _decode_group(group: Group, query: Tensor, pages: Tensor, scaling: float | None) -> Tensor:
    """[rows, heads, D]: all rows of a group at once, over keys padded to its longest."""
    heads, (kv_heads, size) = query.shape[1], pages.shape[3:]
    rows = query[0, :, group.start : group.stop].transpose(0, 1)  # [rows, heads, D]
    gathered = pages.index_select(0, group.table)
    count, tokens = group.stop - group.start, group.mask.shape[-1]
    shape, row = (count, kv_heads, tokens, size), 2 * kv_heads * size
    strides = (tokens * row, size, row, 1)
    k = gathered.as_strided(shape, strides)
    v = gathered.as_strided(shape, strides, kv_heads * size)
    q = rows.unflatten(1, (kv_heads, heads // kv_heads))
    return sdpa(q, k, v, attn_mask=group.mask, scale=scaling).flatten(1, 2)


def _views(gathered: Tensor, tokens: int, shared: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values in gathered pages, [pages, page_tokens, 2, kv_heads, D], without a copy.

    Each [1, kv_heads, tokens, D], or [kv_heads, shared, tokens, D] where `shared` heads read the
    same keys. Strides are given outright: the four view operators that say the same cost as much
    as the gather, per job and layer.
    """
    kv_heads, size = gathered.shape[3:]
    half, row = kv_heads * size, 2 * kv_heads * size
    if shared:
        shape, strides = (kv_heads, shared, tokens, size), (size, 0, row, 1)
    else:
        shape, strides = (1, kv_heads, tokens, size), (0, size, row, 1)
    return gathered.as_strided(shape, strides), gathered.as_strided(shape, strides, half)


def register() -> None:
    """Makes transformers know our attention, and build no mask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
