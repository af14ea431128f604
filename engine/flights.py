"""What is in flight: plans by device, operations by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.executor import Launch
from engine.plan import COMPUTE_LANE, Compute, Op


class Flight(NamedTuple):
    """An operation on its way: its plan (of all, and of its device), and when it was issued."""

    step: int
    device: int
    number: int
    issue_ns: int
    host_ns: int  # of the whole plan, on its first operation
    launch: Launch


class Flights:
    """Numbers plans as they are issued and counts those whose last Compute has not ended."""

    def __init__(self, devices: int) -> None:
        self.steps = 0  # plans issued
        self.issued = [0] * devices  # the same per device
        self.level = [0] * devices  # plans in flight per device: the run-ahead
        self._tails: dict[Op, None] = {}  # the last Compute of each plan in flight
        self._flights: dict[Op, Flight] = {}

    @property
    def tails(self) -> tuple[Op, ...]:
        """What ends the plans in flight, in issue order."""
        return tuple(self._tails)

    def number(self, device: int, count: int = 1) -> tuple[int, int]:
        """Numbers plans that are being issued: the first one's, of all and of its device."""
        step, number = self.steps, self.issued[device]
        self.steps += count
        self.issued[device] += count
        return step, number

    def last_compute(self, ops: Iterable[Op], device: int) -> None:
        """The plan of these operations is in flight until its last launch ends."""
        tail = None
        for op in ops:
            if isinstance(op, Compute) and op.on == COMPUTE_LANE:
                tail = op
        if tail is not None:
            self.level[device] += 1
            self._tails[tail] = None

    def start(self, flight: Flight) -> None:
        """An operation is on its way."""
        self._flights[flight.launch.op] = flight

    def pop(self, op: Op) -> Flight:
        """An operation has ended; what was known of it."""
        return self._flights.pop(op)

    def land(self, op: Op) -> None:
        """An operation has ended, and with its last one a plan."""
        if op in self._tails:
            del self._tails[op]
            self.level[op.lane[0]] -= 1
