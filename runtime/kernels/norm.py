"""RMSNorm, LayerNorm and SiLU in one pass each: the element-wise kernels of a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """x / rms(x) * weight over the last dimension; see Normed for `residual`.

    Rounded as in transformers' modules: first the norm, then its product with the weight.
    """
    return _norm(x, weight, None, eps, residual)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None
) -> Normed:
    """(x - mean) / deviation * weight + bias over the last dimension, rounded once as in torch."""
    return _norm(x, weight, bias, eps, residual)


Normed = tuple[Tensor, Tensor]
"""The normed rows, and the input of the norm: x, or x + residual rounded to its dtype."""


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Normed:
    flat = x.reshape(-1, x.shape[-1])  # a view wherever the rows lie evenly
    added = None if residual is None else residual.reshape(flat.shape)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    summed = flat if added is None else torch.empty_like(out)
    block = triton.next_power_of_2(flat.shape[1])
    _rows[(len(flat),)](
        flat, flat if added is None else added, weight, weight if bias is None else bias, out,
        summed, eps, flat.stride(0), flat.stride(0) if added is None else added.stride(0),
        SIZE=flat.shape[1], BLOCK=block, ADDS=added is not None, CENTERS=bias is not None,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out.view(x.shape), summed.view(x.shape)


@triton.jit
def _rows(
    x, residual, weight, bias, out, summed, eps, x_row, residual_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, CENTERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_in = at < SIZE
    dtype = out.dtype.element_ty
    value = tl.load(x + row * x_row + at, mask=is_in, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + row * residual_row + at, mask=is_in, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(summed + row * SIZE + at, value.to(dtype), mask=is_in)
    if CENTERS:
        value = tl.where(is_in, value - tl.sum(value, 0) / SIZE, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    scale = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    if CENTERS:
        value = value * scale + tl.load(bias + at, mask=is_in, other=0.0).to(tl.float32)
    else:
        value = value.to(dtype).to(tl.float32) * scale
    tl.store(out + row * SIZE + at, value.to(dtype), mask=is_in)


BLOCK = 1024


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, inner], in the place of `gate`: a launch's peak holds no third.

    Rounded after the SiLU, as in transformers.
    """
    rows, inner = gate.shape
    _block[(rows, triton.cdiv(inner, BLOCK))](
        gate, up, gate.stride(0), up.stride(0), INNER=inner, SIZE=BLOCK, num_warps=4
    )
    return gate


@triton.jit
def _block(gate, up, gate_row, up_row, INNER: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_in = at < INNER
    dtype = gate.dtype.element_ty
    x = tl.load(gate + row * gate_row + at, mask=is_in, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + at, mask=is_in, other=0.0).to(tl.float32)
    active = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(gate + row * gate_row + at, (active * y).to(dtype), mask=is_in)
