"""Requests to the replica that was sent the longest prefix of their prompt."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine.contract.job import Job
from engine.contract.policy import Fleet
from policies.routing.least_outstanding import check_load, shortest_queue


@dataclass(frozen=True)
class PrefixAffinity:
    """The replica that last got the longest common chain of blocks, unless it is overloaded.

    With this request, a replica may have `load_bound` times the mean number of outstanding
    requests, rounded up (bounded loads: Mirrokni, Thorup, Zadimoghaddam, SODA'18). So a hot prefix
    spreads. Where the replica is overloaded, or none has seen the prompt, the least loaded replica
    takes the request.

    Args:
        load_bound: outstanding requests, as a multiple of their mean; at least 1.
        load: what decides between replicas without the prefix, `requests` or `tokens`.

    Raises:
        ValueError: `load_bound` is below 1, or `load` is neither.
    """

    load_bound: float = 1.5
    load: str = "requests"

    def __post_init__(self) -> None:
        check_load("prefix affinity", self.load)
        if not self.load_bound >= 1:
            raise ValueError(
                f"prefix affinity: load_bound is {self.load_bound}, must be at least 1"
            )

    def route(self, job: Job, fleet: Fleet) -> int:
        seen = fleet.last_with(job)
        return (
            shortest_queue(fleet, self.load) if seen is None or self._is_full(seen, fleet) else seen
        )

    def _is_full(self, replica: int, fleet: Fleet) -> bool:
        total = 1 + sum(fleet.outstanding(i) for i in range(len(fleet)))
        return fleet.outstanding(replica) + 1 > ceil(self.load_bound * total / len(fleet))
