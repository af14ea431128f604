"""SiLU of the gates times the other half, in one kernel: the middle of a Llama MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., inner]; rounded after the SiLU, as transformers does."""
    inner = gate.shape[-1]
    flat, other = gate.reshape(-1, inner), up.reshape(-1, inner)
    out = torch.empty(flat.shape, dtype=gate.dtype, device=gate.device)
    _block[(len(flat), triton.cdiv(inner, BLOCK))](
        flat, other, out, flat.stride(0), other.stride(0), INNER=inner, SIZE=BLOCK, num_warps=4
    )
    return out.view(gate.shape)


@triton.jit
def _block(gate, up, out, gate_row, up_row, INNER: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_in = at < INNER
    dtype = out.dtype.element_ty
    x = tl.load(gate + row * gate_row + at, mask=is_in, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + at, mask=is_in, other=0.0).to(tl.float32)
    active = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out + row * INNER + at, (active * y).to(dtype), mask=is_in)
