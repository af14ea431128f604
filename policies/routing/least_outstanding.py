"""Requests to the replica with the least outstanding load."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.policy import Fleet

LOADS = ("requests", "tokens")


def check_load(name: str, load: str) -> None:
    """Checks what a router counts as load.

    Args:
        name: of the router, for the message.
        load: the name of a load.

    Raises:
        ValueError: `load` is not one of LOADS.
    """
    if load not in LOADS:
        raise ValueError(f"{name}: load is {load!r}, not one of {', '.join(LOADS)}")


def load_of(fleet: Fleet, replica: int, load: str) -> int:
    """The outstanding load of a replica.

    Args:
        fleet: the replicas.
        replica: the number of the replica.
        load: one of LOADS.

    Returns:
        Outstanding requests, or the tokens of these.
    """
    if load == "tokens":
        return fleet.outstanding_tokens(replica)
    return fleet.outstanding(replica)


def shortest_queue(fleet: Fleet, load: str) -> int:
    """The replica with the least load.

    Ties go to the replica with fewer requests so far, then to the lower number.

    Args:
        fleet: The replicas, with what was assigned to each.
        load: One of LOADS.

    Returns:
        The number of the replica.
    """
    return min(range(len(fleet)), key=lambda i: (load_of(fleet, i, load), fleet.assigned[i], i))


@dataclass(frozen=True)
class LeastOutstanding:
    """Join the shortest queue: the replica with the least outstanding load; see shortest_queue.

    Args:
        load: outstanding `requests`, or the `tokens` of these (which bounds their KV).

    Raises:
        ValueError: `load` is neither.
    """

    load: str = "requests"

    def __post_init__(self) -> None:
        check_load("least outstanding", self.load)

    def route(self, job: Job, fleet: Fleet) -> int:
        return shortest_queue(fleet, self.load)
