"""Claim: the arrival processes have their stated distributions, over 200 seeds.

Per process: mean rate within 0.5 %, mean coefficient of variation (CV) of the gaps within .005,
mean gap and CV of every seed inside 4 standard errors, and a Kolmogorov-Smirnov test of the gaps
that rejects at the 1 % level in at most 3 % of seeds.

Why 20,000 arrivals per seed: the standard error of a mean gap is c / sqrt(n) of it and that of a
gamma's sample CV is c * sqrt((1 + c^2) / 2n) (delta method, third and fourth moments of the gamma).
At the widest process here (burstiness 1/2, c = 1.41) the means over 200 seeds have standard errors
of 0.07 % and .00087: the bars are 7 and 5.8 of these, so chance does not break them, and a process
off by 1 % would miss them. Under a true null the KS test rejects 2 of 200 seeds on average, and
more than 6 with probability 0.4 %. Burstiness below 1/2 is left out: at 1/4, 0.7 % of the gaps are
under a nanosecond, and times are integer nanoseconds.
"""

from __future__ import annotations

import sys

import numpy as np
from scipy import stats

from traces.serving.arrivals import Arrivals, Gamma, Poisson

SEEDS, ARRIVALS, RATE = 200, 20_000, 5.0
LEVEL = 0.01
PROCESSES: dict[str, tuple[float, Arrivals]] = {
    "poisson": (1.0, Poisson(rate=RATE)),
    "gamma_0.5": (0.5, Gamma(rate=RATE, burstiness=0.5)),
    "gamma_4": (4.0, Gamma(rate=RATE, burstiness=4.0)),
}

Row = tuple[str, float, str, float]  # name, value, unit, bar


def measure(name: str, burstiness: float, process: Arrivals) -> list[Row]:
    """The five figures of one process, each with its bar."""
    times_s = np.stack([process.times_ns(ARRIVALS, seed) for seed in range(SEEDS)]) / 1e9
    gaps_s = np.diff(times_s, axis=1, prepend=0.0)  # [seeds, arrivals]
    cv = 1 / np.sqrt(burstiness)
    mean_s, cvs = gaps_s.mean(axis=1), gaps_s.std(axis=1) / gaps_s.mean(axis=1)
    mean_se = cv / np.sqrt(ARRIVALS) / RATE
    cv_se = cv * np.sqrt((1 + cv**2) / (2 * ARRIVALS))
    law = stats.gamma(burstiness, scale=1 / (RATE * burstiness)).cdf
    rejected = np.mean([stats.kstest(gaps, law).pvalue < LEVEL for gaps in gaps_s])
    return [
        (f"{name}_rate_error", abs((1 / mean_s).mean() / RATE - 1) * 100, "%", 0.5),
        (f"{name}_cv_error", abs(cvs.mean() - cv), "1", 0.005),
        (f"{name}_worst_mean_gap", np.max(np.abs(mean_s - 1 / RATE)) / mean_se, "SE", 4.0),
        (f"{name}_worst_cv", np.max(np.abs(cvs - cv)) / cv_se, "SE", 4.0),
        (f"{name}_ks_rejected", rejected * 100, "%", 3.0),
    ]


def line(row: Row) -> str:
    """`name value unit bar verdict`."""
    name, value, unit, bar = row
    return f"arrivals_{name} {value:.4g} {unit} {bar:g} {'pass' if value <= bar else 'fail'}"


def main() -> int:
    rows = [row for name, given in PROCESSES.items() for row in measure(name, *given)]
    worst = max(rows, key=lambda row: row[1] / row[3])
    for row in rows:
        print(line(row))
    print(line(worst))
    return int(worst[1] > worst[3])


if __name__ == "__main__":
    sys.exit(main())
