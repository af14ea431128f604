"""What lies where while a plan for training is made, and what is evicted when room is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.contract.footprint import LaunchFootprint, goes_out
from engine.contract.job import Job
from engine.contract.policy import PlanBuilder
from engine.contract.regions import Kind, Place, Pool, Tier
from engine.contract.training_progress import layout_of
from engine.contract.view import View
from policies.training.cycle import training_jobs
from policies.training.eviction import Candidates, Order
from policies.training.out_of_memory import OutOfMemory, remedies_of_launch

STATES = (Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER)


class Occupancy:
    """Brings regions to the tier of their use, and makes room for them by an order of eviction.

    Exclusive tiers hold a region once: a region that comes to one tier leaves the other, and an
    eviction copies it. Inclusive tiers keep the copy on the host, and an eviction copies only what
    is newer on the device. Stamps tell which copy is newer, those of planned launches included.
    Room counts free and coming bytes. So launches may wait for copies, but the plan is alike in
    every backend.
    """

    def __init__(
        self,
        view: View,
        plan: PlanBuilder,
        order: Order,
        kinds: Collection[Kind] = STATES,
        is_exclusive: bool = False,
    ) -> None:
        """Takes up what lies on the device of a view.

        Args:
            view: what the policy was shown.
            plan: where operations are written.
            order: of eviction.
            kinds: of states that may be evicted; activations saved for the host always may.
            is_exclusive: tiers are exclusive.
        """
        self._view, self._plan, self._order = view, plan, order
        self._kinds, self._is_exclusive = kinds, is_exclusive
        self._here: Pool = (Tier.GPU, view.device)
        self._home: Pool = (Tier.HOST, 0)
        self._stamps: dict[Place, int] = {}  # of contents that this plan writes
        self._candidates = Candidates()  # for eviction, in the order of booking
        self._pinned: frozenset[Place] = frozenset()
        self._launch: LaunchFootprint | None = None  # the one that is being placed
        self.clock = 0  # launches planned so far
        self.state_bytes = 0  # on the device, of states that may be evicted
        self.lacks_bytes = 0  # of the host, for an update that runs on the device for this reason
        self._host_lacks: int | None = None  # with so much more the plan would differ
        for place in self._found():
            self._count(place)
            self._candidates.put(place, order.rank_at_start(place, self._candidates.count))

    def _found(self) -> Iterator[Place]:
        jobs = {job.job_id: job for job in training_jobs(self._view)}
        for place in self._view.held_bytes:
            (owner, kind, part, _), tier, device = place
            if tier is not Tier.GPU or owner not in jobs or device != self._view.device:
                continue
            if kind in self._kinds or _is_offloaded(jobs[owner], kind, part):
                yield place

    # ---- places
    def elsewhere(self, place: Place) -> Place:
        """The place of a region in the other tier.

        Args:
            place: a place of states or activations.

        Returns:
            Its place on the host, or on the device of the view.
        """
        return Place(place.region, *(self._home if place.tier is Tier.GPU else self._here))

    def holds(self, place: Place) -> bool:
        """Whether a place holds bytes.

        Args:
            place: a place of states or activations.

        Returns:
            False for a place of 0 bytes.
        """
        return bool(self._plan.held(place))

    def is_new(self, place: Place) -> bool:
        """Whether a place holds the newest contents of its region.

        Args:
            place: a place of states or activations.

        Returns:
            False where the place is not held, or the other tier is newer.
        """
        if not self._plan.held(place):
            return False
        other = self.elsewhere(place)
        return not self._plan.held(other) or self._stamp(place) >= self._stamp(other)

    def bring(self, place: Place, nbytes: int) -> None:
        """Makes a place hold the newest contents of its region.

        A region that is in no tier begins there.

        Args:
            place: a place of states or activations.
            nbytes: bytes of a region that begins.

        Raises:
            OutOfMemory: its pool has no room, and no place is left to evict.
        """
        if not self.is_new(place):
            other = self.elsewhere(place)
            if size := self._plan.held(other):
                if not self._plan.held(place):
                    self.make_room(place.pool, size)
                self.copy(other, place)
                if self._moves(place):
                    self.free(other)
            else:
                self.make_room(place.pool, nbytes)
                self._plan.grow(place, nbytes)
                self._stamps[place] = 0
        if place.tier is Tier.GPU and self._may_leave(place):
            self._touch(place, self.clock)

    def _moves(self, place: Place) -> bool:
        """Whether a region that comes here leaves the other tier. Updates need a norm in both."""
        if place.region.kind is Kind.BUFFER:
            return False
        return self._is_exclusive or (place.tier is Tier.HOST and not _is_weight(place))

    def offer(self, place: Place, nbytes: int) -> None:
        """Brings a place from the host if there is room without an eviction.

        Args:
            place: a place of states or activations.
            nbytes: bytes of the region.
        """
        other = self.elsewhere(place)
        is_away = self._plan.held(other) and not self._plan.held(place)
        if is_away and self._plan.room(place.pool) >= nbytes:
            self.bring(place, nbytes)

    def copy(self, src: Place, dst: Place) -> None:
        """Copies a region whole. The destination is then as new as the source.

        Args:
            src: a place that is held.
            dst: the place of its region in the other tier.
        """
        self._plan.copy(src, dst)
        self._stamps[dst] = self._stamp(src)

    def free(self, place: Place) -> None:
        """Frees a place.

        Args:
            place: a place that is held.
        """
        if self._candidates.drop(place) and place.region.kind in STATES:
            self.state_bytes -= self._plan.held(place)
        self._plan.free(place)

    def evict(self, place: Place) -> bool:
        """Takes a place off the device, with a copy to the host unless the host has it as new.

        Args:
            place: a place on the device that is held.

        Returns:
            Whether the host had room for the copy; False leaves the plan unchanged.
        """
        if not self.send(place):
            return False
        self.free(place)
        return True

    def send(self, place: Place) -> bool:
        """Copies a place of the device to the host unless that has it as new.

        Args:
            place: a place on the device that is held.

        Returns:
            Whether the host had room for the copy; False leaves the plan unchanged.
        """
        away = self.elsewhere(place)
        has_copy = self._plan.held(away)
        if not has_copy or self._stamp(away) < self._stamp(place):
            if not has_copy and not self._host_has(self._plan.held(place)):
                return False
            self.copy(place, away)
        return True

    # ---- room
    def make_room(self, pool: Pool, nbytes: int) -> None:
        """Evicts until so many bytes of a pool are free.

        Args:
            pool: of the device or the host; only places of the device are evicted.
            nbytes: bytes that must be free or coming.

        Raises:
            OutOfMemory: no place is left to evict.
        """
        while (room := self._plan.room(pool)) < nbytes:
            if pool == self._here and self._makes_room():
                continue
            if pool == self._here and self._is_stuck():
                raise self._host_error()
            raise self._nearer(pool, nbytes - room)

    def _makes_room(self) -> bool:
        return self._candidates.evict_first(self._pinned, self.evict)

    def evictable_bytes(self) -> int:
        """What evictions can give back of the device, as far as the host has room for copies.

        Returns:
            Bytes of `give_way` at most.
        """
        left, found = self._plan.room(self._home), 0
        for place in self._candidates.ranked():
            nbytes = self._plan.held(place)
            copied = 0 if self._plan.held(self.elsewhere(place)) else nbytes
            if copied <= left:
                left, found = left - copied, found + nbytes
        return found

    def give_way(self, nbytes: int) -> None:
        """Evicts until so many bytes of the device are free, or no place is left to evict.

        Args:
            nbytes: bytes that another policy is about to take.
        """
        while self._plan.room(self._here) < nbytes and self._makes_room():
            pass

    def shrink(self, limit_bytes: int, strict: bool = False) -> None:
        """Evicts until states take no more than a limit, or no place is left to evict.

        Args:
            limit_bytes: of states on the device.
            strict: whether a full host is an error.

        Raises:
            OutOfMemory: with `strict`, the host has no room for what should leave.
        """
        while self.state_bytes > limit_bytes:
            if not self._candidates.evict_first(self._pinned, self.evict):
                break
        if strict and self.state_bytes > limit_bytes and self._is_stuck():
            raise self._host_error()

    def _is_stuck(self) -> bool:
        """Whether a place would be evicted if the host had room for it."""
        return any([place not in self._pinned for place in self._candidates])

    def _host_has(self, nbytes: int) -> bool:
        if (lacks := nbytes - self._plan.room(self._home)) <= 0:
            return True
        self._host_lacks = lacks if self._host_lacks is None else min(lacks, self._host_lacks)
        return False

    def _host_error(self) -> OutOfMemory:
        """The least that the host lacked for any eviction so far.

        What is lacking at the end may be more: a smaller place was evicted instead and took room.
        """
        assert self._host_lacks is not None, "an eviction found no room on the host"
        return self._error(self._home, self._host_lacks)

    def _nearer(self, pool: Pool, deficit_bytes: int) -> OutOfMemory:
        """The smaller deficit: that of a pool or that of the host.

        The host counts where an update runs on the device because the host has no room.
        """
        if 0 < self.lacks_bytes < deficit_bytes:
            return self._error(self._home, self.lacks_bytes)
        return self._error(pool, deficit_bytes)

    def _error(self, pool: Pool, deficit_bytes: int) -> OutOfMemory:
        assert self._launch is not None, "room is made for launches"
        training = self._launch.piece.job.training
        assert training is not None, "a task of a training job"
        work = self._launch.piece.work
        remedies = remedies_of_launch(pool[0], work, training.spec, layout_of(training))
        return OutOfMemory(pool, deficit_bytes, self._launch.name, remedies)

    # ---- books
    def _stamp(self, place: Place) -> int:
        found = self._stamps.get(place)
        return self._view.written[place] if found is None else found

    def _may_leave(self, place: Place) -> bool:
        return place.region.kind in self._kinds or place.region.kind is Kind.ACTIVATION

    def _touch(self, place: Place, clock: int) -> None:
        rank = self._candidates.rank(place)
        if rank is None:
            self._count(place)
        rank = self._order.rank_after_use(place, clock, rank, self._candidates.count)
        self._candidates.put(place, rank)

    def _count(self, place: Place) -> None:
        if place.region.kind in STATES:
            self.state_bytes += self._plan.held(place)


def _is_weight(place: Place) -> bool:
    return place.region.kind is Kind.WEIGHT


def _is_offloaded(job: Job, kind: Kind, part: int) -> bool:
    """Whether a place is of an offloaded activation, fetched early or not yet copied out.

    That is what a unit saves for the host, or its input.
    """
    assert job.training is not None
    units = layout_of(job.training).units
    if kind is not Kind.ACTIVATION:
        return False
    is_input = part >= len(units)
    return units[part - len(units)].sends_input if is_input else goes_out(units[part])
