"""Least squares over x >= 0, with scipy and without."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy.optimize import nnls

from sim.fit.solve import active_set, nonnegative


@pytest.mark.parametrize("seed", range(30))
def test_without_scipy_the_fit_is_as_good(seed: int) -> None:
    """Also with equal columns, with none that help, and with columns far apart in size."""
    draw = np.random.default_rng(seed)
    count, columns = int(draw.integers(3, 60)), int(draw.integers(1, 40))
    rows = draw.normal(size=(count, columns)) * 10.0 ** draw.integers(-2, 3, columns)
    if seed % 3 == 0:
        rows[:, columns // 2] = rows[:, 0]
    target = rows @ np.maximum(draw.normal(size=columns), 0) + draw.normal(size=count) * (seed % 2)
    target = -np.abs(rows).sum(1) if seed % 10 == 9 else target
    found = active_set(rows, target, 50 * columns + 50)
    expected, residual = nnls(rows, target)
    assert (found >= 0).all()
    assert np.linalg.norm(rows @ found - target) <= residual + 1e-9 * np.linalg.norm(target)
    if seed % 3:
        np.testing.assert_allclose(rows @ found, rows @ expected, atol=1e-7 * np.abs(target).max())


def test_scipy_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, target = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), np.array([3.0, 1.0, 1.0])
    expected = nonnegative(rows, target, 100)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert nonnegative(rows, target, 100) == pytest.approx(expected) == [1, 1]
