"""Between projections and attention, in one kernel: norms of heads, rotation, KV writes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def store(key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes key and value, [T, kv_heads, D], to the slots of a layer's rows, see Arena.rows.

    A negative slot belongs to no page: nothing is written there.
    """
    _launch(None, key, value, rows, slots, None, None, 0.0)


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    slots: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """store() of the rotated key; the query, [T, heads, D], is rotated in place.

    `angles` are cosines and sines, [T, D], as transformers makes them: two equal halves. `norms`
    are the weights, [D], of the RMSNorms of each query and key head before that (Qwen3).
    """
    _launch(query, key, value, rows, slots, angles, norms, eps)


def _launch(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    slots: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    count, kv_heads, size = key.shape
    q = key if query is None else query
    cos, sin = angles or (key, key)  # not read without angles
    q_weight, k_weight = norms or (key, key)
    shared = q.shape[1] // kv_heads
    _row[(count, kv_heads)](
        q, key, value, rows, slots, cos, sin, q_weight, k_weight, eps,
        q.stride(0), q.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        rows.stride(0), rows.stride(1), rows.stride(2), cos.stride(0),
        SHARED=shared, HEADS=triton.next_power_of_2(shared), SIZE=size, HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2), TURNS=angles is not None,
        NORMS=norms is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _turned(
    heads, is_in, weight, cos, sin, eps, SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, TURNS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads, [heads, BLOCK] in float32, normed and rotated."""
    d = tl.arange(0, BLOCK)
    dtype = heads.dtype.element_ty
    low = tl.load(heads, mask=is_in, other=0.0).to(tl.float32)
    high = tl.load(heads + HALF, mask=is_in, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        near = tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        far = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        low = ((low * scale).to(dtype).to(tl.float32) * near).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * far).to(dtype).to(tl.float32)
    if TURNS:
        c = tl.load(cos + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        low, high = low * c - high * s, high * c + low * s
    return low.to(dtype), high.to(dtype)


@triton.jit
def _row(
    query, key, value, rows, slots, cos, sin, query_weight, key_weight, eps,
    q_row, q_head, k_row, k_head, v_row, v_head, slot_stride, value_shift, head_stride, angle_row,
    SHARED: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, TURNS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """One token, one KV head and the query heads that share it."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += row * angle_row
    sin += row * angle_row
    d, one, m = tl.arange(0, BLOCK)[None, :], tl.arange(0, 1)[:, None], tl.arange(0, HEADS)[:, None]
    slot = tl.load(slots + row)
    is_half = (d < HALF) & (one == 0)
    is_held = is_half & (slot >= 0)
    place = rows + slot * slot_stride + kv_head * head_stride + d + one
    k = key + row * k_row + kv_head * k_head + d + one
    low, high = _turned(
        k, is_half, key_weight, cos, sin, eps, SIZE, HALF, BLOCK, TURNS, NORMS
    )  # fmt: skip
    tl.store(place, low, mask=is_held)
    tl.store(place + HALF, high, mask=is_held)
    v = value + row * v_row + kv_head * v_head + d + one
    tl.store(place + value_shift, tl.load(v, mask=is_half, other=0.0), mask=is_held)
    tl.store(place + value_shift + HALF, tl.load(v + HALF, mask=is_half, other=0.0), mask=is_held)
    if TURNS:
        q = query + row * q_row + (kv_head * SHARED + m) * q_head + d
        is_q = (m < SHARED) & (d < HALF)
        low, high = _turned(
            q, is_q, query_weight, cos, sin, eps, SIZE, HALF, BLOCK, TURNS, NORMS
        )  # fmt: skip
        tl.store(q, low, mask=is_q)
        tl.store(q + HALF, high, mask=is_q)
