"""Intervals against published quantiles, closed forms and counted coverage."""

from __future__ import annotations

import tracemalloc
from math import sqrt

import numpy as np
import pytest
from scipy import stats

from analysis.ab.intervals import (
    block_indices,
    block_length,
    over_blocks,
    over_groups,
    over_pairs,
    t_cdf,
    t_quantile,
)


def mean(values: np.ndarray) -> float:
    return float(np.mean(values))


# Student (1908) as every handbook prints it, such as NIST's (section 1.3.6.7.2): three decimals.
PUBLISHED = {
    **{(0.975, 1): 12.706, (0.975, 2): 4.303, (0.975, 5): 2.571, (0.975, 10): 2.228},
    **{(0.975, 30): 2.042, (0.975, 100): 1.984, (0.95, 4): 2.132, (0.995, 9): 3.250},
    **{(0.9, 3): 1.638, (0.999, 20): 3.552},
}


@pytest.mark.parametrize(("of", "value"), PUBLISHED.items())
def test_quantiles_are_those_of_published_tables(of: tuple[float, int], value: float) -> None:
    assert t_quantile(*of) == pytest.approx(value, abs=6e-4)  # they are rounded or cut
    assert t_quantile(1 - of[0], of[1]) == pytest.approx(-value, abs=6e-4)


@pytest.mark.parametrize("freedom", [1.5, 3.7, 18.2, 1e4])
def test_quantiles_between_integers_are_those_of_scipy(freedom: float) -> None:
    for share in (0.01, 0.4, 0.6, 0.975):
        assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-8)
    assert t_cdf(0.0, freedom) == pytest.approx(0.5)


def test_a_share_outside_of_one_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(1.0, 4)


def test_paired_and_unpaired_intervals_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 7), rng.normal(1.5, 3, 11)
    paired = stats.ttest_rel(b[:7], a).confidence_interval()
    found = over_pairs(b[:7] - a)
    assert (found.low, found.high) == pytest.approx((paired.low, paired.high))
    welch = stats.ttest_ind(b, a, equal_var=False).confidence_interval()
    found = over_groups(a, b)
    assert (found.low, found.high) == pytest.approx((welch.low, welch.high))


def test_one_value_a_side_has_no_interval() -> None:
    for found in (over_pairs(np.array([2.0])), over_groups(np.array([1.0]), np.array([3.0, 4.0]))):
        assert not found.is_known and not found.excludes_zero
    assert over_groups(np.array([1.0]), np.array([3.0, 4.0])).value == 2.5


def test_equal_values_give_zero_and_exclude_nothing() -> None:
    values = np.random.default_rng(1).exponential(size=50)
    for found in (
        over_pairs(values - values),
        over_groups(np.full(4, 2.0), np.full(5, 2.0)),
        over_blocks(values, values, [mean])[0],
    ):
        assert (found.value, found.low, found.high) == (0, 0, 0) and not found.excludes_zero


def test_draws_are_equal_for_equal_input() -> None:
    a, b = np.random.default_rng(2).normal(size=(2, 80))
    assert over_blocks(a, b, [mean]) == over_blocks(a, b, [mean])
    assert over_blocks(a, b, [mean]) != over_blocks(a, b, [mean], seed=1)


def test_blocks_are_consecutive_and_as_long_as_they_should_be() -> None:
    rng, breaks, count = np.random.default_rng(3), 0, 20_000
    at = block_indices(count, 25.0, rng)
    assert at.min() >= 0 and at.max() < count
    breaks = int((np.diff(at) % count != 1).sum())
    # Each place begins a block with a probability of 1/25: 4 standard errors of 800 breaks.
    assert abs(breaks - count / 25) < 4 * sqrt(count / 25)


