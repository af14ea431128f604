"""Every variant of the kernels that launches will meet, compiled beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from runtime.kernels.shapes import WAVES, num_programs, num_splits, rows_per_tile
from runtime.serving.kv import Arena
from runtime.serving.model import Decoder
from runtime.serving.paged import AttentionRows, Scratch, paged_of


def warm_up(decoder: Decoder, arena: Arena, shared: int, device: str) -> None:
    """Runs the first layer over rows that are nobody's, in each way of attending.

    They read no key of anybody's and write none. A kernel takes some tenths of a second to compile:
    inside a replay that would be a span's time. `shared`: heads that share a KV head.
    """
    tile_rows = rows_per_tile(shared, arena.pages.dtype)

    def send(index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(device)

    for slices, decodes in rehearsals(arena.pages.shape[-2], num_programs(torch.device(device))):
        count = sum(tokens for tokens, _ in slices) + decodes
        tables = [[0]] * (len(slices) + decodes)
        paged = paged_of(tables, slices, [-1] * decodes, tile_rows, send)
        nowhere = torch.full((count,), -1, dtype=torch.int64, device=device)
        rows = AttentionRows(arena, nowhere, (), (), (), Scratch(), paged)
        zeros = torch.zeros((1, count), dtype=torch.int64, device=device)
        hidden = decoder.embed(zeros, zeros)
        decoder.layer(0, hidden, decoder.angles(hidden, zeros), rows)


def rehearsals(kv_heads: int, programs: int) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """Slices (tokens, past) and the number of decodes of a launch each: a prompt, and decodes for
    every number of splits that there is."""
    yield [(2, 0)], 0
    splits, rows = 2, 1
    while splits > 1:
        splits = num_splits(rows, kv_heads, WAVES * programs)
        yield [], rows
        rows *= 2
