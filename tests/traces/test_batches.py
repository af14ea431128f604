"""Packing against a plain reference, and which tokens a microbatch has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.support.strategies import cases
from traces.training.batches import PackedBatches, RandomBatches, pack

LONG = 1 << 20  # vocabulary: more than any id here


def packed_plainly(documents: list[list[int]], block_tokens: int) -> tuple[list[list[int]], int]:
    """Packs token by token; returns the full blocks and the count of the rest."""
    blocks: list[list[int]] = []
    block: list[int] = []
    for document in documents:
        for token in document:
            block.append(token)
            if len(block) == block_tokens:
                blocks.append(block)
                block = []
    return blocks, len(block)


@cases(200)
@given(
    documents=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), max_size=8),
    block_tokens=st.integers(1, 10),
)
def test_packing_is_the_plain_one(documents: list[list[int]], block_tokens: int) -> None:
    tokens = np.array(list(chain(*documents)), np.int32)
    blocks, rest = packed_plainly(documents, block_tokens)
    if not blocks:
        with pytest.raises(ValueError, match=f"the text has {rest} tokens in all"):
            pack(tokens, block_tokens)
        return
    found = pack(tokens, block_tokens)
    assert found.tolist() == blocks and len(tokens) - found.size == rest


def numbered(num_blocks: int, sequences: int, seed: int = 0) -> PackedBatches:
    """Blocks of two tokens that number their block n: 2n and 2n + 1."""
    blocks = np.arange(2 * num_blocks, dtype=np.int32).reshape(num_blocks, 2)
    return PackedBatches(blocks, sequences, LONG, seed)


def seen(batches: PackedBatches, microbatches: int) -> list[int]:
    """The blocks of the first microbatches, in order."""
    ids = np.concatenate([batches.ids(k) for k in range(microbatches)])
    assert (ids[:, 1] == ids[:, 0] + 1).all()
    return (ids[:, 0] // 2).tolist()


@cases(100)
@given(num_blocks=st.integers(1, 12), sequences=st.integers(1, 9), seed=st.integers(0, 5))
def test_each_epoch_has_every_block_once(num_blocks: int, sequences: int, seed: int) -> None:
    order = seen(numbered(num_blocks, sequences, seed), 4 * num_blocks // sequences + 1)
    for start in range(0, len(order) - num_blocks + 1, num_blocks):
        assert sorted(order[start : start + num_blocks]) == list(range(num_blocks))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = seen(numbered(50, 5), 40)
    epochs = [tuple(order[n : n + 50]) for n in range(0, 200, 50)]
    others = [tuple(seen(numbered(50, 5, seed), 10)) for seed in range(1, 5)]
    assert len({*epochs, *others, tuple(range(50))}) == 9


def test_a_microbatch_follows_from_its_number_alone() -> None:
    """In any order of calls, and for any number of sequences per microbatch."""
    batches, order = numbered(7, 3), seen(numbered(7, 1), 30)
    for microbatch in (9, 0, 4, 9, 2):
        expected = order[3 * microbatch : 3 * microbatch + 3]
        assert (batches.ids(microbatch)[:, 0] // 2).tolist() == expected


def test_the_order_is_that_of_other_processes() -> None:
    code = (
        "import numpy as np; from traces.training.batches import *;"
        "blocks = np.arange(40, dtype=np.int32).reshape(20, 2);"
        "print(PackedBatches(blocks, 4, 99, 3).ids(7).tolist());"
        "print(RandomBatches(5, 2, 99, 3).ids(7).tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }
    ours = PackedBatches(np.arange(40, dtype=np.int32).reshape(20, 2), 4, 99, 3).ids(7)
    random = RandomBatches(5, 2, 99, 3).ids(7)
    assert outputs == {f"{ours.tolist()}\n{random.tolist()}\n".encode()}


def test_shuffling_is_uniform_over_places() -> None:
    """Where block 0 comes in 2,000 epochs of 10 blocks: even, by chi-square at the 0.1 % level."""
    batches = numbered(10, 10)
    places = Counter(seen_once.index(0) for seen_once in _epochs(batches, 2000))
    assert stats.chisquare([places[n] for n in range(10)]).pvalue > 0.001


def _epochs(batches: PackedBatches, count: int) -> list[list[int]]:
    return [(batches.ids(k)[:, 0] // 2).tolist() for k in range(count)]


def test_ids_are_int64_and_below_the_vocabulary() -> None:
    batches = PackedBatches(np.array([[5, 12], [70, 3]], np.int32), 2, 10, rest_tokens=1)
    ids = batches.ids(0)
    assert ids.dtype == np.int64 and ids.shape == (2, 2)
    assert sorted(map(tuple, ids.tolist())) == [(0, 3), (5, 2)]
    assert batches.account() == {
        "tokens_read": 5,
        "tokens_used": 4,
        "tokens_dropped": 1,
        "tokens_beyond_vocabulary": 2,
    }


def test_random_tokens_are_even_over_the_vocabulary() -> None:
    batches = RandomBatches(500, 4, 25, seed=1)
    ids = np.stack([batches.ids(k) for k in range(20)])
    assert ids.dtype == np.int64 and ids.shape == (20, 4, 500)
    assert stats.chisquare(np.bincount(ids.ravel(), minlength=25)).pvalue > 0.001
    assert len({batch.tobytes() for batch in ids}) == 20 and batches.account() == {}
    assert not np.array_equal(RandomBatches(500, 4, 25, seed=2).ids(0), ids[0])
