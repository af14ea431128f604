"""The kernels' results in plain PyTorch, and arenas in which a stray read shows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, eq=False)
class Store:
    """Paged keys and values of some jobs in one layer of an arena; elsewhere lies NaN."""

    pages: Tensor  # [pages, page_tokens, 2, kv_heads, D], a view as Arena.layer() gives it
    tables: Tensor  # [jobs, width] int32; beyond a job's pages lie pages of other jobs
    keys: Sequence[Tensor]  # per job [tokens, kv_heads, D]
    values: Sequence[Tensor]


def stored(
    lengths: Sequence[int],
    page_tokens: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Store:
    """Random keys and values of each job's tokens, on scattered pages of the middle layer."""
    counts = [-(-length // page_tokens) for length in lengths]
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ids = rng.sample(range(sum(counts) + 3), sum(counts) + 3)
    shape = (len(ids), 3, page_tokens, 2, kv_heads, size)
    pages = torch.full(shape, float("nan"), dtype=dtype, device=device)[:, 1]
    tables = torch.zeros((len(lengths), max(counts) + 2), dtype=torch.int32, device=device)
    tables[:] = ids.pop()
    keys, values = [], []
    for job, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int64, device=device)
        tables[job, :count] = own
        at = torch.arange(length, device=device)
        kv = torch.randn((length, 2, kv_heads, size), device=device).to(dtype)
        pages[own[at // page_tokens], at % page_tokens] = kv
        keys.append(kv[:, 0])
        values.append(kv[:, 1])
    return Store(pages, tables, keys, values)


def attention(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[rows, heads, D] for the last rows of a job with keys and values [tokens, kv_heads, D]."""
    rows, tokens, shared = len(q), len(key), q.shape[1] // key.shape[1]
    k, v = (t.double().repeat_interleave(shared, 1) for t in (key, value))
    scores = torch.einsum("rhd,thd->rht", q.double(), k) * scale
    at = torch.arange(tokens, device=q.device)
    hidden = at[None] > at[tokens - rows :, None]
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rht,thd->rhd", weights, v)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal within a few roundings of the dtype of the kernel."""
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)
