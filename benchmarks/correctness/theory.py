"""Claim: waits in the engine follow M/D/1 and Little's law.

One job a step, deterministic service, Poisson arrivals, the real engine over the virtual executor:
20,000 requests per run at loads of 0.3, 0.6 and 0.8, ten seeds each. The wait of every request
must equal Lindley's recursion to the nanosecond. The sum over steps of jobs times duration must
equal the sum of stays (Little's law as an identity of the rows). The mean wait over the seeds must
lie within 4.8 standard errors of load / (2 (1 - load)): the seeds are independent runs, so their
mean has a t distribution with nine degrees of freedom, beyond 4.8 with a probability of 0.1 %. The
first tenth of each run, which starts from an empty queue, is left out. Each standard error must
stay below 5 % of the wait, so that a wrong law would show: exponential service would double it.
"""

from __future__ import annotations

import sys

import numpy as np

from tests.support.queueing import (
    SERVICE_NS,
    Estimate,
    Queue,
    lindley_ns,
    md1_wait,
    poisson_ns,
    run_queue,
)

LOADS, REQUESTS, SEEDS = (0.3, 0.6, 0.8), 20_000, 10
BAR, ERROR_BAR = 4.8, 0.05


def broken_identities(queue: Queue) -> int:
    """The number of waits unlike Lindley's, plus one if Little's identity fails."""
    waits = queue.finish_ns - queue.arrival_ns - SERVICE_NS
    wrong = int((waits != lindley_ns(queue.arrival_ns, SERVICE_NS)).sum())
    stays = int((queue.finish_ns - queue.scheduled_ns).sum())
    return wrong + (int((queue.step_jobs * queue.step_ns).sum()) != stays)


def measure(load: float, count: int, seeds: int) -> tuple[Estimate, int]:
    """Mean wait in service times over seeds, and broken identities."""
    means, broken = [], 0
    for seed in range(seeds):
        queue = run_queue(poisson_ns(load, count, seed + round(1000 * load)))
        waits = (queue.finish_ns - queue.arrival_ns - SERVICE_NS) / SERVICE_NS
        means.append(waits[count // 10 :].mean())
        broken += broken_identities(queue)
    return Estimate(float(np.mean(means)), float(np.std(means, ddof=1) / seeds**0.5)), broken


def main() -> int:
    count, seeds = (5000, 10) if "--quick" in sys.argv[1:] else (REQUESTS, SEEDS)
    worst, broken, widest = 0.0, 0, 0.0
    for load in LOADS:
        estimate, wrong = measure(load, count, seeds)
        theory = md1_wait(load)
        print(
            f"load {load}: mean wait {estimate.mean:.4f} services, theory {theory:.4f}, "
            f"error {estimate.error:.4f}, {estimate.deviation(theory):.2f} standard errors off, "
            f"{wrong} broken identities"
        )
        worst, broken = max(worst, estimate.deviation(theory)), broken + wrong
        widest = max(widest, estimate.error / theory)
    passed = worst <= BAR and not broken and widest <= ERROR_BAR
    print(f"theory_worst_deviation {worst:.3g} SE {BAR:g} {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
