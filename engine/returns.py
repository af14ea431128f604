"""Memory on its way back, in issue order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.plan import Op


class ReturnQueue:
    """The bytes of a pool that nobody holds, oldest first; some still have a last user running.

    Taken from the head only, so who takes which bytes depends on the order of issue and never on
    when a copy ended. `free_bytes` is the head whose users have all ended, `coming_bytes` the rest.
    """

    def __init__(self, nbytes: int) -> None:
        self.free_bytes = nbytes
        self.coming_bytes = 0
        self._entries: deque[tuple[int, set[Op]]] = deque()

    @property
    def room_bytes(self) -> int:
        return self.free_bytes + self.coming_bytes

    def give(self, nbytes: int, users: Iterable[Op]) -> None:
        """Adds bytes that are free once their users have ended."""
        self._entries.append((nbytes, set(users)))
        self.coming_bytes += nbytes
        self._advance()

    def take(self, nbytes: int) -> set[Op]:
        """Removes bytes from the head; returns the operations that have to end first."""
        assert nbytes <= self.room_bytes, "check before you take"
        now = min(nbytes, self.free_bytes)
        self.free_bytes -= now
        givers: set[Op] = set()
        while now < nbytes:
            held, users = self._entries.popleft()
            part = min(held, nbytes - now)
            if part < held:
                self._entries.appendleft((held - part, users))
            givers |= users
            now += part
            self.coming_bytes -= part
        self._advance()
        return givers

    def settle(self, op: Op) -> None:
        """An operation has ended: what waited only for it becomes free, in order."""
        for _, users in self._entries:
            users.discard(op)
        self._advance()

    def _advance(self) -> None:
        while self._entries and not self._entries[0][1]:
            nbytes, _ = self._entries.popleft()
            self.coming_bytes -= nbytes
            self.free_bytes += nbytes
