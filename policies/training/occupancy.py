"""What lies where while a plan for training is made, and who leaves when room is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.contract.footprint import LaunchFootprint, goes_out
from engine.contract.job import Job, layout_of
from engine.contract.policy import PlanBuilder
from engine.contract.regions import Kind, Place, Pool, Tier
from engine.contract.view import View
from policies.training.cycle import training_jobs
from policies.training.eviction import Candidates, Order
from policies.training.out_of_memory import OutOfMemory, remedies_of_launch

STATES = (Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER)


class Occupancy:
    """Brings regions to where they are wanted, and makes room for them by an order of eviction.

    States lie in one tier at a time where tiers are exclusive: coming means leaving the other, and
    what leaves is copied. Inclusive tiers keep the copy on the host, and what is as new there is
    dropped. Which copy is new, stamps tell, drafted operations included. It rests on free and
    coming bytes, so it may wait for copies, but decides the same in every backend.
    """

    def __init__(
        self,
        view: View,
        plan: PlanBuilder,
        order: Order,
        kinds: Collection[Kind] = STATES,
        is_exclusive: bool = False,
    ) -> None:
        """`kinds` of states may leave the device when room is needed; what units save for the host
        always may."""
        self._view, self._plan, self._order = view, plan, order
        self._kinds, self._is_exclusive = kinds, is_exclusive
        self._here: Pool = (Tier.GPU, view.device)
        self._home: Pool = (Tier.HOST, 0)
        self._stamps: dict[Place, int] = {}  # of contents that are drafted
        self._leaving = Candidates()  # what may leave, in the order of booking
        self._pinned: frozenset[Place] = frozenset()
        self._launch: LaunchFootprint | None = None  # the one at hand
        self.clock = 0  # launches drafted
        self.state_bytes = 0  # on the device, of what may leave
        self.lacks_bytes = 0  # on the host, for an update that is on the device therefore
        self._host_lacks: int | None = None  # with so much more the draft would be another
        for place in self._found():
            self._count(place)
            self._leaving.put(place, order.standing(place, self._leaving.count))

    def _found(self) -> Iterator[Place]:
        jobs = {job.job_id: job for job in training_jobs(self._view)}
        for place in self._view.held_bytes:
            (owner, kind, part, _), tier, device = place
            if tier is not Tier.GPU or owner not in jobs or device != self._view.device:
                continue
            if kind in self._kinds or _is_on_its_way(jobs[owner], kind, part):
                yield place

    # ---- places
    def elsewhere(self, place: Place) -> Place:
        """The same region in the other tier."""
        return Place(place.region, *(self._home if place.tier is Tier.GPU else self._here))

    def holds(self, place: Place) -> bool:
        """Whether something is there."""
        return bool(self._plan.held(place))

    def is_new(self, place: Place) -> bool:
        """Whether what a place holds is as new as what the other tier has."""
        if not self._plan.held(place):
            return False
        other = self.elsewhere(place)
        return not self._plan.held(other) or self._stamp(place) >= self._stamp(other)

    def bring(self, place: Place, nbytes: int) -> None:
        """Makes a place hold what is new of its region; one that is nowhere begins there."""
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
        """Whether what comes to a place leaves the other tier. Updates want a norm in both."""
        if place.region.kind is Kind.BUFFER:
            return False
        return self._is_exclusive or (place.tier is Tier.HOST and not _is_weight(place))

    def offer(self, place: Place, nbytes: int) -> None:
        """Brings a place from the host if that takes nothing from anybody."""
        other = self.elsewhere(place)
        is_away = self._plan.held(other) and not self._plan.held(place)
        if is_away and self._plan.room(place.pool) >= nbytes:
            self.bring(place, nbytes)

    def copy(self, src: Place, dst: Place) -> None:
        """Copies a region whole; the destination is as new as the source then."""
        self._plan.copy(src, dst)
        self._stamps[dst] = self._stamp(src)

    def free(self, place: Place) -> None:
        """Gives a place back."""
        if self._leaving.drop(place) and place.region.kind in STATES:
            self.state_bytes -= self._plan.held(place)
        self._plan.free(place)

    def evict(self, place: Place) -> bool:
        """Takes a place off the device, copied out unless the host has it as new; whether there was
        room for that."""
        away = self.elsewhere(place)
        has_copy = self._plan.held(away)
        if not has_copy or self._stamp(away) < self._stamp(place):
            if not has_copy and not self._host_has(self._plan.held(place)):
                return False
            self.copy(place, away)
        self.free(place)
        return True

    # ---- room
    def make_room(self, pool: Pool, nbytes: int) -> None:
        """Evicts until so many bytes are left. OutOfMemory where nothing more can go."""
        while (room := self._plan.room(pool)) < nbytes:
            if pool == self._here and self._makes_room():
                continue
            if pool == self._here and self._is_stuck():
                raise self._host_error()
            raise self._nearer(pool, nbytes - room)

    def _makes_room(self) -> bool:
        return self._leaving.send_first(self._pinned, self.evict)

    def shrink(self, limit_bytes: int, strict: bool = False) -> None:
        """Evicts until states take no more than that, or nothing can go. `strict`: OutOfMemory
        where that is for want of room on the host."""
        while self.state_bytes > limit_bytes:
            if not self._leaving.send_first(self._pinned, self.evict):
                break
        if strict and self.state_bytes > limit_bytes and self._is_stuck():
            raise self._host_error()

    def _is_stuck(self) -> bool:
        """Whether something would leave if the host had room for it."""
        return any([place not in self._pinned for place in self._leaving])

    def _host_has(self, nbytes: int) -> bool:
        if (lacks := nbytes - self._plan.room(self._home)) <= 0:
            return True
        self._host_lacks = lacks if self._host_lacks is None else min(lacks, self._host_lacks)
        return False

    def _host_error(self) -> OutOfMemory:
        """Says the least that the host lacked for anything so far: what is lacking at the end may
        be more, since something smaller has gone instead and taken room."""
        assert self._host_lacks is not None, "something could not leave"
        return self._error(self._home, self._host_lacks)

    def _nearer(self, pool: Pool, deficit_bytes: int) -> OutOfMemory:
        """Of an update that is on the device for want of room on the host, what is lacking there,
        if that is less."""
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
        rank = self._leaving.rank(place)
        if rank is None:
            self._count(place)
        rank = self._order.used(place, clock, rank, self._leaving.count)
        self._leaving.put(place, rank)

    def _count(self, place: Place) -> None:
        if place.region.kind in STATES:
            self.state_bytes += self._plan.held(place)


def _is_weight(place: Place) -> bool:
    return place.region.kind is Kind.WEIGHT


def _is_on_its_way(job: Job, kind: Kind, part: int) -> bool:
    """Whether a place is what a unit saves for the host, or its input that waits there: brought
    early, or not gone yet."""
    assert job.training is not None
    units = layout_of(job.training).units
    if kind is not Kind.ACTIVATION:
        return False
    is_input = part >= len(units)
    return units[part - len(units)].sends_input if is_input else goes_out(units[part])
