"""The inputs of a graph, without a GPU: buckets, padding, page tables, tiles."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.contract.executor import Piece
from engine.contract.regions import PageSize
from runtime.serving.kv import Arena
from runtime.serving.packing import RING, Column, Frame, Packer, bucket_for, buckets_of, ring_size
from runtime.serving.paged import ALIGNED, paged_of, table_of, tiles_of
from runtime.serving.sampling import Sampling, draws
from tests.support.hand_made import TINY

BUCKETS = buckets_of(6)


def packer(sampling: Sampling | None = None) -> Packer:
    """Three jobs whose prompts are known; pages of four tokens."""
    prompts = {i: list(range(10 * i, 10 * i + 9)) for i in (1, 2, 3)}
    arena = Arena(TINY, PageSize.of(TINY, 4), num_pages=20)
    return Packer(arena, prompts, sampling or Sampling(), shared=2, buckets=BUCKETS)


def test_buckets_are_powers_of_two_and_the_largest_that_was_asked_for() -> None:
    assert buckets_of(0) == () and buckets_of(1) == (1,)
    assert buckets_of(6) == (1, 2, 4, 6) and buckets_of(8) == (1, 2, 4, 8)
    assert [bucket_for(n, BUCKETS) for n in range(8)] == [None, 1, 2, 4, 4, 6, 6, None]
    assert bucket_for(1, ()) is None


def test_a_frame_holds_its_rows_and_empty_padding() -> None:
    made = packer()
    pieces = [Piece(1, 1, 8, True, [5, 2, 9]), Piece(2, 1, 8, True, [0, 1, 11])]
    first = made.frame(pieces)
    later = [Piece(1, 1, 9, True, [5, 2, 9]), Piece(2, 1, 9, True, [0, 1, 11])]
    frame = made.frame([*later, Piece(3, 1, 8, True, [7, 3, 12])])
    assert isinstance(first, Frame) and first.bucket == 2
    assert isinstance(frame, Frame) and frame.bucket == 4
    assert first.columns[Column.TOKEN].tolist() == [18, 28]
    assert first.columns[Column.TICKET].tolist() == [0, 1]
    columns = frame.columns.numpy()
    assert columns[Column.TOKEN].tolist() == [0, 0, 38, 0]
    # Two tokens are in flight; the third lies where the known ones are put.
    assert columns[Column.SOURCE].tolist() == [0, 1, RING + 2, RING + 3]
    assert columns[Column.POSITION].tolist() == [9, 9, 8, 0]
    assert columns[Column.LENGTH].tolist() == [10, 10, 9, 0]
    stride = TINY.num_layers * 4
    assert columns[Column.SLOT].tolist() == [9 * stride + 1, 11 * stride + 1, 12 * stride, -1]
    assert columns[Column.TICKET].tolist() == [2, 3, 4, ring_size(BUCKETS[-1]) - 1]
    assert frame.tables[:, :3].tolist() == [[5, 2, 9], [0, 1, 11], [7, 3, 12]]
    assert frame.tables.shape[1] == ALIGNED and not frame.tables[:, 3:].any()
    assert frame.sampled == frame.pieces


def test_draws_travel_as_bits() -> None:
    made = packer(Sampling(temperature=0.7, seed=3))
    frame = made.frame([Piece(i, 1, 8, True, [i, 4 + i, 8 + i]) for i in (1, 2, 3)])
    assert frame is not None
    found = frame.columns[Column.UNIFORM].view(torch.float64)
    assert found.tolist() == [*draws(3, [(1, 9), (2, 9), (3, 9)]), 0.0]


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(1, 2, 7, True, [0, 1, 2])],
        [Piece(1, 1, 4, False, [0, 1])],
        [Piece(i, 1, 3, True, [i]) for i in range(7)],
    ],
)
def test_slices_and_rows_without_a_token_and_large_batches_have_no_frame(
    pieces: list[Piece],
) -> None:
    made = packer()
    assert made.frame(pieces) is None and not made.transcripts


def test_one_upload_holds_the_places_of_all_rows() -> None:
    sent: list[np.ndarray] = []

    def send(array: np.ndarray) -> torch.Tensor:
        sent.append(array)
        return torch.from_numpy(array)

    tables = [np.array(t, dtype=np.int64) for t in ([3, 4, 5], [6], [7, 8])]
    paged = paged_of(tables, [(5, 6), (2, 0)], [7], 4, send)
    assert len(sent) == 1 and sent[0].dtype == np.int32
    assert paged.tables[:, :3].tolist() == [[3, 4, 5], [6, 0, 0], [7, 8, 0]]
    assert paged.spans.tolist() == [[0, 5, 6], [5, 7, 0]]
    assert paged.tiles.tolist() == [[0, 4], [0, 0], [1, 5]]
    assert paged.lengths.tolist() == [8] and paged.first_decode == 7
    decodes = paged_of(tables[:1], [], [9], 4, send)
    assert decodes.spans.shape == (0, 3) and decodes.tiles.shape == (0, 2)
    assert decodes.first_decode == 0 and table_of([]).shape == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_an_upload_lie_where_triton_compiles_for_once(seed: int) -> None:
    """Every part is aligned to 16 bytes, and every row holds a multiple of 16 numbers."""
    rng = random.Random(seed)
    slices = [(rng.randint(2, 99), rng.choice((0, 7))) for _ in range(rng.randint(0, 3))]
    contexts = [rng.randint(0, 900) for _ in range(rng.randint(0, 9))] or [1]
    tables = [range(rng.randint(1, 60)) for _ in (*slices, *contexts)]
    paged = paged_of(tables, slices, contexts, 4, torch.from_numpy)
    parts = (paged.tables, paged.tables[len(slices) :], paged.spans, paged.tiles, paged.lengths)
    assert all(part.data_ptr() % ALIGNED == 0 for part in parts if part.numel())
    assert paged.tables.stride(0) % ALIGNED == 0
    assert paged.lengths.tolist() == [context + 1 for context in contexts]
    assert [row[: len(t)] for row, t in zip(paged.tables.tolist(), tables, strict=True)] == [
        [*table] for table in tables
    ]


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_every_row_once_the_longest_first(seed: int) -> None:
    rng = random.Random(seed)
    ends = np.cumsum([rng.randint(1, 70) for _ in range(rng.randint(1, 6))])
    starts = [0, *ends[:-1]]
    spans = np.array([(a, b, rng.randint(0, 50)) for a, b in zip(starts, ends, strict=True)])
    rows = rng.choice((1, 3, 16))
    covered, keys = [], []
    for piece, first in tiles_of(spans, rows).tolist():
        start, end, past = spans[piece].tolist()
        last = min(first + rows, end)
        covered += range(first, last)
        keys.append(past + last - start)
    assert sorted(covered) == list(range(ends[-1])) and keys == sorted(keys, reverse=True)
