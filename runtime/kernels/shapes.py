"""Block sizes of the kernels, all in one place for tuning on a GPU."""

from __future__ import annotations

from functools import cache

import torch

STAGES = 3  # of a decode's loop: page ids, keys and values, sums
WAVES = 4  # programs per multiprocessor that a decode aims at: two run at once, two follow
MAX_SPLITS = 64  # of a job's keys
# Of a prefill program, tokens times heads that share a KV head. float32 is multiplied without
# tensor cores: larger tiles spill registers.
TILE_ROWS, TILE_ROWS_FLOAT32 = 64, 16
WIDE = 128  # head dimension above which a program holds half as many keys


def kv_tokens_per_turn(dtype: torch.dtype, size: int) -> int:
    """Keys that a program holds at once, each of `size` elements."""
    if dtype == torch.float32:
        return 16
    return 64 if size <= WIDE else 32


def warps(size: int, shared: int = 1) -> int:
    """The factor of a program's warps at which no warp spills registers.

    It is 2 for heads longer than WIDE. It is 2 for heads longer than half of WIDE where their
    length, or the number of heads that share a KV head, is no power of two: masks and quotients
    take registers too.
    """
    is_even = size & (size - 1) == 0 and shared & (shared - 1) == 0
    return 2 if size > WIDE or (size > WIDE // 2 and not is_even) else 1


def rows_per_tile(shared: int, dtype: torch.dtype) -> int:
    """Tokens of a prefill tile where `shared` heads read the same keys."""
    return max(1, (TILE_ROWS_FLOAT32 if dtype == torch.float32 else TILE_ROWS) // shared)


def num_splits(rows: int, kv_heads: int, programs: int) -> int:
    """Splits of each job's keys that give `programs` programs; a power of two.

    The number depends on nothing that changes from step to step, so that a captured launch stays
    right. A job too short for it leaves splits empty.
    """
    ideal = programs // max(1, rows * kv_heads)
    return min(MAX_SPLITS, 1 << max(0, ideal.bit_length() - 1))


@cache
def num_programs(device: torch.device) -> int:
    """Multiprocessors of a GPU; few on the interpreter, whose programs run one after another."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
