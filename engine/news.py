"""What wakes the loop: arrivals, ends, and moments that a policy has asked for."""

from __future__ import annotations

from collections.abc import Callable

import simpy


class News:
    """One event at a time that everybody may tell and the loop waits for.

    `at_a_moment` is called where a moment comes that a policy has asked for.
    """

    def __init__(self, env: simpy.Environment, at_a_moment: Callable[[], None]) -> None:
        self._env, self._at_a_moment = env, at_a_moment
        self._moments_ns: set[int] = set()  # that lie ahead
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
        """Tells at that moment, if it is still to come."""
        delay_ns = wake_ns - int(self._env.now)
        if delay_ns > 0 and wake_ns not in self._moments_ns:
            self._moments_ns.add(wake_ns)
            self._env.timeout(delay_ns).callbacks.append(lambda _: self._wake(wake_ns))

    def _wake(self, wake_ns: int) -> None:
        self._moments_ns.discard(wake_ns)
        self._at_a_moment()
        self.tell()
