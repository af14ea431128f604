"""Distances of two numbers and of two samples, and the drift of a machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from analysis.run import Run

Floats = NDArray[np.float64]


def relative_error(prediction: float, measurement: float) -> float:
    """Signed: +0.05 is a prediction 5 % too high. For a measurement of 0: NaN, or 0 if both are."""
    if measurement == 0:
        return 0.0 if prediction == 0 else float("nan")
    return (prediction - measurement) / abs(measurement)


def ks(a: Floats, b: Floats) -> float:
    """Kolmogorov-Smirnov distance: the largest gap of the two distribution functions, 0 to 1."""
    if not len(a) or not len(b):
        return float("nan")
    at = np.concatenate([a, b])
    return float(np.abs(_cdf(a, at) - _cdf(b, at)).max())


def wasserstein(a: Floats, b: Floats) -> float:
    """Wasserstein-1 distance over the mean of b: the mean shift of mass, relative to b."""
    if not len(a) or not len(b) or b.mean() == 0:
        return float("nan")
    at = np.sort(np.concatenate([a, b]))
    area = (np.abs(_cdf(a, at[:-1]) - _cdf(b, at[:-1])) * np.diff(at)).sum()
    return float(area / abs(b.mean()))


def _cdf(values: Floats, at: Floats) -> Floats:
    return np.searchsorted(np.sort(values), at, side="right") / len(values)


STEADY = 0.03  # largest drift of a machine that counts as steady


def drift(run: Run) -> float | None:
    """Largest departure of the drift probes from 1 around a measured run; None without probes.

    A probe ratio is the time of a fixed piece of work after the run over its time before the run.
    """
    ratios = run.provenance.get("probe_ratios")
    values = list(ratios.values()) if isinstance(ratios, dict) else ratios
    if not values:
        return None
    return max(abs(float(value) - 1.0) for value in np.atleast_1d(values))
