"""Who wrote and who uses each place, in issue order: what an operation has to wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from engine.journal import Journal
from engine.plan import COMPUTE_LANE, Copy, Kind, Lane, Op, Place


Ranks = tuple[tuple[Place, int], ...]


class Stamps(Mapping[Place, int]):
    """A stamp for each place, to read; what a run touched last is entered when somebody looks."""

    def __init__(self, board: Scoreboard, found: Mapping[Place, int]) -> None:
        self._board, self._found = board, found

    def __getitem__(self, place: Place) -> int:
        self._board.catch_up()
        return self._found[place]

    def __iter__(self) -> Iterator[Place]:
        self._board.catch_up()
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def ranks(self) -> Ranks:
        """All places in the order of their coming, with what a stamp says beside its own value:
        which are older, equal or newer, and which (up to 0) stand for nothing at all."""
        self._board.catch_up()
        stamps = sorted({*self._found.values()})
        rank = {stamp: stamp if stamp <= 0 else number for number, stamp in enumerate(stamps, 1)}
        return tuple([(place, rank[stamp]) for place, stamp in self._found.items()])


class Scoreboard:
    """Stamps of contents and use, and the operations behind them.

    An operation waits for the last writer of what it reads, for all users of what it writes (data)
    and for whoever has to end before the bytes it rests on are free (bytes). Lanes are
    first-in-first-out, so only operations on other lanes are named.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.open: dict[Op, None] = {}  # issued and not ended
        self._numbers: dict[Op, int] = {}  # their order of issue
        self._lane_of: dict[Op, Lane] = {}  # theirs, too
        self._lanes: dict[Lane, int] = defaultdict(int)  # how many of them are on each lane
        self._written: dict[Place, int] = {}
        self._used: dict[Place, int] = {}
        self.written, self.used = Stamps(self, self._written), Stamps(self, self._used)
        self.stamp = 0
        self._late: tuple[Op, tuple[Place, ...], int] | None = None  # not entered yet
        self._writers: dict[Place, Op] = {}  # the last one; stays when it has ended
        self._users: dict[Lane, dict[Place, Op]] = {}  # the last one of each lane
        self._givers: dict[Place, set[Op]] = {}
        self._left: dict[Place, set[Op]] = {}  # places given back while in use, and by whom
        self._leaving: dict[Op, list[Place]] = {}  # the same by user
        self._journal = journal

    @property
    def has_one_lane(self) -> bool:
        """Whether nothing runs but launches of one lane."""
        return all([lane[1] == COMPUTE_LANE for lane in self._lanes])

    def enter(self, place: Place) -> None:
        """A place begins, with nothing in it. If it was given back while in use, whoever takes it
        waits for these users: model states have one storage for good."""
        self._written[place], self._used[place] = 0, -1
        if self._left and (users := self._left.pop(place, None)):
            self.rest(place, users)

    def rest(self, place: Place, givers: set[Op]) -> None:
        """A place rests on bytes that these operations still use."""
        self._givers.setdefault(place, set()).update(givers)

    def touch(self, op: Op, reads: Sequence[Place], writes: tuple[Place, ...]) -> tuple[Op, ...]:
        """Issues an operation; returns what it waits for."""
        lane = op.lane
        waits: dict[Op, None] = {}
        is_alone = all([other == lane for other in self._lanes])
        if is_alone and lane[1] == COMPUTE_LANE and not (reads or self._journal):
            self.touch_again(op, writes, 1)
            return ()
        self.catch_up()
        copied = self._written[op.src] if isinstance(op, Copy) else None
        self.stamp += 1
        if not is_alone:
            for place in reads:
                self._wait(
                    waits, lane, [self._writers[place]] if place in self._writers else (), place
                )
            for place in writes:
                users = [
                    u[place] for other, u in self._users.items() if other != lane and place in u
                ]
                self._wait(waits, lane, users, place)
        self._enter(op, reads, writes, self.stamp, self.stamp if copied is None else copied)
        self._start(op, lane)
        if self._journal:
            self._journal.touched(op, (*reads, *writes))
        return tuple(waits)

    def touch_again(self, op: Op, writes: tuple[Place, ...], steps: int) -> None:
        """Issues a launch that stands for so many, on the only lane that is busy.

        Its places are entered only if it is not followed by another that touches them, too.
        """
        assert self.has_one_lane and not self._journal, "a run waits for nobody and is not watched"
        self.stamp += steps
        if self._late is not None and writes[: len(self._late[1])] != self._late[1]:
            self.catch_up()
        self._late = (op, writes, self.stamp)
        self._start(op, op.lane)

    def _start(self, op: Op, lane: Lane) -> None:
        self.open[op], self._numbers[op], self._lane_of[op] = None, self.stamp, lane
        self._lanes[lane] += 1

    def catch_up(self) -> None:
        """Enters what the last run touched."""
        if self._late is not None:
            (op, writes, stamp), self._late = self._late, None
            self._enter(op, (), writes, stamp, stamp)

    def _enter(
        self, op: Op, reads: Sequence[Place], writes: Sequence[Place], stamp: int, contents: int
    ) -> None:
        wrote = dict.fromkeys(writes, op)  # hashes each place once
        touched = {**dict.fromkeys(reads, op), **wrote} if reads else wrote
        self._users.setdefault(op.lane, {}).update(touched)
        self._writers.update(wrote)
        self._used.update(dict.fromkeys(touched, stamp))
        self._written.update(dict.fromkeys(wrote, contents))

    def _wait(self, waits: dict[Op, None], lane: Lane, ops: Iterable[Op], place: Place) -> None:
        for op in ops:
            if self._lane_of.get(op, lane) != lane:
                waits[op] = None
        if place in self._givers:
            givers = self._givers[place] = {op for op in self._givers[place] if op in self.open}
            for op in sorted(givers, key=self._numbers.__getitem__):
                if self._lane_of[op] != lane:
                    waits[op] = None
            if not givers:
                del self._givers[place]

    def leave(self, place: Place) -> set[Op]:
        """A place ends; returns the operations that still use its bytes."""
        last = [users.pop(place, None) for users in self._users.values()]
        self._writers.pop(place, None)
        if self._late is not None and place in self._late[1]:
            op, writes, stamp = self._late
            last.append(op)
            i = writes.index(place)
            self._late = (op, writes[:i] + writes[i + 1 :], stamp)
        del self._written[place], self._used[place]
        users = self._last_of_each_lane((*last, *self._givers.pop(place, ())))
        if users and place.region.kind is not Kind.KV:
            self._left[place] = {*users}
            for op in users:
                self._leaving.setdefault(op, []).append(place)
        return users

    def _last_of_each_lane(self, ops: Iterable[Op | None]) -> set[Op]:
        """Of those that are open: when these have ended, all before them on their lanes have."""
        found: dict[Lane, Op] = {}
        for op in ops:
            if op is not None and (lane := self._lane_of.get(op)) is not None:
                other = found.get(lane)
                if other is None or self._numbers[other] < self._numbers[op]:
                    found[lane] = op
        return {*found.values()}

    def settle(self, op: Op) -> None:
        """An operation has ended."""
        lane = self._lane_of.pop(op)
        del self.open[op], self._numbers[op]
        self._lanes[lane] -= 1
        if not self._lanes[lane]:
            del self._lanes[lane]
        for place in self._leaving.pop(op, ()):
            if users := self._left.get(place):
                users.discard(op)
                if not users:
                    del self._left[place]
