"""The kernels that work row by row: norms, rotation with KV writes, activation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm as torch_layer_norm
from torch.nn.functional import silu

from tests.kernels.plain import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 128), (5, 896), (3, 4096)])
@pytest.mark.parametrize("adds", [False, True])
def test_rms_norm(dtype: torch.dtype, rows: int, size: int, adds: bool, device: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from runtime.kernels.norm import rms_norm

    plain = LlamaRMSNorm(size, eps=1e-5).to(device, dtype)
    plain.weight.data = drawn(size, dtype=dtype, device=device, seed=1)
    x = drawn(1, rows, size, dtype=dtype, device=device, seed=2)
    residual = drawn(1, rows, size, dtype=dtype, device=device, seed=3) if adds else None
    expected_sum = x if residual is None else x + residual
    normed, summed = rms_norm(x, plain.weight.data, 1e-5, residual)
    assert torch.equal(summed, expected_sum)
    assert_close(normed, plain(expected_sum))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_layer_norm(dtype: torch.dtype, adds: bool, device: str) -> None:
    from runtime.kernels.norm import layer_norm

    weight, bias = (drawn(768, dtype=dtype, device=device, seed=s) for s in (1, 2))
    x = drawn(4, 1536, dtype=dtype, device=device, seed=3)[:, :768] + 3  # rows lie apart
    residual = drawn(4, 768, dtype=dtype, device=device, seed=4) if adds else None
    expected_sum = x if residual is None else x + residual
    normed, summed = layer_norm(x, weight, bias, 1e-5, residual)
    assert torch.equal(summed, expected_sum)
    assert_close(normed, torch_layer_norm(expected_sum, (768,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_product(dtype: torch.dtype, device: str) -> None:
    from runtime.kernels.norm import silu_product

    both = drawn(3, 2 * 1300, dtype=dtype, device=device)
    gate, up = both.chunk(2, -1)
    expected, before = silu(gate) * up, up.clone()
    found = silu_product(gate, up)
    assert_close(found, expected)
    assert found.data_ptr() == both.data_ptr() and torch.equal(up, before), "in the gate's place"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "shared", "norms"), [(64, 4, False), (80, 3, False), (128, 2, True)]
)
def test_rotation_with_kv_writes(
    dtype: torch.dtype, size: int, shared: int, norms: bool, device: str
) -> None:
    """Against transformers' functions; slots out of order, one of them of no page."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    from runtime.kernels.rotate import rotate_and_store

    count, kv_heads = 4, 2
    heads = shared * kv_heads
    packed = drawn(count, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    parts = packed.split([heads * size, kv_heads * size, kv_heads * size], -1)
    q, k, v = (part.unflatten(-1, (-1, size)) for part in parts)
    angle = torch.outer(torch.arange(count) + 0.5, 1e4 ** -(torch.arange(size // 2) / size * 2))
    angles = [torch.cat((f(angle), f(angle)), -1).to(device, dtype) for f in (torch.cos, torch.sin)]
    weights = tuple(drawn(size, dtype=dtype, device=device, seed=s) for s in (5, 6))
    plain_q, plain_k = q, k
    if norms:
        plain_q, plain_k = (
            _normed(LlamaRMSNorm, w, t) for w, t in zip(weights, (q, k), strict=True)
        )
    wide = [t.float().transpose(0, 1)[None] for t in (plain_q, plain_k)]
    turned = apply_rotary_pos_emb(*wide, *(a.float()[None] for a in angles))
    expected_q, expected_k = (t[0].transpose(0, 1) for t in turned)
    rows = torch.full((9, 2, kv_heads, size), 7.0, dtype=dtype, device=device)
    slots = torch.tensor([5, 0, -1, 8], device=device)
    written = slots >= 0
    expected_v = v.clone()
    rotate_and_store(q, k, v, rows, slots, tuple(angles), weights if norms else None, 1e-6)
    assert_close(q, expected_q)
    assert_close(rows[slots[written], 0], expected_k[written])
    assert torch.equal(rows[slots[written], 1], expected_v[written])
    others = [i for i in range(9) if i not in slots.tolist()]
    assert (rows[others] == 7).all()


def _normed(kind: type, weight: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    norm = kind(len(weight), eps=1e-6).to(heads.device, heads.dtype)
    norm.weight.data = weight
    return norm(heads)


def test_store_alone_changes_neither_key_nor_value(device: str) -> None:
    from runtime.kernels.rotate import store

    key, value = (drawn(3, 2, 80, dtype=torch.float32, device=device, seed=s) for s in (1, 2))
    rows = torch.zeros((6, 2, 2, 80), device=device)
    store(key, value, rows, torch.tensor([4, -1, 2], device=device))
    assert torch.equal(rows[4], torch.stack((key[0], value[0])))
    assert torch.equal(rows[2], torch.stack((key[2], value[2])))
    assert not rows[[0, 1, 3, 5]].any()
