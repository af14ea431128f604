"""Queueing theory holds for the real engine: Lindley and Little exactly, M/D/1 within its error."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.queueing import (
    SERVICE_NS,
    batch_means,
    jobs_integral_ns,
    lindley_ns,
    md1_wait,
    poisson_ns,
    run_queue,
)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_wait_follows_lindleys_recursion_to_the_nanosecond(depth: int) -> None:
    arrivals = poisson_ns(0.8, 600, seed=1)
    queue = run_queue(arrivals, depth)
    waits = queue.finish_ns - queue.arrival_ns - SERVICE_NS
    assert (queue.arrival_ns == arrivals).all()
    assert (waits == lindley_ns(arrivals, SERVICE_NS)).all()
    assert (waits > 0).any()


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("load", "count"),
    [(0.3, 2500), (0.6, 2500), pytest.param(0.8, 12_000, marks=pytest.mark.slow)],
)
def test_mean_wait_is_that_of_m_d_1(load: float, count: int) -> None:
    """Within its own error, over 20 batch means. benchmarks/correctness/theory.py has more requests
    and seeds.

    The queue forgets within about 1 / (1 - sqrt(load))^2 services (relaxation time of M/G/1): 5,
    20 and 90 here. The batches span 375, 187 and 670 services, so their means are nearly
    independent: a t distribution with 19 degrees of freedom, beyond 3.88 with a chance of 0.1 %.
    The error itself must be small: with exponential service the wait would be twice as long.
    """
    queue = run_queue(poisson_ns(load, count, seed=7))
    waits = (queue.finish_ns - queue.arrival_ns - SERVICE_NS) / SERVICE_NS
    estimate = batch_means(waits)
    assert estimate.deviation(md1_wait(load)) <= 3.88
    assert estimate.error <= 0.1 * md1_wait(load)


def test_littles_law_is_an_identity_of_the_recorded_rows() -> None:
    """Over a run that starts and ends empty, the integral of jobs in service is the sum of stays.

    The integral comes from the steps (a job in service is in every step, and there is no step
    without one), the stays from the requests: two ways through the recorder, equal to the
    nanosecond.
    """
    arrivals = poisson_ns(0.6, 500, seed=5)
    queue = run_queue(arrivals, max_jobs=8, output_tokens=4)
    assert queue.step_jobs.max() > 2
    stays = queue.finish_ns - queue.scheduled_ns
    in_steps = int((queue.step_jobs * queue.step_ns).sum())
    assert in_steps == stays.sum() == jobs_integral_ns(queue.scheduled_ns, queue.finish_ns)


def test_littles_law_holds_for_the_rate_that_was_asked_for() -> None:
    """L = lambda W with lambda the nominal rate: off only by how many requests really came.

    The number of Poisson arrivals in a time has a relative standard deviation of 1/sqrt(n), so
    four of them bound the ratio.
    """
    load, count = 0.6, 2000
    queue = run_queue(poisson_ns(load, count, seed=11), max_jobs=4, output_tokens=1)
    last = int(queue.arrival_ns[-1])
    present = jobs_integral_ns(queue.arrival_ns, queue.finish_ns) / last
    stay_ns = float((queue.finish_ns - queue.arrival_ns).mean())
    nominal = load / SERVICE_NS * stay_ns
    assert present / nominal == pytest.approx(1.0, abs=4 / count**0.5)


def test_arrivals_see_time_averages() -> None:
    """PASTA: Poisson arrivals find as many jobs present as there are on average over time."""
    queue = run_queue(poisson_ns(0.6, 2000, seed=13))
    finished = np.searchsorted(np.sort(queue.finish_ns), queue.arrival_ns, side="right")
    found = np.arange(len(queue.arrival_ns)) - finished
    present = jobs_integral_ns(queue.arrival_ns, queue.finish_ns) / int(queue.finish_ns[-1])
    assert batch_means(found).deviation(present) <= 3.88
