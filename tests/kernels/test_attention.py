"""Paged decode and prefill against plain attention, on random shapes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from runtime.kernels.shapes import rows_per_tile
from runtime.serving.paged import tiles_of
from tests.kernels.plain import Store, assert_close, attention, stored

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (64, 80, 96, 128, 192, 256)
PAGES = (8, 16, 24, 32, 64, 128, 256)


def queries(store: Store, rows: int, shared: int, seed: int) -> torch.Tensor:
    """Random queries as attention modules give them: heads outside, tokens inside."""
    kv_heads, size = store.pages.shape[3:]
    torch.manual_seed(seed + 1)
    packed = torch.randn((kv_heads * shared, rows, size), device=store.pages.device)
    return packed.to(store.pages.dtype).transpose(0, 1)


def decoded(store: Store, lengths: list[int], shared: int, splits: int | None) -> None:
    """Runs the kernel and compares every row."""
    from runtime.kernels.paged_attention import decode

    q = queries(store, len(lengths), shared, 0)
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    tokens = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    scale = q.shape[-1] ** -0.5
    decode(q, store.pages, store.tables, tokens, out, scale, splits)
    for row, length in enumerate(lengths):
        if length:
            expected = attention(q[row : row + 1], store.keys[row], store.values[row], scale)
            assert_close(out[row], expected[0])
        else:
            assert not out[row].any()


@pytest.mark.parametrize("seed", range(12))
def test_decode_equals_plain_attention(seed: int, device: str) -> None:
    rng = random.Random(seed)
    lengths = [int(rng.choice((1, 20, 300, 1200)) * rng.uniform(0.5, 1) + 1) for _ in range(3)]
    page, dtype, size = rng.choice(PAGES), DTYPES[seed % 3], SIZES[seed % len(SIZES)]
    store = stored(lengths, page, rng.choice((1, 2)), size, dtype, device, seed)
    decoded(store, lengths, rng.choice((1, 3, 4, 8)), rng.choice((1, 2, 4, 8, None)))


def test_decode_of_a_long_context_leaves_short_rows_splits_empty(device: str) -> None:
    lengths = [6001, 1, 0, 256, 257]
    store = stored(lengths, 16, 1, 64, torch.float32, device)
    decoded(store, lengths, 2, 32)


def test_decode_of_many_heads_per_kv_head(device: str) -> None:
    store = stored([70, 9], 8, 1, 64, torch.float32, device)
    decoded(store, [70, 9], 24, 2)


def test_splits_depend_on_nothing_that_changes_between_steps() -> None:
    from runtime.kernels.shapes import MAX_SPLITS, num_splits

    assert num_splits(1, 8, 528) == 64 and num_splits(1, 1, 10**6) == MAX_SPLITS
    assert num_splits(32, 8, 528) == 2 and num_splits(256, 8, 528) == 1
    assert all(num_splits(rows, 8, 528) >= num_splits(rows + 1, 8, 528) for rows in range(1, 300))


@pytest.mark.parametrize("seed", range(9))
def test_prefill_equals_plain_attention_in_hybrid_batches(seed: int, device: str) -> None:
    """Prompts, slices behind a past and single rows, in one launch."""
    from runtime.kernels.paged_attention import prefill

    rng = random.Random(100 + seed)
    slices = [(rng.randint(2, 90), 0), (rng.randint(2, 40), rng.randint(1, 300)), (1, 77), (1, 0)]
    rng.shuffle(slices)
    page, dtype, size = rng.choice(PAGES), DTYPES[seed % 3], SIZES[seed % len(SIZES)]
    kv_heads, shared = rng.choice((1, 2)), rng.choice((1, 4, 7))
    store = stored([n + past for n, past in slices], page, kv_heads, size, dtype, device, seed)
    ends = np.cumsum([n for n, _ in slices])
    spans = [(end - n, end, past) for end, (n, past) in zip(ends, slices, strict=True)]
    q = queries(store, int(ends[-1]), shared, seed)
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    table = np.array(spans, dtype=np.int32)
    tiles = tiles_of(table, rows_per_tile(shared, dtype))
    on_device = [torch.from_numpy(t).to(device) for t in (table, tiles)]
    prefill(q, store.pages, store.tables, *on_device, out, 0.11)
    for job, (start, end, _) in enumerate(spans):
        expected = attention(q[start:end], store.keys[job], store.values[job], 0.11)
        assert_close(out[start:end], expected)
