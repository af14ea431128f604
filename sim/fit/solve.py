"""Table values from sums: one weighted non-negative least squares for all tables at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.cost.piecewise import Nodes, Table

Array = NDArray[np.float64]
NOTHING = 1e-12  # of the largest gradient at zero: no column is worth taking in for less


def nonnegative(rows: Array, target: Array, most: int) -> Array:
    """The x >= 0 with least |rows x - target|, by scipy where it is installed: ten times as fast.

    RuntimeError if no solution is found in `most` turns.
    """
    try:
        from scipy.optimize import nnls  # takes longer to import than a profile to read
    except ImportError:  # a GPU machine may have nothing beside torch's own dependencies
        return active_set(rows, target, most)
    solution: Any = nnls(rows, target, maxiter=most)[0]
    return np.asarray(solution)


def active_set(rows: Array, target: Array, most: int) -> Array:
    """Non-negative least squares by Lawson and Hanson's active set.

    The column with the best gradient enters; columns leave that the best fit of the set would make
    negative.
    """
    x, inside = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], dtype=bool)
    useless = inside.copy()  # entered and left at once: rounding alone made them look good
    threshold = NOTHING * float(np.abs(rows.T @ target).max(initial=0.0))
    for _ in range(most):
        gradient = np.where(inside | useless, -np.inf, rows.T @ (target - rows @ x))
        if (inside | useless).all() or gradient.max() <= threshold:
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


SMOOTHNESS = 1.0  # a kink that changes a launch by 3 % weighs as one launch that is 3 % off: about
# the noise of a measured launch, and what tables bend by between nodes this near each other
MODESTY = 1.0  # the pull to zero of a constant that two tables could hold, in that unit
ROUNDS = 4  # of reweighting
OUTLIER = 3.0  # errors beyond so many robust standard deviations lose weight


class Observation(NamedTuple):
    """One measured sum: (table, point) terms that should add up to `ns`."""

    terms: Sequence[tuple[str, tuple[int, ...]]]
    ns: float
    weight: float = 1.0


def solve(
    grids: Mapping[str, tuple[Nodes, ...]], samples: Sequence[Observation]
) -> dict[str, Table]:
    """Values at all nodes, rising along every axis, that explain the samples best.

    Errors count relative to each sample's duration, so that short launches matter as much as long
    ones. Values are sums of non-negative increments. Where data leaves a node free, light pulls
    decide: towards straight lines, and for constants towards tables that all samples touch.
    Outliers lose weight (Huber, iterated).
    """
    start, sizes = {}, 0
    for name, axes in grids.items():
        start[name] = sizes
        sizes += int(np.prod([len(nodes) for nodes in axes]))
    design = _design(grids, start, sizes, samples)
    ns, given = (np.array([getattr(s, name) for s in samples]) for name in ("ns", "weight"))
    rises = _rises(grids, sizes)
    prior = _prior(grids, start, design, ns)
    expected, weights = ns, given
    for _ in range(ROUNDS):
        # Errors are relative to the expected duration: noise in ns would bias the fit down.
        scale = weights / expected
        rows = np.vstack([design * scale[:, None], prior])
        target = np.concatenate([ns * scale, np.zeros(len(prior))])
        values = rises @ _nonnegative(rows @ rises, target)
        expected = np.maximum(design @ values, 0.1 * ns)
        weights = given * _trust(ns / expected - 1)
    return {
        name: Table(axes, tuple(values[start[name] :][: int(np.prod([len(n) for n in axes]))]))
        for name, axes in grids.items()
    }


def _design(
    grids: Mapping[str, tuple[Nodes, ...]],
    start: Mapping[str, int],
    size: int,
    samples: Sequence[Observation],
) -> Array:
    empty = {name: Table(axes, ()) for name, axes in grids.items()}
    design = np.zeros((len(samples), size))
    for row, sample in enumerate(samples):
        for name, point in sample.terms:
            for index, weight in empty[name].weights(point):
                design[row, start[name] + index] += weight
    return design


def _prior(
    grids: Mapping[str, tuple[Nodes, ...]], start: Mapping[str, int], design: Array, ns: Array
) -> Array:
    """Rows that should come out as zero: kinks, and constants in the wrong table."""
    leverages = _leverages(design / ns[:, None])
    bends = SMOOTHNESS * _bends(grids, design.shape[1], leverages)
    pulls = MODESTY * _pulls(grids, start, design) * leverages
    return np.vstack([bends, pulls])


def _leverages(relative: Array) -> Array:
    """The relative change that 1 ns at a node makes in a typical launch that touches it."""
    touched = (relative > 0).sum(axis=0)
    leverages = np.sqrt((relative**2).sum(axis=0) / np.maximum(touched, 1))
    leverages[touched == 0] = leverages[touched > 0].min()
    return np.asarray(leverages)


def _bends(grids: Mapping[str, tuple[Nodes, ...]], size: int, leverages: Array) -> Array:
    """One row per inner node and axis: its distance from the line between its neighbours."""
    rows, offset = [], 0
    for axes in grids.values():
        shape = [len(nodes) for nodes in axes]
        index = np.arange(int(np.prod(shape))).reshape(shape) + offset
        for axis, nodes in enumerate(axes):
            lanes = np.moveaxis(index, axis, 0).reshape(len(nodes), -1)
            for i in range(1, len(nodes) - 1):
                part = (nodes[i] - nodes[i - 1]) / (nodes[i + 1] - nodes[i - 1])
                for low, here, high in zip(*lanes[i - 1 : i + 2], strict=True):
                    row = np.zeros(size)
                    row[[low, here, high]] = [1 - part, -1.0, part]
                    rows.append(row * leverages[here])
        offset += index.size
    rows.append(np.zeros(size))  # keeps the shape where no table has an inner node
    return np.array(rows)


def _pulls(
    grids: Mapping[str, tuple[Nodes, ...]], start: Mapping[str, int], design: Array
) -> Array:
    """One row per table that not every sample touches, for its first value.

    A cost that every launch has belongs to a table that every launch touches. Where all launches
    sample, chance alone would otherwise put that cost in the head's table, and a launch without
    sampled rows would be priced without it.
    """
    rows, size = [np.zeros(design.shape[1])], design.shape[1]
    for name, axes in grids.items():
        end = start[name] + int(np.prod([len(nodes) for nodes in axes]))
        if not design[:, start[name] : end].any(axis=1).all():
            rows.append(np.eye(1, size, start[name])[0])
    return np.array(rows)


def _rises(grids: Mapping[str, tuple[Nodes, ...]], size: int) -> Array:
    """Turns increments into values: block by block, sums along every axis."""
    blocks, offset = np.zeros((size, size)), 0
    for axes in grids.values():
        block: Array = np.ones((1, 1))
        for nodes in axes:
            block = np.asarray(np.kron(block, np.tril(np.ones((len(nodes), len(nodes))))))
        end = offset + len(block)
        blocks[offset:end, offset:end] = block
        offset = end
    return blocks


def _nonnegative(rows: Array, target: Array) -> Array:
    """Least squares over x >= 0, on the triangle of a QR decomposition, columns normed."""
    norms = np.linalg.norm(rows, axis=0)
    norms[norms == 0] = 1.0
    triangle: Any = np.linalg.qr(np.column_stack([rows / norms, target]), mode="r")
    solution = nonnegative(triangle[:, :-1], triangle[:, -1], 50 * rows.shape[1])
    return np.asarray(solution / norms)


def _trust(errors: Array) -> Array:
    """Weights of Huber's kind on relative errors, by their robust spread."""
    spread = max(1.4826 * float(np.median(np.abs(errors))), 1e-3)
    return np.sqrt(np.minimum(1.0, OUTLIER * spread / np.maximum(np.abs(errors), 1e-12)))
