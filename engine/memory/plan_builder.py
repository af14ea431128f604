"""A builder for plans: runs the ledger's own dry run while a policy writes its program."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.job import Job
from engine.contract.plan import Collective, Compute, Copy, Free, Grow, Op, Plan, Share, Slice
from engine.contract.regions import Place, Pool, Tier
from engine.contract.view import View
from engine.memory.dry_run import NO_TRIALS, DryRun


class PlanBuilder:
    """A plan in the making. Nothing is booked; the view is not changed.

    It may rest on bytes that are still coming: the launch then waits for them, and the plan does
    not depend on how long copies take.
    """

    def __init__(self, view: View) -> None:
        coming = view.coming_bytes
        room = {pool: nbytes + coming[pool] for pool, nbytes in view.free_bytes.items()}
        self._trial = view.trial() if view.trial else None
        trials = {(Tier.GPU, view.device): self._trial} if self._trial else NO_TRIALS
        self._balance = DryRun(room, view.held_bytes, trials, view.page.nbytes)
        self._ops: list[Op | Grow | Share | Free] = []
        self._restart: list[Job] = []
        self._refuse: list[Job] = []
        self._device, self._page_nbytes = view.device, view.page.nbytes

    def room(self, pool: Pool) -> int:
        """Bytes left after what was drafted so far."""
        return self._balance.room_bytes[pool]

    def held(self, place: Place) -> int:
        """Bytes at a place after what was drafted so far; 0 where nothing is."""
        return self._balance.held(place) or 0

    def holds(self, place: Place) -> bool:
        """Whether a place is there, be it of no bytes."""
        return self._balance.held(place) is not None

    def found(self, job: Job) -> tuple[int, ...]:
        """Pages on which a job could start behind what was drafted so far (prefix caching)."""
        return self._trial.found(job) if self._trial else ()

    def idle(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody holds: sharing them takes room."""
        return self._trial.idle(pages) if self._trial else 0

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        """Starts a place on pages that are there; on none is no operation."""
        if pages:
            self._add(Share(place, pages))

    def grow(self, place: Place, nbytes: int) -> None:
        """Adds bytes to a place; asking for none is no operation."""
        if nbytes:
            self.grow_all((Grow(place, nbytes),))

    def grow_all(self, grows: Sequence[Grow]) -> None:
        """Adds bytes to places."""
        for op in grows:
            self._balance.grow(op.place, op.nbytes)
        self._ops += grows

    def grow_decodes(self, grows: Sequence[Grow]) -> bool:
        """Adds a page to each of these places of the device, which are held (View.decodes), if
        there is room for all; whether there was."""
        pool, nbytes = (Tier.GPU, self._device), len(grows) * self._page_nbytes
        if self._balance.room_bytes[pool] < nbytes:
            return False
        self._balance.grow_held(pool, grows, nbytes)
        self._ops += grows
        return True

    def free(self, place: Place) -> None:
        """Gives a place back."""
        self._add(Free(place))

    def move(self, src: Place, dst: Place) -> None:
        """Copies a region whole and gives its source back."""
        self._add(Copy(src, dst))
        self._add(Free(src))

    def copy(self, src: Place, dst: Place) -> None:
        """Copies a region whole; the source stays."""
        self._add(Copy(src, dst))

    def launch(self, op: Compute) -> None:
        """A launch as it is. That all its places are held is checked at booking."""
        self._ops.append(op)

    def exchange(self, op: Collective) -> None:
        """A device's part in an exchange of its group."""
        self._add(op)

    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        """One launch of all slices. That all its places are held is checked at booking."""
        self._ops.append(Compute(tuple(slices), writes=tuple(writes), device=self._device))

    def restart(self, job: Job) -> None:
        """Its tokens will be computed again."""
        self._restart.append(job)

    def refuse(self, job: Job) -> None:
        """It will never fit."""
        self._refuse.append(job)

    def plan(self) -> Plan:
        """The finished plan."""
        return Plan(tuple(self._ops), tuple(self._restart), tuple(self._refuse))

    def _add(self, op: Op | Grow | Share | Free) -> None:
        self._balance.apply(op)
        self._ops.append(op)
