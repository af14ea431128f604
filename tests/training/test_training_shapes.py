"""The calibration grid of training: shapes that separate rows from pairs, none too big."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.measure.shapes import (
    SHORTEST,
    TrainingLimits,
    training_grid,
    training_holdout,
)

LIMITS = st.builds(TrainingLimits, st.integers(SHORTEST, 4096), st.integers(2 * SHORTEST, 8192))


@given(LIMITS)
def test_all_shapes_fit_and_none_is_measured_twice(limits: TrainingLimits) -> None:
    found = training_grid(limits)
    assert len(set(found)) == len(found)
    assert all(limits.admit(shape) for shape in found)
    reached = max(shape.rows for shape in found)
    assert reached > limits.rows / 2, "as large as will ever be trained, but for part of a sequence"


@given(LIMITS, st.integers(0, 3))
def test_held_out_shapes_are_between_and_not_in_the_grid(limits: TrainingLimits, seed: int) -> None:
    found = training_holdout(limits, seed)
    assert not set(found) & set(training_grid(limits))
    assert all(limits.admit(shape) for shape in found)
    assert found == training_holdout(limits, seed)


def test_equal_rows_come_in_several_lengths() -> None:
    """Else a layer's attention could not be separated from its products."""
    lengths = defaultdict(set)
    for shape in training_grid(TrainingLimits(1024, 4096)):
        lengths[shape.rows].add(shape.tokens)
    assert [rows for rows in sorted(lengths) if rows >= 256] == [256, 512, 1024, 2048, 4096]
    assert all(len(found) >= 2 for rows, found in lengths.items() if rows >= 64)
    assert len(training_grid(TrainingLimits(1024, 4096))) <= 24


def test_limits_without_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="no microbatch of 16 tokens or more fits 8 positions"):
        training_grid(TrainingLimits(8, 512))
