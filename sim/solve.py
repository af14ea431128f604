"""Table values from sums: one weighted non-negative least squares for all tables at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sim.table import Nodes, Table

Array = NDArray[np.float64]
SMOOTHNESS = 0.03  # a kink as large as a whole launch weighs as much as an error of 3 % of one
ROUNDS = 4  # of reweighting
OUTLIER = 3.0  # errors beyond so many robust standard deviations lose weight


class Sample(NamedTuple):
    """One measured sum: (table, point) terms that should add up to `ns`."""

    terms: Sequence[tuple[str, tuple[int, ...]]]
    ns: float
    weight: float = 1.0


def solve(grids: Mapping[str, tuple[Nodes, ...]], samples: Sequence[Sample]) -> dict[str, Table]:
    """Values at all nodes, rising along every axis, that explain the samples best.

    Errors count relative to each sample's duration, so that short launches matter as much as long
    ones. Values are sums of non-negative increments. Where data leaves a node free, a light pull
    towards straight lines decides. Outliers lose weight (Huber, iterated).
    """
    start, sizes = {}, 0
    for name, axes in grids.items():
        start[name] = sizes
        sizes += int(np.prod([len(nodes) for nodes in axes]))
    design = _design(grids, start, sizes, samples)
    ns = np.array([sample.ns for sample in samples])
    bends, rises = _bends(grids, sizes, _scales(design, ns)), _rises(grids, sizes)
    relative = design / ns[:, None]
    weights = np.array([sample.weight for sample in samples])
    values = np.zeros(sizes)
    for _ in range(ROUNDS):
        rows = np.vstack([relative * weights[:, None], SMOOTHNESS * bends])
        target = np.concatenate([weights, np.zeros(len(bends))])
        values = rises @ _nonnegative(rows @ rises, target)
        weights = np.array([sample.weight for sample in samples]) * _trust(relative @ values - 1)
    return {
        name: Table(axes, tuple(values[start[name] :][: int(np.prod([len(n) for n in axes]))]))
        for name, axes in grids.items()
    }


def _design(
    grids: Mapping[str, tuple[Nodes, ...]],
    start: Mapping[str, int],
    size: int,
    samples: Sequence[Sample],
) -> Array:
    empty = {name: Table(axes, ()) for name, axes in grids.items()}
    design = np.zeros((len(samples), size))
    for row, sample in enumerate(samples):
        for name, point in sample.terms:
            for index, weight in empty[name].weights(point):
                design[row, start[name] + index] += weight
    return design


def _scales(design: Array, ns: Array) -> Array:
    """The typical duration of the launches that touch each node: the unit of its kinks."""
    share = design / np.maximum(design.sum(axis=1, keepdims=True), 1e-9)
    total = share.sum(axis=0)
    scales = np.exp(share.T @ np.log(ns) / np.maximum(total, 1e-9))
    scales[total == 0] = scales[total > 0].max()
    return np.asarray(scales)


def _bends(grids: Mapping[str, tuple[Nodes, ...]], size: int, scales: Array) -> Array:
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
                    rows.append(row / scales[here])
        offset += index.size
    rows.append(np.zeros(size))  # keeps the shape where no table has an inner node
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
    """Least squares over x >= 0, on the triangle that has the same answer, columns normed."""
    norms = np.linalg.norm(rows, axis=0)
    norms[norms == 0] = 1.0
    triangle: Any = np.linalg.qr(np.column_stack([rows / norms, target]), mode="r")
    solution, _ = nnls(triangle[:, :-1], triangle[:, -1], maxiter=50 * rows.shape[1])
    return np.asarray(solution / norms)


def _trust(errors: Array) -> Array:
    """Weights of Huber's kind on relative errors, by their robust spread."""
    spread = max(1.4826 * float(np.median(np.abs(errors))), 1e-3)
    return np.sqrt(np.minimum(1.0, OUTLIER * spread / np.maximum(np.abs(errors), 1e-12)))