def series(phi: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """AR(1) from its stationary distribution."""
    noise = rng.normal(size=count)
    out = np.empty(count)
    out[0] = noise[0] / sqrt(1 - phi**2)
    for i in range(1, count):
        out[i] = phi * out[i - 1] + noise[i]
    return out


def test_block_lengths_follow_the_closed_form_of_ar1() -> None:
    """Politis and White (2004): (2 g^2 / D)^(1/3) n^(1/3), with D = 2 s^4, s^2 the long-run
    variance and g the sum of |k| R(k); for AR(1) g / s^2 is 2 phi / (1 - phi^2).
    """
    rng, count, phi = np.random.default_rng(4), 4000, 0.7
    theory = (2 * phi / (1 - phi**2)) ** (2 / 3) * count ** (1 / 3)
    found = float(np.median([block_length(series(phi, count, rng)) for _ in range(30)]))
    assert found == pytest.approx(theory, rel=0.25)  # the estimate of a lag window
    assert np.median([block_length(rng.normal(size=count)) for _ in range(30)]) < theory / 4


TRIALS, COUNT = 150, 2000  # some 60 blocks of AR(1) with 0.8


def coverage(phi: float, seed: int) -> tuple[float, float]:
    """How often 0, the true mean, lies in the interval over blocks, and in that of single draws."""
    rng, hits = np.random.default_rng(seed), np.zeros(2)
    for trial in range(TRIALS):
        values = series(phi, COUNT, rng)
        hits[0] += not over_blocks(np.zeros(COUNT), values, [mean], trial)[0].excludes_zero
        drawn = values[rng.integers(0, COUNT, (500, COUNT))].mean(axis=1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        hits[1] += low <= 0 <= high
    return float(hits[0] / TRIALS), float(hits[1] / TRIALS)


@pytest.mark.slow
def test_independent_values_are_covered_as_often_as_is_said() -> None:
    blocks, single = coverage(0.0, 5)
    # 95 % of 150: a binomial standard error of 1.8 %; four of them, and 1 % for so short a series.
    assert abs(blocks - 0.95) < 0.082 and abs(single - 0.95) < 0.082


@pytest.mark.ci
def test_blocks_cover_dependent_values_better_than_single_draws() -> None:
    blocks, single = coverage(0.8, 6)
    # The mean's variance is (1 + phi) / (1 - phi) = 9 times that of independent values, so single
    # draws cover 2 Phi(1.96 / 3) - 1 = 49 %. Blocks of so short a series miss some per cent.
    assert abs(single - 0.49) < 0.16 and blocks > 0.82


def test_few_blocks_give_no_interval() -> None:
    """30 blocks are the least: 25 independent values have none, and neither has a slow series."""
    rng = np.random.default_rng(8)
    few, many = rng.normal(size=25), rng.normal(size=400)
    slow = series(0.98, 400, rng)
    for values, is_known in ((few, False), (many, True), (slow, False)):
        (found,) = over_blocks(np.zeros(len(values)), values, [mean])
        assert found.is_known is is_known and found.value == pytest.approx(values.mean())


def test_few_blocks_widen_the_interval_as_students_t_does() -> None:
    rng = np.random.default_rng(9)
    values = rng.normal(size=100)
    (found,) = over_blocks(np.zeros(100), values, [mean])
    length = block_length(values)
    draws = np.random.default_rng(0)
    drawn = [mean(values[block_indices(100, length, draws)]) for _ in range(1000)]
    plain = np.ptp(np.quantile(drawn, (0.025, 0.975)))
    wider = stats.t.ppf(0.975, 100 / length - 1) / stats.norm.ppf(0.975)
    assert (found.high - found.low) / plain == pytest.approx(wider) and wider > 1.01


def test_all_statistics_are_of_one_set_of_draws() -> None:
    a, b = np.random.default_rng(10).normal(size=(2, 200))
    both = over_blocks(a, b, [mean, lambda values: 2 * mean(values)])
    assert both[1].low == pytest.approx(2 * both[0].low)
    assert over_blocks(a, b, [mean]) == both[:1]


def test_many_requests_are_drawn_in_little_memory() -> None:
    a, b = np.random.default_rng(11).normal(size=(2, 100_000))
    tracemalloc.start()
    over_blocks(a, b, [mean])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # a draw holds some eight columns of 0.8 MB; 200 draws at once hold 160 MB


def test_percentiles_are_paired_as_means_are() -> None:
    a = np.random.default_rng(7).exponential(size=300)
    (found,) = over_blocks(a, a + 0.5, [lambda values: float(np.percentile(values, 90))])
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.5, 0.5)) and found.excludes_zero
