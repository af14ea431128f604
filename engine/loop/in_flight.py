"""What is in flight, and what wakes the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import simpy

from engine.contract.executor import Launch
from engine.contract.plan import COMPUTE_LANE, Compute, Op


class Wakeup:
    """One event at a time, which the loop waits for and every part of the engine may trigger.

    `at_a_moment` is called at each moment that a policy has asked for.
    """

    def __init__(self, env: simpy.Environment, at_a_moment: Callable[[], None]) -> None:
        self._env, self._at_a_moment = env, at_a_moment
        self._moments_ns: set[int] = set()  # moments that lie ahead
        self.next = env.event()

    @property
    def will_come(self) -> bool:
        """Whether a policy's moment lies ahead."""
        return bool(self._moments_ns)

    def tell(self) -> None:
        """Something happened."""
        self.next.succeed()
        self.next = self._env.event()

    def wake_at(self, wake_ns: int) -> None:
        """Triggers the event at that moment, if it is still to come."""
        delay_ns = wake_ns - int(self._env.now)
        if delay_ns > 0 and wake_ns not in self._moments_ns:
            self._moments_ns.add(wake_ns)
            self._env.timeout(delay_ns).callbacks.append(lambda _: self._wake(wake_ns))

    def _wake(self, wake_ns: int) -> None:
        self._moments_ns.discard(wake_ns)
        self._at_a_moment()
        self.tell()


class IssuedOp(NamedTuple):
    """An operation in flight: its plan (of all, and of its device), and when it was issued."""

    step: int
    device: int
    number: int
    issue_ns: int
    host_ns: int  # of the whole plan, on its first operation
    launch: Launch


class InFlight:
    """Numbers plans as they are issued and counts those whose last Compute has not ended."""

    def __init__(self, devices: int) -> None:
        self.steps = 0  # plans issued
        self.issued = [0] * devices  # plans issued per device
        self.level = [0] * devices  # plans in flight per device: the run-ahead
        self._tails: dict[Op, None] = {}  # the last Compute of each plan in flight
        self._issued_ops: dict[Op, IssuedOp] = {}

    @property
    def tails(self) -> tuple[Op, ...]:
        """The last Compute of each plan in flight, in issue order."""
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

    def start(self, issued: IssuedOp) -> None:
        """An operation is in flight."""
        self._issued_ops[issued.launch.op] = issued

    def pop(self, op: Op) -> IssuedOp:
        """An operation has ended; returns what was known of it."""
        return self._issued_ops.pop(op)

    def land(self, op: Op) -> None:
        """An operation has ended; its plan ends with its last Compute."""
        if op in self._tails:
            del self._tails[op]
            self.level[op.lane[0]] -= 1
