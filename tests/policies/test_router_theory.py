"""Routers against queueing theory: exact for equal jobs, between known bounds for others."""

from __future__ import annotations

import numpy as np
import pytest

from engine.contract.policy import Router
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin
from tests.support.queueing import (
    SERVICE_NS,
    TOKEN_NS,
    Estimate,
    Queue,
    Times,
    batch_means,
    central_queue_ns,
    enm1_wait,
    md1_wait,
    mdn_wait,
    mmn_wait,
    own_lines_ns,
    poisson_ns,
    run_queue,
)

REPLICAS, LOAD = 4, 0.8
SURE = 3.88  # standard errors: a t distribution with 19 degrees of freedom, beyond with 0.1 %


def test_the_formulas_agree_where_they_meet() -> None:
    """Crommelin's series with one server is Pollaczek-Khinchine's; Erlang's with one is M/M/1's."""
    for load in (0.3, 0.6, 0.9):
        assert mdn_wait(load, 1) == pytest.approx(md1_wait(load), rel=1e-9)
        assert mmn_wait(load, 1) == pytest.approx(load / (1 - load), rel=1e-9)
        assert enm1_wait(load, 1) == pytest.approx(load / (1 - load), rel=1e-6)


@pytest.mark.parametrize("router", [RoundRobin(), LeastOutstanding()])
@pytest.mark.parametrize("replicas", [2, 5])
def test_equal_jobs_wait_as_in_one_central_line_to_the_nanosecond(
    replicas: int, router: Router
) -> None:
    """With constant services a central line is served in turn: round robin loses nothing.

    Nor does least outstanding, which then equals round robin. Requests leave in the order they
    came, so those outstanding are the last few of the turn. The replica next in turn has the
    fewest; at a tie it was given the fewest so far.
    """
    arrivals = poisson_ns(LOAD * replicas, 600, seed=3)
    queue = run_queue(arrivals, replicas=replicas, router=router)
    waits = queue.finish_ns - queue.arrival_ns - SERVICE_NS
    assert (queue.device == np.arange(len(arrivals)) % replicas).all()
    assert (waits == central_queue_ns(arrivals, replicas, SERVICE_NS)).all()
    assert (waits > 0).any()


@pytest.mark.parametrize("router", [RoundRobin(), LeastOutstanding()])
def test_unequal_jobs_wait_as_in_lines_of_their_own_to_the_nanosecond(router: Router) -> None:
    arrivals, prompts = unequal_jobs(600)
    queue = run_queue(arrivals, 1, 1, 1, REPLICAS, router, prompts)
    services = prompts * TOKEN_NS
    waits = queue.finish_ns - queue.arrival_ns - services
    joins_shortest = isinstance(router, LeastOutstanding)
    assert (waits == own_lines_ns(arrivals, services, REPLICAS, joins_shortest)).all()
    assert (waits > 0).any()


def unequal_jobs(count: int) -> tuple[Times, Times]:
    """Arrivals, and geometric prompts of mean 1,000 tokens: services are exponential to 0.1 %."""
    arrivals, mean = poisson_ns(LOAD * REPLICAS, count, seed=11), SERVICE_NS // TOKEN_NS
    return arrivals, np.random.default_rng(5).geometric(1 / mean, count)


@pytest.mark.slow
def test_the_mean_wait_of_equal_jobs_is_that_of_m_d_n_below_separate_lines() -> None:
    """Within its own error of Crommelin's M/D/N, and below N times M/D/1 (dispatch by chance).

    20 batch means of 630 arrivals, 157 services of each replica; a line before one server forgets
    within 1 / (1 - sqrt(0.8))^2 = 90 services, one before four sooner.
    """
    arrivals = poisson_ns(LOAD * REPLICAS, 14_000, seed=7)
    least = waits_of(run_queue(arrivals, replicas=REPLICAS, router=LeastOutstanding()))
    assert least.deviation(mdn_wait(LOAD, REPLICAS)) <= SURE
    assert least.mean + SURE * least.error <= md1_wait(LOAD)
    assert least.error <= 0.1 * md1_wait(LOAD)


@pytest.mark.slow
def test_least_outstanding_beats_round_robin_where_jobs_differ() -> None:
    """M/M/N <= joining the shortest line < round robin, which is E_N/M/1, < N times M/M/1.

    Joining the shortest line is the best of all dispatches that know the numbers only
    (Winston 1977).
    """
    arrivals, prompts = unequal_jobs(10_000)
    in_turn = waits_of(run_queue(arrivals, 1, 1, 1, REPLICAS, RoundRobin(), prompts), prompts)
    least = waits_of(run_queue(arrivals, 1, 1, 1, REPLICAS, LeastOutstanding(), prompts), prompts)
    assert in_turn.deviation(enm1_wait(LOAD, REPLICAS)) <= SURE
    assert mmn_wait(LOAD, REPLICAS) - SURE * least.error <= least.mean
    assert least.mean + SURE * least.error <= enm1_wait(LOAD, REPLICAS) < LOAD / (1 - LOAD)


def waits_of(queue: Queue, prompts: Times | None = None) -> Estimate:
    """Mean wait in (mean) service times."""
    service = SERVICE_NS if prompts is None else prompts * TOKEN_NS
    return batch_means((queue.finish_ns - queue.arrival_ns - service) / SERVICE_NS)
