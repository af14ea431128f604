"""The writers and users of each place, in issue order: what an operation has to wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from engine.contract.plan import COMPUTE_LANE, Copy, Lane, Op
from engine.contract.regions import Kind, Place


@dataclass(slots=True, eq=False)
class Life:
    """Bytes from the moment they were booked to the moment they were given back.

    Of KV also its `pages`: a shared page has several lives at a time.
    """

    place: Place
    nbytes: int
    taken_ns: int
    pages: Sequence[int] = ()
    is_shared: bool = False  # on pages with contents (prefix caching)
    users: list[Op] = field(default_factory=list)
    freed_ns: int | None = None


class Journal:
    """Written by the ledger where a run is to be checked; costs memory, so it is off otherwise."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.lives: list[Life] = []
        self._now_ns = now_ns
        self._alive: dict[Place, list[Life]] = defaultdict(list)

    def took(
        self, place: Place, nbytes: int, pages: Sequence[int] = (), is_shared: bool = False
    ) -> None:
        life = Life(place, nbytes, self._now_ns(), pages, is_shared)
        self._alive[place].append(life)
        self.lives.append(life)

    def touched(self, op: Op, places: Iterable[Place]) -> None:
        for place in places:
            for life in self._alive[place]:
                life.users.append(op)

    def gave(self, place: Place) -> None:
        for life in self._alive.pop(place, ()):
            life.freed_ns = self._now_ns()


Ranks = tuple[tuple[Place, int], ...]


class Mark:
    """What is known of a place while it is held."""

    __slots__ = ("givers", "used", "users", "writer", "written")

    def __init__(self) -> None:
        self.written, self.used = 0, -1  # stamps of contents and of use
        self.writer: Op | None = None  # the last one; stays when it has ended
        self.users: dict[Lane, Op] = {}  # the last one of each lane
        # Operations that end before the bytes of the place are free. The first writer of the place
        # waits for them, and all later operations wait for that writer.
        self.givers: tuple[Op, ...] = ()


class Stamps(Mapping[Place, int]):
    """A stamp for each place, read only. The last run is entered when a stamp is looked up."""

    def __init__(self, board: Scoreboard, is_of_use: bool) -> None:
        self._board, self._is_of_use = board, is_of_use

    def __getitem__(self, place: Place) -> int:
        mark = self._board.marks()[place]
        return mark.used if self._is_of_use else mark.written

    def get(self, place: Place, default: Any = None) -> Any:
        mark = self._board.marks().get(place)
        if mark is None:
            return default
        return mark.used if self._is_of_use else mark.written

    def __contains__(self, place: object) -> bool:
        return place in self._board.marks()

    def __iter__(self) -> Iterator[Place]:
        return iter(self._board.marks())

    def __len__(self) -> int:
        return len(self._board.marks())

    def ranks(self) -> Ranks:
        """All places in the order in which they began, with the rank of each stamp.

        A rank tells which stamps are older, equal or newer. A stamp of 0 or below, which stands
        for no contents or no use, is its own rank.
        """
        marks = self._board.marks()
        found = [mark.used if self._is_of_use else mark.written for mark in marks.values()]
        rank = {s: s if s <= 0 else number for number, s in enumerate(sorted({*found}), 1)}
        return tuple(zip(marks, [rank[stamp] for stamp in found], strict=True))


