"""Requests to the replica that has the least to do."""

from __future__ import annotations

from dataclasses import dataclass

from engine.fleet import Fleet
from engine.job import Job
from policies.router import check_load, least_loaded


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
