"""Who wrote and who uses each place, in issue order: what an operation has to wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.journal import Journal
from engine.plan import COMPUTE_LANE, Copy, Lane, Op, Place


class Scoreboard:
    """Stamps of contents and use, and the operations behind them.

    An operation waits for the last writer of what it reads, for all users of what it writes (data)
    and for whoever has to end before the bytes it rests on are free (bytes). Lanes are
    first-in-first-out, so only operations on other lanes are named.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.open: dict[Op, None] = {}  # issued and not ended
        self.written: dict[Place, int] = {}
        self.used: dict[Place, int] = {}
        self.stamp = 0
        self._writers: dict[Place, Op] = {}  # the last one; stays when it has ended
        self._users: dict[Lane, dict[Place, Op]] = {}  # the last one of each lane
        self._givers: dict[Place, set[Op]] = {}
        self._journal = journal

    @property
    def has_one_lane(self) -> bool:
        """Whether nothing runs but launches of one lane."""
        return all([op.lane[1] == COMPUTE_LANE for op in self.open])

    def enter(self, place: Place) -> None:
        """A place begins, with nothing in it."""
        self.written[place], self.used[place] = 0, -1

    def rest(self, place: Place, givers: set[Op]) -> None:
        """A place rests on bytes that these operations still use."""
        self._givers.setdefault(place, set()).update(givers)

    def touch(self, op: Op, reads: Sequence[Place], writes: Sequence[Place]) -> tuple[Op, ...]:
        """Issues an operation; returns what it waits for."""
        lane, waits = op.lane, dict[Op, None]()
        copied = self.written[op.src] if isinstance(op, Copy) else None
        self.stamp += 1
        if self.open and any([other.lane != lane for other in self.open]):
            for place in reads:
                self._wait(
                    waits, lane, [self._writers[place]] if place in self._writers else (), place
                )
            for place in writes:
                users = [
                    u[place] for other, u in self._users.items() if other != lane and place in u
                ]
                self._wait(waits, lane, users, place)
        wrote = dict.fromkeys(writes, op)  # hashes each place once
        touched = {**dict.fromkeys(reads, op), **wrote} if reads else wrote
        self._users.setdefault(lane, {}).update(touched)
        self._writers.update(wrote)
        stamps = dict.fromkeys(touched, self.stamp)
        self.used.update(stamps)
        if reads or copied is not None:
            stamps = dict.fromkeys(wrote, self.stamp if copied is None else copied)
        self.written.update(stamps)
        self.open[op] = None
        if self._journal:
            self._journal.touched(op, (*reads, *writes))
        return tuple(waits)

    def _wait(self, waits: dict[Op, None], lane: Lane, ops: Iterable[Op], place: Place) -> None:
        for op in ops:
            if op.lane != lane and op in self.open:
                waits[op] = None
        if place in self._givers:
            givers = self._givers[place] = {op for op in self._givers[place] if op in self.open}
            waits.update((op, None) for op in self.open if op in givers and op.lane != lane)
            if not givers:
                del self._givers[place]

    def leave(self, place: Place) -> set[Op]:
        """A place ends; returns the operations that still use its bytes."""
        last = [users.pop(place, None) for users in self._users.values()]
        self._writers.pop(place, None)
        del self.written[place], self.used[place]
        return {op for op in (*last, *self._givers.pop(place, ())) if op in self.open}

    def settle(self, op: Op) -> None:
        """An operation has ended."""
        del self.open[op]
