"""Memory on its way back, in issue order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.contract import BrokenLaw
from engine.plan import Op


@dataclass(slots=True, eq=False)
class Owed:
    """Bytes on their way back, and the operations that still use them."""

    nbytes: int
    users: set[Op]


class ReturnQueue:
    """The bytes of a pool that nobody holds, oldest first; some still have a last user running.

    Taken from the head only, so who takes which bytes depends on the order of issue and never on
    when a copy ended. `free_bytes` is the head whose users have all ended, `coming_bytes` the rest;
    `busy_bytes` of these are still used, the others only wait for those before them.
    """

    def __init__(self, nbytes: int) -> None:
        self.free_bytes = nbytes
        self.coming_bytes = self.busy_bytes = 0
        self._entries: deque[Owed] = deque()
        self.waiting: dict[Op, list[Owed]] = defaultdict(list)  # by user

    @property
    def room_bytes(self) -> int:
        return self.free_bytes + self.coming_bytes

    def give(self, nbytes: int, users: Iterable[Op]) -> Owed:
        """Adds bytes that are free once their users have ended."""
        owed = Owed(nbytes, set(users))
        self._entries.append(owed)
        for op in owed.users:
            self.waiting[op].append(owed)
        self.coming_bytes += nbytes
        if owed.users:
            self.busy_bytes += nbytes
        else:
            self._advance()
        return owed

    def reclaim(self, owed: Owed, nbytes: int) -> set[Op]:
        """Takes bytes back whose contents are still wanted: nobody has to end first, unless they
        have been taken for something else and others must do."""
        part = min(owed.nbytes, nbytes)
        owed.nbytes -= part
        self.coming_bytes -= part
        if owed.users:
            self.busy_bytes -= part
        return self.take(nbytes - part)

    def take(self, nbytes: int) -> set[Op]:
        """Removes bytes from the head; returns the operations that have to end first."""
        if nbytes <= self.free_bytes:
            self.free_bytes -= nbytes
            return set()
        if nbytes > self.room_bytes:
            raise BrokenLaw("law 3: bytes are taken that are not there: check before you take")
        now, self.free_bytes = self.free_bytes, 0
        givers: set[Op] = set()
        while now < nbytes:
            owed = self._entries[0]
            part = min(owed.nbytes, nbytes - now)
            owed.nbytes -= part
            if not owed.nbytes:
                self._entries.popleft()
            givers |= owed.users
            now += part
            self.coming_bytes -= part
            if owed.users:
                self.busy_bytes -= part
        self._advance()
        return givers

    def settle(self, op: Op) -> None:
        """An operation has ended: what waited only for it becomes free, in order."""
        for owed in self.waiting.pop(op, ()):
            owed.users.discard(op)
            if not owed.users:
                self.busy_bytes -= owed.nbytes
        self._advance()

    def _advance(self) -> None:
        while self._entries and not self._entries[0].users:
            owed = self._entries.popleft()
            self.coming_bytes -= owed.nbytes
            self.free_bytes += owed.nbytes
            owed.nbytes = 0  # free bytes are nobody's
