"""Intervals of a difference between two policies: over seeds, and over blocks of one run.

Runs of different seeds are independent, so Student's t holds for their means. Neighbours in a
queue are not independent: within one run whole blocks of consecutive requests are drawn
(stationary bootstrap, Politis and Romano 1994). The mean length of a block follows from the
autocorrelations (Politis and White 2004, as corrected by Patton, Politis and White 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, lgamma, log, log1p, log10, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Statistic = Callable[[Floats], float]

LEVEL = 0.95
DRAWS, LEAST_DRAWS = 1000, 200
LEAST_BLOCKS = 30  # with fewer a bootstrap is too narrow: no interval
MOST_DRAWN = 20_000_000  # numbers in all draws of a bootstrap; beyond it there are fewer draws
FRACTION = 1e-15  # to which the continued fraction of the incomplete beta function is evaluated


@dataclass(frozen=True)
class Interval:
    """A difference with its confidence interval; NaN ends where there is none."""

    value: float
    low: float = float("nan")
    high: float = float("nan")
    method: str = "none"

    @property
    def is_known(self) -> bool:
        """Whether there is an interval."""
        return self.low == self.low and self.high == self.high

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval shows a difference."""
        return self.is_known and (self.low > 0 or self.high < 0)


# ---- Student's t
def t_cdf(t: float, freedom: float) -> float:
    """Distribution function of Student's t, also for degrees of freedom that are no integer."""
    tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


def t_quantile(share: float, freedom: float) -> float:
    """The value that Student's t stays below with a probability. ValueError outside (0, 1)."""
    if not 0 < share < 1 or not freedom > 0:
        raise ValueError(f"no quantile {share:g} of Student's t with {freedom:g} degrees")
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < share:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised, by the continued fraction of Numerical Recipes (section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation; no denominator is 0 for the arguments used here."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / (1 + even * d), 1 + even / c
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / (1 + odd * d), 1 + odd / c
        value *= d * c
        if abs(d * c - 1) < FRACTION:
            break
    return value


def over_pairs(differences: Floats, level: float = LEVEL) -> Interval:
    """The mean of independent differences, one per seed; no interval for a single one."""
    count, mean = len(differences), float(np.mean(differences))
    if count < 2:
        return Interval(mean)
    half = t_quantile((1 + level) / 2, count - 1) * float(np.std(differences, ddof=1))
    half /= sqrt(count)
    return Interval(mean, mean - half, mean + half, f"Student's t over {count} paired seeds")


def over_groups(a: Floats, b: Floats, level: float = LEVEL) -> Interval:
    """Mean of b - mean of a, of independent values of two groups: Welch's interval."""
    mean = float(np.mean(b) - np.mean(a))
    if min(len(a), len(b)) < 2:
        return Interval(mean)
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    squared = sum(parts)
    method = f"Welch's t over {len(a)} and {len(b)} seeds"
    if squared == 0:
        return Interval(mean, mean, mean, method)
    weights = [part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True)]
    half = t_quantile((1 + level) / 2, squared**2 / sum(weights)) * sqrt(squared)
    return Interval(mean, mean - half, mean + half, method)


# ---- blocks of one run
def block_length(values: Floats) -> float:
    """Mean length of a block of the stationary bootstrap, at least 1.

    Politis and White (2004) with the correction of 2009: n^(1/3) times a constant that the
    autocovariances give, up to twice the lag beyond which autocorrelations look like noise.
    """
    count = len(values)
    if count < 4 or np.ptp(values) == 0:
        return 1.0
    centred = values - values.mean()
    run = max(5, ceil(sqrt(log10(count))))
    lags = min(count - 1, ceil(sqrt(count)) + run)
    covariances = np.array([centred[: count - k] @ centred[k:] for k in range(lags + 1)]) / count
    is_noise = np.abs(covariances[1:] / covariances[0]) < 2 * sqrt(log10(count) / count)
    last = next((m for m in range(len(is_noise) - run + 1) if is_noise[m : m + run].all()), None)
    if last is None:  # no run of noise: up to the last lag that is none
        found = np.flatnonzero(~is_noise)
        last = int(found[-1]) + 1 if len(found) else 1
    reach = min(2 * max(1, last), lags)
    at = np.arange(1, reach + 1)
    window = np.clip(2 * (1 - at / reach), 0, 1)  # flat to one half, then down to 0
    weighted = window * covariances[1 : reach + 1]
    slope, variance = 2 * float(weighted @ at), covariances[0] + 2 * float(weighted.sum())
    if variance <= 0 or slope == 0:
        return 1.0
    best = (slope**2 / variance**2) ** (1 / 3) * count ** (1 / 3)
    return float(min(max(1.0, best), ceil(min(3 * sqrt(count), count / 3))))


def block_indices(count: int, length: float, rng: np.random.Generator) -> Ints:
    """One draw of the stationary bootstrap: blocks of a geometric length, around the end."""
    begins = rng.random(count) < 1 / length
    begins[0] = True
    at = np.flatnonzero(begins)
    starts = rng.integers(0, count, len(at))
    own = np.cumsum(begins) - 1
    found: Ints = (starts[own] + np.arange(count) - at[own]) % count
    return found


def over_blocks(
    a: Floats, b: Floats, statistics: Sequence[Statistic], seed: int = 0, level: float = LEVEL
) -> list[Interval]:
    """statistic(b) - statistic(a) of paired values in order of time, and its interval.

    Fewer than LEAST_BLOCKS blocks give no interval. The percentile interval is widened about the
    median of the draws as Student's t with one degree less than there are blocks is wider than
    the normal distribution.

    Args:
        a: values of the first run, in the order of arrival.
        b: values of the second run for the same requests.
        statistics: figures of values, such as their mean; all are of the same draws.
        seed: of the draws; equal input gives equal intervals.
        level: probability that the interval is to have.

    Returns:
        The difference of each statistic with its interval.
    """
    values = [float(of(b) - of(a)) for of in statistics]
    count = len(a)
    if count and np.array_equal(a, b):
        return [Interval(value, value, value, "equal values") for value in values]
    length = block_length(b - a)
    blocks = count / length
    if blocks < LEAST_BLOCKS:
        return [Interval(value) for value in values]
    rng = np.random.default_rng(seed)
    draws = int(min(DRAWS, max(LEAST_DRAWS, MOST_DRAWN // count)))
    drawn = np.empty((draws, len(statistics)))
    for row in drawn:
        at = block_indices(count, length, rng)
        one, two = a[at], b[at]
        row[:] = [of(two) - of(one) for of in statistics]
    upper = (1 + level) / 2
    low, middle, high = np.quantile(drawn, (1 - upper, 0.5, upper), axis=0)
    wider = t_quantile(upper, blocks - 1) / NormalDist().inv_cdf(upper)
    low, high = middle - wider * (middle - low), middle + wider * (high - middle)
    method = f"blocks of {length:.3g} requests, {draws} draws"
    rows = zip(values, low.tolist(), high.tolist(), strict=True)
    return [Interval(*row, method) for row in rows]
