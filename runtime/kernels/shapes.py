"""Block sizes of the kernels: one place, so that a GPU session can tune them."""

from __future__ import annotations

from functools import cache

import torch

STAGES = 3  # of a decode's loop: page ids, keys and values, sums
WAVES = 4  # programs per multiprocessor that a decode aims at: two run at once, two follow
# Of a prefill program, tokens times heads that share a KV head. float32 is multiplied without
# tensor cores: larger tiles spill registers.
TILE_ROWS, TILE_ROWS_FLOAT32 = 64, 16


def keys_per_turn(dtype: torch.dtype) -> int:
    """Keys that a program holds at once."""
    return 16 if dtype == torch.float32 else 64


def rows_per_tile(shared: int, dtype: torch.dtype) -> int:
    """Tokens of a prefill tile where so many heads read the same keys."""
    return max(1, (TILE_ROWS_FLOAT32 if dtype == torch.float32 else TILE_ROWS) // shared)


@cache
def num_programs(device: torch.device) -> int:
    """Multiprocessors of a GPU; few on the interpreter, whose programs run one after another."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
