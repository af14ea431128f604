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
SECOND_LANE = "compute_2"  # of the device, too: what finetunes runs beside what serves
HOST_LANE = "cpu"
COMPUTE_LANES = (COMPUTE_LANE, SECOND_LANE)
NET_LANE = "net"  # to the other devices of a group
TRAINING_LANES = (HOST_LANE, SECOND_LANE)  # on which nothing is served


class Pattern(StrEnum):
    """What devices of a group exchange."""

    ALL_GATHER = "all_gather"  # each has a part, and gets those of all others
    REDUCE_SCATTER = "reduce_scatter"  # each has a sum's addend, and gets a part of the sum
    ALL_REDUCE = "all_reduce"  # each has an addend, and gets the sum


plain(Pattern)
COPY_LANES = {(src, dst): f"{src}->{dst}" for src in Tier for dst in Tier}
Lane = tuple[int, str]  # a device, and the name of a first-in-first-out queue on it


class Slice(NamedTuple):
    """A piece of one job. The engine checks it against the frontier of the job.

    Attributes:
        job: the job that it moves on.
        tokens: tokens to compute; of an update 1.
        work: what is done; a served job goes forward.
        layers: the units of a training job, or the chunks of an update; None: all.
        microbatch: counted through the training job.
        version: of the weights, as the number of their updates; 0: not checked.
        record: whether a served job keeps the activations that a backward needs.
    """

    job: Job
    tokens: int
    work: Work = Work.FORWARD
    layers: range | None = None
    microbatch: int = 0
    version: int = 0
    record: bool = False


@lru_cache(maxsize=1 << 12)
def one_token(job: Job) -> Slice:
    """The slice of a decode.

    Args:
        job: a job in decode.

    Returns:
        One object for all steps of a job, so that slices compare by identity.
    """
    return Slice(job, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """One launch, in which all slices are fused.

    Attributes:
        slices: at most one per served job; a task of training is alone, or beside served jobs.
        reads: places that it reads. KV is named by `writes` alone.
        writes: places that it writes.
        device: where it runs.
        on: its lane on the device; `cpu` is the host's, and on `compute_2` windows of samples and
            their updates run beside what is served.
        again: whether a forward is repeated for its backward (recompute); it moves no frontier.
        after: places of any tier that it does not touch, and whose last writers end first.
    """

    slices: tuple[Slice, ...]
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()
    device: int = 0
    on: str = COMPUTE_LANE
    again: bool = False
    after: tuple[Place, ...] = ()

    @property
    def lane(self) -> Lane:
        """The device and the name of the lane on it."""
        return (self.device, self.on)

    def again_as(self, slices: tuple[Slice, ...]) -> Compute:
        """A launch like this one, of other slices.

        Args:
            slices: the slices of the new launch.

        Returns:
            A new object: an operation is issued once.
        """
        return Compute(
            slices, self.reads, self.writes, self.device, self.on, self.again, self.after
        )


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copies a region whole. A new destination is booked; the source stays until it is freed.

    Attributes:
        src: a place that is held.
        dst: a place of that region in another pool; if held, as large as the source.
    """

    src: Place
    dst: Place

    @property
    def lane(self) -> Lane:
        """Each direction of each link is a lane; a copy between devices is on the sender's."""
        is_near = self.src.device == self.dst.device
        if self.src.tier is Tier.GPU and self.dst.tier is Tier.GPU and not is_near:
            return (self.src.device, f"peer->{self.dst.device}")
        owner = self.src if self.src.tier is Tier.GPU else self.dst
        return (owner.device, COPY_LANES[self.src.tier, self.dst.tier])


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One device's part in an exchange of all devices of its group, which run equal plans.

    Attributes:
        pattern: what is exchanged.
        reads: the device's own part or addend.
        writes: what it gets.
        nbytes: bytes of all parts together, or of a sum.
        device: where this part runs, on the lane to the group.
    """

    pattern: Pattern
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    nbytes: int
    device: int = 0

    @property
    def lane(self) -> Lane:
        """The lane of its device to the group."""
        return (self.device, NET_LANE)


class Grow(NamedTuple):
    """Adds bytes to a place, which begins with them if it is not held.

    Attributes:
        place: what grows.
        nbytes: bytes to add; whole pages of KV.
    """

    place: Place
    nbytes: int


class Share(NamedTuple):
    """A job starts on full pages that hold its beginning (prefix caching).

    Attributes:
        place: KV of the job on a device; it is not held yet, and holds the pages from now on.
        pages: page numbers in order. Pages without a holder take room, shared ones none.
    """

    place: Place
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Gives a place back; its bytes return when all earlier users have ended.

    Attributes:
        place: a place that is held.
    """

    place: Place


Op = Compute | Copy | Collective  # operations that take time on a lane


class Relaid(NamedTuple):
    """A training job goes on by another of its layouts, from its next step on.

    Attributes:
        job: a job that is between two steps, with no launch in flight.
        number: of the layout, among `View.layout.alternatives` of the job.
    """

    job: Job
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A program for one device.

    Lanes run operations at once; results are those of the written order.

    Attributes:
        ops: in the order of booking; an operation waits for the writers of what it reads.
        restart: jobs in service that lose their KV: their tokens must be computed again.
        refuse: jobs that will never fit; they leave.
        wake_ns: the engine asks again at this moment at the latest; None: at the next event.
        relaid: training jobs that go on by another of their layouts.
    """

    ops: tuple[Op | Grow | Share | Free, ...] = ()
    restart: tuple[Job, ...] = ()
    refuse: tuple[Job, ...] = ()
    wake_ns: int | None = None
    relaid: tuple[Relaid, ...] = ()

    def __repr__(self) -> str:
        return f"Plan({len(self.ops)} operations)"

    def __bool__(self) -> bool:
        """Whether the plan does anything at all."""
        return bool(self.ops or self.refuse or self.restart or self.relaid)


stored_by_slot(Compute, Copy, Free, Plan)
