"""Requests to replicas in turn."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.policy import Fleet


@dataclass(frozen=True)
class RoundRobin:
    """Each request to the next replica, whatever the load of that replica."""

    def route(self, job: Job, fleet: Fleet) -> int:
        return sum(fleet.assigned) % len(fleet)
