"""Warm-up of the kernels: every variant that launches need is compiled beforehand."""

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
    """Runs the first layer over rows of no job, in each way of attending.

    The rows read and write no page of a job. A kernel takes some tenths of a second to compile,
    which inside a replay would be part of a span.

    Args:
        decoder: The model's layers.
        arena: The KV pages of the device.
        shared: Heads that share a KV head.
        device: torch's name of the device.
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
    """The launches of a warm-up, as slices (tokens, past) and a number of decodes.

    They are one prompt, and decodes for every possible number of splits.
    """
    yield [(2, 0)], 0
    splits, rows = 2, 1
    while splits > 1:
        splits = num_splits(rows, kv_heads, WAVES * programs)
        yield [], rows
        rows *= 2
