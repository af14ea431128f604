"""Launches of training: what each one uses is made resident in the memory of a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from engine.contract.footprint import Exchange, LaunchFootprint, launches_of
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Compute, Slice
from engine.contract.policy import PlanBuilder
from engine.contract.regions import GATHERED, Kind, Place, Work
from engine.contract.view import View
from policies.training.eviction import NOW, Order
from policies.training.occupancy import STATES, Occupancy


class Residency(Occupancy):
    """Makes what launches use resident, also the parts of weights that other devices have."""

    def __init__(
        self,
        view: View,
        plan: PlanBuilder,
        order: Order,
        kinds: Collection[Kind] = STATES,
        is_exclusive: bool = False,
        keeps_gathered: bool = False,
    ) -> None:
        """Takes up what lies on the device of a view.

        Args:
            view: see Occupancy.
            plan: see Occupancy.
            order: see Occupancy.
            kinds: see Occupancy.
            is_exclusive: see Occupancy.
            keeps_gathered: the policy frees gathered weights itself; else they are freed behind
                their launch.
        """
        super().__init__(view, plan, order, kinds, is_exclusive)
        self._keeps_gathered = keeps_gathered
        self._gathered: dict[Place, None] = {}  # in this plan, latest last

    # ---- a launch
    def launches(self, piece: Slice, on: str, reuses: bool = False) -> Iterator[LaunchFootprint]:
        """The launches of a task.

        Args:
            piece: the task.
            on: the lane of an update; an update for which the host has no room runs on the device.
            reuses: gradients take the place of their weights.

        Returns:
            Footprints in order: one, or two with a forward repeated for its backward.
        """
        self.lacks_bytes = 0
        if on == HOST_LANE and piece.work is Work.UPDATE:
            (update,) = launches_of(piece, self._view.device, on, reuses)
            missing = [nbytes for place, nbytes in update.brought if not self._plan.held(place)]
            missing += [op.nbytes for op in update.grows]
            if self._host_has(sum(missing)):
                yield update
                return
            self.lacks_bytes = sum(missing) - self._plan.room(self._home)
        yield from launches_of(piece, self._view.device, COMPUTE_LANE, reuses)

    def make_resident(self, launch: LaunchFootprint) -> None:
        """Brings, gathers and grows what a launch needs.

        Args:
            launch: the footprint of the launch.

        Raises:
            OutOfMemory: that can never fit.
        """
        self._begin(launch)
        for place, nbytes in launch.brought:
            self.bring(place, nbytes)
        for exchange in launch.gathers:
            self.gather(exchange)
        where = self._home if launch.on == HOST_LANE else self._here
        self.make_room(where, sum([op.nbytes for op in launch.grows]))
        self._plan.grow_all(launch.grows)

    def make_resident_within(
        self, launch: LaunchFootprint, limit_bytes: int, strict: bool = False
    ) -> None:
        """Makes a launch resident, and evicts until states on the device keep to a limit.

        A launch on the host takes its room there first, since evictions might take it.

        Args:
            launch: its states count too.
            limit_bytes: of states on the device; exceeded where no place is left to evict.
            strict: it is an error if the limit is exceeded for want of room on the host.

        Raises:
            OutOfMemory: the launch can never fit, or, with `strict`, the limit is exceeded.
        """
        if launch.on == HOST_LANE:
            self.make_resident(launch)
            self.shrink(limit_bytes, strict)
            return
        self._begin(launch)
        brought = [nbytes for place, nbytes in launch.brought if not self._plan.held(place)]
        self.shrink(limit_bytes - sum(brought), strict)
        self.make_resident(launch)

    def drop_stale(self, launch: LaunchFootprint) -> None:
        """Frees the copies on the device that a launch on the host has made stale.

        Args:
            launch: the footprint of a launch that is in the plan.
        """
        for place in launch.writes if launch.on == HOST_LANE else ():
            if self._plan.held(here := self.elsewhere(place)):
                self.free(here)

    def run(
        self,
        launch: LaunchFootprint,
        also_writes: tuple[Place, ...] = (),
        after: tuple[Place, ...] = (),
        keeps_sent: bool = False,
    ) -> None:
        """Writes the launch and, behind it, its collectives, offloads and frees.

        Args:
            launch: what it uses is resident.
            also_writes: places beside those of the launch for which later copies wait.
            after: places whose copies must have come before it begins.
            keeps_sent: what is copied to the host stays on the device as well, also behind an
                update on the host.
        """
        pieces, device, writes = (launch.piece,), self._view.device, (*launch.writes, *also_writes)
        op = Compute(pieces, launch.reads, writes, device, launch.on, launch.again, after)
        self._plan.launch(op)
        self.clock += 1
        self._stamps.update(dict.fromkeys(writes, NOW + self.clock))
        for exchange in launch.reduces:
            self.exchange(exchange)
        for place in launch.sends:
            if not (self.send(place) if keeps_sent else self.evict(place)):
                self._touch(place, self.clock - 1)  # it stays while the host has no room
        for place in launch.frees:
            is_kept = keeps_sent and launch.on == HOST_LANE
            for copy in (place,) if is_kept else (place, self.elsewhere(place)):
                if self._plan.holds(copy):
                    self.free(copy)
        if not self._keeps_gathered:
            self.drop(launch.drops)

    def _begin(self, launch: LaunchFootprint) -> None:
        if launch is not self._launch:
            self._launch = launch
            buffers = [place for exchange in launch.gathers for place in exchange.writes]
            self._pinned = frozenset([*[place for place, _ in launch.brought], *buffers])

    # ---- a group
    def gather(self, exchange: Exchange) -> None:
        """Gathers the parts of a chunk's weights that other devices have, unless they are here.

        Args:
            exchange: a gather of one chunk's weights.
        """
        begins = exchange.begins
        assert begins is not None, "gathered weights have a place"
        if not self._plan.holds(begins.place):
            self.make_room(begins.place.pool, begins.nbytes)
            self._plan.grow_all((begins,))
            self._gathered.pop(begins.place, None)
            self._gathered[begins.place] = None
            self.exchange(exchange)

    def offer_gather(self, exchange: Exchange) -> None:
        """Gathers if there is room without an eviction, and the part of this device is here.

        Args:
            exchange: a gather of one chunk's weights.
        """
        begins = exchange.begins
        assert begins is not None, "gathered weights have a place"
        if self._plan.room(self._here) >= begins.nbytes and self.is_new(exchange.reads[0]):
            self.gather(exchange)

    def drop(self, places: Iterable[Place]) -> None:
        """Frees those of these places that are held.

        Args:
            places: places on the device.
        """
        for place in places:
            if self._plan.holds(place):
                self.free(place)

    def exchange(self, exchange: Exchange) -> None:
        """Writes a collective between places that are here.

        Args:
            exchange: its places are held.
        """
        self._plan.exchange(exchange.op(self._view.device))
        self._stamps.update(dict.fromkeys(exchange.writes, NOW + self.clock))

    def _makes_room(self) -> bool:
        return super()._makes_room() or self._drop_gathered()

    def _drop_gathered(self) -> bool:
        """Frees the weights gathered last, if not for this launch: they were gathered early."""
        if not self._keeps_gathered:
            return False
        held = [place for place in self._view.held_bytes if place not in self._gathered]
        here = [*held, *self._gathered]
        mine = [p for p in here if _is_gathered(p) and p.device == self._view.device]
        for place in reversed(mine):
            if place not in self._pinned and self._plan.holds(place):
                self.free(place)
                return True
        return False


def _is_gathered(place: Place) -> bool:
    return place.region.kind is Kind.BUFFER and place.region.slot == GATHERED
