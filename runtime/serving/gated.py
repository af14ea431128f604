"""Llama's layer over packed rows, with a third of the operators of the Hugging Face module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from runtime.serving.attention import attended, store
from runtime.serving.paged import AttentionRows


class Merged:
    """The joint weight, [sum of outputs, inputs], and bias of some nn.Linear modules.

    The modules work as before: their parameters become views of the joint tensor, so that no byte
    is kept twice and a change of one shows in the other. Merging again costs nothing.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.weight = _joined(modules, "weight")
        self.bias = None if modules[0].bias is None else _joined(modules, "bias")

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, inputs] -> [T, sum of outputs]."""
        return nn.functional.linear(rows, self.weight, self.bias)


def _joined(modules: Sequence[nn.Linear], name: str) -> Tensor:
    """One tensor over all parameters of a name; the parameters become views of it."""
    parameters = [getattr(module, name) for module in modules]
    parts = [parameter.detach() for parameter in parameters]
    if (whole := _whole(parts)) is not None:
        return whole
    whole = torch.cat(parts)
    views = whole.split([len(part) for part in parts])
    for module, parameter, view in zip(modules, parameters, views, strict=True):
        setattr(module, name, nn.Parameter(view, parameter.requires_grad))
    return whole


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor over contiguous parts that follow each other in one storage; None for others."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        if part.storage_offset() != at or not part.is_contiguous():
            return None
        at += part.numel()
    shape = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(shape, first.stride())


Angles = tuple[Tensor, Tensor]
"""Cosines, and sines whose first half is negated; each [T, 1, D]."""


def signed(cos: Tensor, sin: Tensor) -> Angles:
    """Angles from transformers' [1, T, D] each. Overwrites `sin`, so it needs no other reader."""
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


class GatedLayer:
    """A layer of the Llama, Mistral, Qwen2 and Qwen3 families, for inference only.

    q, k and v are one product, and so are gate and up. Operations and their order are the module's,
    but for sums inside a product, whose order a library chooses by shape: in float32 results differ
    at most by rounding.
    """

    def __init__(self, module: Any, index: int) -> None:
        attention, mlp = module.self_attn, module.mlp
        self._index, self._size = index, attention.head_dim
        self._scaling = attention.scaling
        self._qkv = Merged(attention.q_proj, attention.k_proj, attention.v_proj)
        self._output = attention.o_proj
        self._kv_heads = attention.k_proj.out_features // self._size
        self._heads = attention.q_proj.out_features // self._size
        self._head_norms = _head_norms(attention)
        self._gate_up = Merged(mlp.gate_proj, mlp.up_proj)
        self._down = mlp.down_proj
        self._norm, self._mlp_norm = module.input_layernorm, module.post_attention_layernorm

    def __call__(self, hidden: Tensor, *, angles: Angles, meta: AttentionRows) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; writes the rows' keys and values into their pages."""
        before = hidden[0]
        attention = self._attention(before, angles, meta)
        between = linear(attention, self._output.weight, self._output.bias).add_(before)
        del attention  # freed before the next tensor is made
        return self._mlp(between).add_(between).unsqueeze(0)

    def _attention(self, hidden: Tensor, angles: Angles, rows: AttentionRows) -> Tensor:
        heads = self._qkv(normed(self._norm, hidden)).unflatten(-1, (-1, self._size))
        turned = heads[:, : -self._kv_heads]  # q and k
        if self._head_norms is not None:
            self._norm_heads(turned, *self._head_norms)
        rotate(turned, angles)
        store(heads[:, self._heads :].unflatten(1, (2, -1)), rows, self._index)
        query, key, value = heads.split((self._heads, self._kv_heads, self._kv_heads), 1)
        return attended(query, key, value, rows, self._index, self._scaling).flatten(1)

    def _norm_heads(
        self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float
    ) -> None:
        """RMSNorm of each head in place, rounded as in the module before the product by weights."""
        squares = heads.float().square()
        heads.mul_(squares.mean(-1, keepdim=True).add_(eps).rsqrt_())
        heads[:, : self._heads].mul_(query_weight)
        heads[:, self._heads :].mul_(key_weight)

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate, up = self._gate_up(normed(self._mlp_norm, hidden)).chunk(2, -1)
        return linear(silu(gate, inplace=True).mul_(up), self._down.weight, self._down.bias)


def normed(module: Any, rows: Tensor) -> Tensor:
    """The module's RMSNorm; in float32 by torch's one call, which rounds as the module does."""
    if rows.dtype != torch.float32:
        found: Tensor = module(rows)
        return found
    return rms_norm(rows, module.weight.shape, module.weight, module.variance_epsilon)


def rotate(heads: Tensor, angles: Angles) -> None:
    """Rotates [T, heads, D] in place: x cos + (-x2, x1) sin, as transformers does."""
    cos, sin = angles
    low, high = heads.chunk(2, -1)
    swapped = torch.cat((high, low), -1).mul_(sin)
    heads.mul_(cos).add_(swapped)


def _head_norms(attention: Any) -> tuple[Tensor, Tensor, float] | None:
    """Weights and epsilon of the norms of each query and key head (Qwen3)."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    return query.weight, key.weight, query.variance_epsilon
