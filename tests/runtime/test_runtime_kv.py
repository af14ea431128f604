"""KV arenas: budgets that hold, memory that comes and goes, and no compute on the host's tier."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.executor import Launch, Piece
from engine.contract.plan import Compute, Slice
from engine.contract.regions import PageSize, Tier, Work
from runtime.measure.meter import ProcessResidency
from runtime.serving.kv import Arena, DeviceOOM, WrongTier, copy_pages, paired_runs, runs
from runtime.serving.machine import GPU
from tests.support.hand_made import HOST, TINY, HandMade, make_prompts

WIDE = replace(TINY, num_layers=4, num_kv_heads=4, head_dim=32)  # pages of 64 KiB
ODD = replace(TINY, num_layers=3, num_kv_heads=1, head_dim=10)  # pages of 1920 bytes


def resident_bytes(arena: Arena) -> int:
    return ProcessResidency(arena.pages).read_bytes()


def test_resident_pages_are_the_held_pages() -> None:
    arena = Arena(WIDE, PageSize.of(WIDE, 16), 50)
    assert resident_bytes(arena) == 0
    arena.hold([3, 4, 5, 20, 49])
    assert resident_bytes(arena) == 5 * arena.page_nbytes
    arena.release([4, 49])
    assert resident_bytes(arena) == 3 * arena.page_nbytes
    arena.hold([3, 4])
    assert resident_bytes(arena) == 4 * arena.page_nbytes


def test_holding_changes_no_contents_and_releasing_touches_no_neighbour() -> None:
    arena = Arena(ODD, PageSize.of(ODD, 8), 40)  # pages share system pages
    arena.hold(range(40))
    arena.pages[:] = torch.arange(40.0).view(-1, 1, 1, 1, 1, 1)
    arena.hold([7, 8])
    gone = range(10, 20)
    arena.release(gone)
    assert resident_bytes(arena) < 40 * arena.page_nbytes
    for page in set(range(40)) - set(gone):
        assert arena.pages[page].eq(page).all()


def test_an_older_kernel_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serving.kv.POPULATE_WRITE", 9999)
    arena = Arena(WIDE, PageSize.of(WIDE, 16), 8)
    arena.hold([2])
    arena.pages[2] = 5.0
    arena.hold([2, 3])
    assert resident_bytes(arena) == 2 * arena.page_nbytes
    assert arena.pages[2].eq(5.0).all()


@pytest.mark.parametrize("page", [-1, 5, 500])
def test_a_page_beyond_the_budget_is_out_of_memory(page: int) -> None:
    arena = Arena(TINY, PageSize.of(TINY, 8), 5)
    for use in (arena.hold, arena.release, arena.check):
        with pytest.raises(DeviceOOM):
            use([0, page])


def test_a_launch_beyond_the_budget_is_out_of_memory() -> None:
    made = HandMade(TINY, make_prompts([30], TINY.vocab_size), num_pages=4)
    made.pages[7] = [0, 1, 2, 4]
    with pytest.raises(DeviceOOM, match="KV page 4 of gpu"):
        made.run((7, 30))


def test_compute_cannot_read_the_host_tier() -> None:
    arena = Arena(TINY, PageSize.of(TINY, 8), 5, Tier.HOST)
    with pytest.raises(WrongTier):
        arena.layer(0)
    with pytest.raises(WrongTier):
        arena.rows(0)


def test_a_tier_without_budget_has_no_pages() -> None:
    with pytest.raises(DeviceOOM):
        Arena(TINY, PageSize.of(TINY, 8), 0).hold([0])


def test_training_work_is_refused_in_words() -> None:
    made = HandMade(TINY, make_prompts([4], TINY.vocab_size))
    op = Compute((Slice(made.jobs[7], 4, Work.BACKWARD),))
    launch = Launch(op, pieces=(Piece(7, 4, 0, False, ()),))
    with pytest.raises(NotImplementedError, match="backward"):
        made.machine.prepare(launch)


pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=lambda p: p[1])


@given(pairs)
def test_runs_cover_every_page_once_and_in_order(moves: list[tuple[int, int]]) -> None:
    src, dst = [a for a, _ in moves], [b for _, b in moves]
    found = paired_runs(src, dst)
    assert [(a + i, b + i) for a, b, n in found for i in range(n)] == moves
    assert [first + i for first, n in runs(dst) for i in range(n)] == dst
    for (a, b, n), (c, d, _) in pairwise(found):
        assert (a + n, b + n) != (c, d)  # nothing was left apart that one memcpy could move


def test_copies_carry_pages_whole() -> None:
    made = HandMade(TINY, make_prompts([4], TINY.vocab_size))
    gpu, host = made.machine.arenas[GPU], made.machine.arenas[HOST]
    gpu.pages.normal_()
    src, dst = [4, 5, 6, 1, 9], [0, 1, 2, 3, 8]
    copy_pages(gpu, host, paired_runs(src, dst))
    assert host.pages[dst].equal(gpu.pages[src])
    assert host.pages[[4, 5, 6, 7]].isnan().all()
