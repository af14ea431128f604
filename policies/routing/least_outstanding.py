"""Requests to the replica that has the least to do."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.policy import Fleet

LOADS = ("requests", "tokens")


def check_load(name: str, load: str) -> None:
    """ValueError for a load that nobody counts."""
    if load not in LOADS:
        raise ValueError(f"{name}: load is {load!r}, not one of {', '.join(LOADS)}")


def load_of(fleet: Fleet, replica: int, load: str) -> int:
    """Outstanding requests of a replica, or their tokens."""
    if load == "tokens":
        return fleet.outstanding_tokens(replica)
    return fleet.outstanding(replica)


def least_loaded(fleet: Fleet, load: str) -> int:
    """At a tie who was given fewer requests so far, then the lower number."""
    return min(range(len(fleet)), key=lambda i: (load_of(fleet, i, load), fleet.assigned[i], i))


@dataclass(frozen=True)
class LeastOutstanding:
    """The replica with the fewest outstanding `requests`, or with the fewest `tokens` of them.

    Joining the shortest queue (with tokens, the least KV). Ties: see least_loaded.
    """

    load: str = "requests"

    def __post_init__(self) -> None:
        check_load("least outstanding", self.load)

    def route(self, job: Job, fleet: Fleet) -> int:
        return least_loaded(fleet, self.load)