class Scoreboard:
    """Stamps of contents and use, and the operations behind them.

    An operation waits for the last writer of each place that it reads and for all users of each
    place that it writes (data), and for the operations that end before the bytes of its places are
    free (bytes). Lanes are first-in-first-out, so only operations on other lanes are named.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.open: dict[Op, None] = {}  # issued and not ended
        self._numbers: dict[Op, int] = {}  # of open operations: their order of issue
        self._lane_of: dict[Op, Lane] = {}  # of open operations
        self._lanes: dict[Lane, int] = defaultdict(int)  # open operations on each lane
        self.has_one_lane = True  # whether nothing runs but launches of one lane
        self._marks: dict[Place, Mark] = {}
        self.written, self.used = Stamps(self, False), Stamps(self, True)
        self.stamp = 0
        self._unentered: tuple[Op, tuple[Place, ...], int] | None = None  # not entered yet
        self._left: dict[Place, set[Op]] = {}  # places given back while in use, with their users
        self._leaving: dict[Op, list[Place]] = {}  # those places by user
        self._journal = journal

    def marks(self) -> Mapping[Place, Mark]:
        """The marks of all places, in the order in which the places began."""
        if self._unentered is not None:
            self.catch_up()
        return self._marks

    def enter(self, place: Place) -> None:
        """A place begins, with nothing in it.

        If it was given back while in use, its next writer waits for these users: model states have
        one storage for good.
        """
        self._marks[place] = Mark()
        if self._left and (users := self._left.pop(place, None)):
            self.rest(place, users)

    def rest(self, place: Place, givers: set[Op]) -> None:
        """A place rests on bytes that these operations still use."""
        mark = self.marks()[place]
        found = self._last_of_each_lane((*mark.givers, *givers))
        mark.givers = tuple(sorted(found, key=self._numbers.__getitem__))

    def touch(self, op: Op, reads: Sequence[Place], writes: tuple[Place, ...]) -> tuple[Op, ...]:
        """Issues an operation; returns what it waits for."""
        lane = op.lane
        waits: tuple[Op, ...] = ()
        is_alone = all([other == lane for other in self._lanes])
        if is_alone and lane[1] == COMPUTE_LANE and not (reads or self._journal):
            self.touch_again(op, writes, 1, is_open=True)
            return ()
        self.catch_up()
        self.stamp += 1
        contents = self._marks[op.src].written if isinstance(op, Copy) else self.stamp
        if not is_alone:
            waits = self._waits(lane, reads, writes)
        self._enter(op, lane, reads, writes, self.stamp, contents)
        self._start(op, lane)
        if self._journal:
            self._journal.touched(op, (*reads, *writes))
        return waits

    def touch_again(
        self, op: Op, writes: tuple[Place, ...], steps: int, is_open: bool = False
    ) -> None:
        """Stamps a launch that stands for `steps` equal ones, on the only lane that is busy.

        The launch is open from now on, or ends before the books are read. A place is entered when a
        launch without it follows, or when a mark is looked up.
        """
        assert self.has_one_lane and not self._journal, (
            "a run waits for no operation and is not watched"
        )
        self.stamp += steps
        if self._unentered is not None and writes[: len(self._unentered[1])] != self._unentered[1]:
            before, places, stamp = self._unentered
            self._enter(before, before.lane, (), _others(places, writes), stamp, stamp)
        self._unentered = (op, writes, self.stamp)
        if is_open:
            self._start(op, op.lane)

    def _start(self, op: Op, lane: Lane) -> None:
        self.open[op], self._numbers[op], self._lane_of[op] = None, self.stamp, lane
        self._lanes[lane] += 1
        if lane[1] != COMPUTE_LANE:
            self.has_one_lane = False

    def catch_up(self) -> None:
        """Enters what the last run touched."""
        if self._unentered is not None:
            (op, writes, stamp), self._unentered = self._unentered, None
            self._enter(op, op.lane, (), writes, stamp, stamp)

    def _enter(
        self,
        op: Op,
        lane: Lane,
        reads: Sequence[Place],
        writes: Sequence[Place],
        stamp: int,
        contents: int,
    ) -> None:
        marks = self._marks
        for place in reads:
            mark = marks[place]
            mark.used, mark.users[lane] = stamp, op
        for place in writes:
            mark = marks[place]
            mark.written, mark.used, mark.givers = contents, stamp, ()
            mark.writer = mark.users[lane] = op

    def _waits(self, lane: Lane, reads: Sequence[Place], writes: Sequence[Place]) -> tuple[Op, ...]:
        """The open operations of other lanes that a launch on this lane waits for."""
        marks, lane_of, found = self._marks, self._lane_of, dict[Op, None]()
        for place in reads:
            mark = marks[place]
            if (writer := mark.writer) is not None and lane_of.get(writer, lane) != lane:
                found[writer] = None
            for op in mark.givers:
                if lane_of.get(op, lane) != lane:
                    found[op] = None
        for place in writes:
            mark = marks[place]
            for other, op in mark.users.items():
                if other != lane and op in lane_of:
                    found[op] = None
            for op in mark.givers:
                if lane_of.get(op, lane) != lane:
                    found[op] = None
        return tuple(found)

    def leave(self, place: Place) -> set[Op]:
        """A place ends; returns the open operations that still use its bytes."""
        mark = self._marks.pop(place)
        users = self._lane_of.keys() & mark.users.values()
        if self._unentered is not None and place in self._unentered[1]:
            op, writes, stamp = self._unentered
            users = self._last_of_each_lane((*users, op))
            i = writes.index(place)
            self._unentered = (op, writes[:i] + writes[i + 1 :], stamp)
        if mark.givers:
            users = self._last_of_each_lane((*users, *mark.givers))
        if users and place.region.kind is not Kind.KV:
            self._left[place] = {*users}
            for op in users:
                self._leaving.setdefault(op, []).append(place)
        return users

    def _last_of_each_lane(self, ops: Iterable[Op]) -> set[Op]:
        """The last open operation of each lane: when it has ended, all before it have."""
        found: dict[Lane, Op] = {}
        for op in ops:
            if (lane := self._lane_of.get(op)) is not None:
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
            if not self.has_one_lane:
                self.has_one_lane = all([name == COMPUTE_LANE for _, name in self._lanes])
        for place in self._leaving.pop(op, ()):
            if users := self._left.get(place):
                users.discard(op)
                if not users:
                    del self._left[place]


def _others(places: tuple[Place, ...], writes: tuple[Place, ...]) -> list[Place]:
    """The places that a launch does not write; those that it writes come in the same order."""
    found: list[Place] = []
    while places and writes[: len(places)] != places:
        i = [*map(is_, places, writes), False].index(False)
        found.append(places[i])
        places, writes = places[i + 1 :], writes[i:]
    return found
