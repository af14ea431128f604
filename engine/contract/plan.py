"""The frozen vocabulary of a decision: slices, operations and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.regions import (
    Place,
    Tier,
    Work,
)
from engine.contract.rules import plain, stored_by_slot

COMPUTE_LANE = "compute"
HOST_LANE = "cpu"
NET_LANE = "net"  # to the other devices of a group


class Pattern(StrEnum):
    """What devices of a group exchange."""

    ALL_GATHER = "all_gather"  # each has a part, and gets those of all others
    REDUCE_SCATTER = "reduce_scatter"  # each has a sum's addend, and gets a part of the sum
    ALL_REDUCE = "all_reduce"  # each has an addend, and gets the sum


plain(Pattern)
COPY_LANES = {(src, dst): f"{src}->{dst}" for src in Tier for dst in Tier}
Lane = tuple[int, str]  # a device and what runs first-in-first-out on it


class Slice(NamedTuple):
    """A piece of one job: `tokens` through `layers` (None: all). Checked against the frontier."""

    job: Job
    tokens: int
    work: Work = Work.FORWARD
    layers: range | None = None
    microbatch: int = 0
    version: int = 0  # of the weights
    record: bool = False  # keep what backward needs


@lru_cache(maxsize=1 << 12)
def one_token(job: Job) -> Slice:
    """The slice of a decode: the same one at every step."""
    return Slice(job, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """One launch. Two slices in it are fused; on="cpu" runs on the host's lane. `after`: places of
    any tier that it does not look at, and whose last writers it lets end first."""

    slices: tuple[Slice, ...]
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    device: int = 0
    on: str = COMPUTE_LANE
    again: bool = False  # recompute: moves no frontier
    after: tuple[Place, ...] = ()

    @property
    def lane(self) -> Lane:
        return (self.device, self.on)

    def again_as(self, slices: tuple[Slice, ...]) -> Compute:
        """Another launch like this one, of these slices."""
        return Compute(
            slices, self.reads, self.writes, self.device, self.on, self.again, self.after
        )


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copies a region whole. A new destination is booked; a source stays until it is freed."""

    src: Place
    dst: Place

    @property
    def lane(self) -> Lane:
        """Each direction of each link is a lane of its own; a peer copy is the sender's."""
        if self.src.tier is Tier.GPU and self.dst.tier is Tier.GPU:
            return (self.src.device, f"peer->{self.dst.device}")
        owner = self.src if self.src.tier is Tier.GPU else self.dst
        return (owner.device, COPY_LANES[self.src.tier, self.dst.tier])


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One device's part in an exchange of all devices of its group, which all do the same.

    `nbytes` of the whole: of all parts together, or of a sum.
    """

    pattern: Pattern
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    nbytes: int
    device: int = 0

    @property
    def lane(self) -> Lane:
        return (self.device, NET_LANE)


class Grow(NamedTuple):
    """Adds bytes to a place."""

    place: Place
    nbytes: int


class Share(NamedTuple):
    """A job starts on full pages whose contents are there (prefix caching): its place, which held
    nothing, now holds them, too, in this order. Pages that nobody holds take room, others none.
    """

    place: Place
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Gives a place back; its bytes return when all earlier users have ended."""

    place: Place


Op = Compute | Copy | Collective  # what takes time and runs on a lane


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A sequential program for one device. Lanes overlap it; its meaning is its order.

    ops      in the order of booking; an operation waits for what the ones before it have written
    restart  jobs in service that lose their KV: their tokens must be computed again
    refuse   jobs that will never fit
    wake_ns  the engine asks again at this moment at the latest
    """

    ops: tuple[Op | Grow | Share | Free, ...] = ()
    restart: tuple[Job, ...] = ()
    refuse: tuple[Job, ...] = ()
    wake_ns: int | None = None

    def __repr__(self) -> str:
        return f"Plan({len(self.ops)} operations)"

    def __bool__(self) -> bool:
        """Whether the plan does anything at all."""
        return bool(self.ops or self.refuse or self.restart)


stored_by_slot(Compute, Copy, Free, Plan)
