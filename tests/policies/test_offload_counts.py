"""Evictions per step against closed forms and the table of the specification (section 8.1)."""

from __future__ import annotations

import pytest

from policies.training.demand_paging import DemandPaging
from policies.training.patrickstar import PatrickStar
from tests.support.offload import REUSING, equal_chunks, evictions, run
from traces.serving.request import TrainingJob

# L = 24 chunks, C of which fit: moves of forward, backward and update together.
SWEEPS = {
    4: {"opt": 60, "lru": 64, "fifo": 64},
    8: {"opt": 48, "lru": 56, "fifo": 56},
    12: {"opt": 36, "lru": 48, "fifo": 48},
    16: {"opt": 24, "lru": 40, "fifo": 48},
    20: {"opt": 12, "lru": 32, "fifo": 48},
}


def moves(memory: object, chunks: int, fit: int, *, has_update: bool, **how: int) -> int:
    """Evictions in the last step but one."""
    job = TrainingJob(0, 0, chunks, 8, num_steps=6, has_update=has_update, recipe=REUSING)
    found = run(memory, equal_chunks(chunks), job, gpu=10 * fit, host=10 * chunks, **how)  # type: ignore[arg-type]
    return evictions(found, 4)


@pytest.mark.broad(4)
@pytest.mark.parametrize("fit", SWEEPS)
@pytest.mark.parametrize("order", ["opt", "lru"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_palindrome_moves_twice_what_does_not_fit(fit: int, order: str, depth: int) -> None:
    memory = DemandPaging(order, updates="device", reuses_gradients=True)  # type: ignore[arg-type]
    assert moves(memory, 24, fit, has_update=False, depth=depth) == 2 * (24 - fit)


@pytest.mark.broad(3)
@pytest.mark.parametrize(("fit", "expected"), [(8, 32), (12, 24), (16, 24), (20, 24)])
def test_fifo_is_as_good_only_while_half_or_less_fits(fit: int, expected: int) -> None:
    memory = DemandPaging("fifo", updates="device", reuses_gradients=True)
    assert moves(memory, 24, fit, has_update=False) == expected


@pytest.mark.broad(6)
@pytest.mark.parametrize("fit", SWEEPS)
@pytest.mark.parametrize("order", ["opt", "lru", "fifo"])
@pytest.mark.parametrize("tasks", [1, 0])
def test_three_sweeps_move_what_the_specification_says(fit: int, order: str, tasks: int) -> None:
    memory = DemandPaging(order, updates="device", reuses_gradients=True)  # type: ignore[arg-type]
    assert moves(memory, 24, fit, has_update=True, tasks=tasks) == SWEEPS[fit][order]


@pytest.mark.broad(4)
@pytest.mark.parametrize("fit", SWEEPS)
def test_patrickstar_is_belady_where_nothing_else_takes_memory(fit: int) -> None:
    """Its future is what warm-up has recorded, opt's is derived from the chain: the same moves."""
    memory = PatrickStar(warmup_share=1.0, updates="device", reuses_gradients=True)
    assert moves(memory, 24, fit, has_update=True) == SWEEPS[fit]["opt"]
    assert moves(memory, 24, fit, has_update=False) == 2 * (24 - fit)


def test_another_length_and_capacity() -> None:
    for order in ("opt", "lru"):
        memory = DemandPaging(order, updates="device", reuses_gradients=True)  # type: ignore[arg-type]
        assert moves(memory, 7, 3, has_update=False) == 2 * (7 - 3)
