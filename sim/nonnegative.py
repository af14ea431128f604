"""Least squares over x >= 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NOTHING = 1e-12  # of the largest gradient at zero: no column is worth taking in for less


def nonnegative(rows: Array, target: Array, most: int) -> Array:
    """The x >= 0 with least |rows x - target|, by scipy where it is installed: it takes a tenth of
    the time. RuntimeError if that is not found in `most` turns."""
    try:
        from scipy.optimize import nnls  # takes longer to import than a profile to read
    except ImportError:  # on a GPU machine that has no more than torch brings along
        return active_set(rows, target, most)
    solution: Any = nnls(rows, target, maxiter=most)[0]
    return np.asarray(solution)


def active_set(rows: Array, target: Array, most: int) -> Array:
    """The same by Lawson and Hanson's active set: columns come in by their gradient, the best of
    them first, and leave where the best fit of those inside would have them negative."""
    x, inside = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], dtype=bool)
    useless = inside.copy()  # came in and left at once: rounding alone made them look good
    least = NOTHING * float(np.abs(rows.T @ target).max(initial=0.0))
    for _ in range(most):
        gradient = np.where(inside | useless, -np.inf, rows.T @ (target - rows @ x))
        if (inside | useless).all() or gradient.max() <= least:
            return x
        newest = int(gradient.argmax())
        inside[newest] = True
        while (below := inside & ((best := _fit(rows, target, inside)) <= 0)).any():
            step = float((x[below] / (x[below] - best[below])).min())
            x += step * (best - x)
            inside &= x > NOTHING * float(x.max())
            x[~inside] = 0.0
        useless = np.zeros_like(inside) if inside[newest] else useless
        useless[newest] = not inside[newest]
        x = best
    raise RuntimeError(f"no nonnegative solution in {most} turns")


def _fit(rows: Array, target: Array, inside: NDArray[np.bool_]) -> Array:
    best = np.zeros(rows.shape[1])
    best[inside] = np.linalg.lstsq(rows[:, inside], target, rcond=None)[0]
    return best
