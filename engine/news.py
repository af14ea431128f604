"""What wakes the loop: arrivals, ends, and moments that a policy has asked for."""

from __future__ import annotations

import simpy


class News:
    """One event at a time that everybody may tell and the loop waits for."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.next = env.event()
        self.will_come = False  # a policy's moment lies ahead

    def tell(self) -> None:
        """Something happened."""
        self.next.succeed()
        self.next = self._env.event()

    def wake_at(self, wake_ns: int) -> None:
        """Tells at that moment, if it is still to come."""
        delay_ns = wake_ns - int(self._env.now)
        if delay_ns > 0:
            self.will_come = True
            self._env.timeout(delay_ns).callbacks.append(lambda _: self.tell())
