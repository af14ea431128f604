"""The plan builder of memory policies: runs the ledger's own dry run while a plan is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.contract.job import Job
from engine.contract.plan import Collective, Compute, Copy, Free, Grow, Op, Plan, Share, Slice
from engine.contract.regions import Place, Pool, Tier
from engine.contract.view import RunningDecodes, View
from engine.memory.dry_run import NO_PAGES, DryRun, Shortage


class DryRunPlanBuilder:
    """The PlanBuilder of the contract. Nothing is booked; the view is not changed.

    The plan may take bytes that are still coming: its launch then waits for them, so the plan does
    not depend on how long copies take.

    Args:
        view: the state that the plan begins with; its device is the plan's.

    Raises:
        Shortage: by any method that takes bytes, where a pool has too few.
        ContractError: by any method, where the ledger would not book the operation.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._pages = view.kept_pages() if view.kept_pages is not None else None
        self._dry_run = self._begun()
        self._ops: list[Op | Grow | Share | Free] = []
        self._restart: list[Job] = []
        self._refuse: list[Job] = []
        self._device, self._page_nbytes = view.device, view.page.nbytes

    def _begun(self) -> DryRun:
        """The dry run of an empty plan."""
        view, pages = self._view, self._pages
        coming = view.coming_bytes
        room = {pool: nbytes + coming[pool] for pool, nbytes in view.free_bytes.items()}
        page_runs = NO_PAGES if pages is None else {(Tier.GPU, view.device): pages}
        return DryRun(room, view.held_bytes, page_runs, view.page.nbytes)

    def __bool__(self) -> bool:
        return bool(self._ops or self._restart or self._refuse)

    def room(self, pool: Pool) -> int:
        return self._dry_run.room_bytes[pool]

    def held(self, place: Place) -> int:
        return self._dry_run.held(place) or 0

    def holds(self, place: Place) -> bool:
        return self._dry_run.held(place) is not None

    def found(self, job: Job) -> tuple[int, ...]:
        return self._pages.found(job) if self._pages else ()

    def idle(self, pages: Sequence[int]) -> int:
        return self._pages.idle(pages) if self._pages else 0

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        if pages:
            self._add(Share(place, pages))

    def grow(self, place: Place, nbytes: int) -> None:
        if nbytes:
            self.grow_all((Grow(place, nbytes),))

    def grow_all(self, grows: Sequence[Grow]) -> None:
        for op in grows:
            self._dry_run.grow(op.place, op.nbytes)
        self._ops += grows

    def grow_running(self, running: RunningDecodes) -> bool:
        pool, nbytes = (Tier.GPU, self._device), len(running.full) * self._page_nbytes
        if self.room(pool) < nbytes:
            return False
        self._dry_run.grow_held(pool, running.full, nbytes)
        self._ops += running.full
        return True

    def free(self, place: Place) -> None:
        self._add(Free(place))

    def move(self, src: Place, dst: Place) -> None:
        self._add(Copy(src, dst))
        self._add(Free(src))

    def copy(self, src: Place, dst: Place) -> None:
        self._add(Copy(src, dst))

    def launch(self, op: Compute) -> None:
        self._ops.append(op)

    def exchange(self, op: Collective) -> None:
        self._add(op)

    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        self._ops.append(Compute(tuple(slices), writes=tuple(writes), device=self._device))

    def restart(self, job: Job) -> None:
        self._restart.append(job)

    def refuse(self, job: Job) -> None:
        self._refuse.append(job)

    def discard(self) -> None:
        view = self._view
        self._pages = view.kept_pages() if view.kept_pages is not None else None
        self._dry_run = self._begun()
        self._ops.clear()
        self._restart.clear()
        self._refuse.clear()

    def within(self, room_bytes: Mapping[Pool, int]) -> DryRunPlanBuilder:
        return _LimitedBuilder(self, room_bytes)

    def plan(self) -> Plan:
        """The finished plan: the operations in the order in which they were added."""
        return Plan(tuple(self._ops), tuple(self._restart), tuple(self._refuse))

    def _add(self, op: Op | Grow | Share | Free) -> None:
        self._dry_run.apply(op)
        self._ops.append(op)


class _LimitedBuilder(DryRunPlanBuilder):
    """Writes into another builder's plan, on its dry run, within a share of the room.

    Args:
        whole: the builder that it writes into.
        room_bytes: bytes that it may take of each pool; a pool that is not named is not limited.
    """

    def __init__(self, whole: DryRunPlanBuilder, room_bytes: Mapping[Pool, int]) -> None:
        self._whole = whole
        self._device, self._page_nbytes = whole._device, whole._page_nbytes
        self._follow()
        room = self._dry_run.room_bytes
        self._withheld = {p: room[p] - min(n, room[p]) for p, n in room_bytes.items()}

    def _follow(self) -> None:
        whole = self._whole
        self._pages, self._dry_run, self._ops = whole._pages, whole._dry_run, whole._ops
        self._restart, self._refuse = whole._restart, whole._refuse

    def room(self, pool: Pool) -> int:
        return super().room(pool) - self._withheld.get(pool, 0)

    def grow_all(self, grows: Sequence[Grow]) -> None:
        for op in grows:
            self._check(op.place, op.nbytes)
        super().grow_all(grows)

    def copy(self, src: Place, dst: Place) -> None:
        if not self.holds(dst):
            self._check(dst, self.held(src))
        super().copy(src, dst)

    def move(self, src: Place, dst: Place) -> None:
        self.copy(src, dst)
        self.free(src)

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        self._check(place, self.idle(pages) * self._page_nbytes)
        super().share(place, pages)

    def discard(self) -> None:
        self._whole.discard()
        self._follow()

    def _check(self, place: Place, nbytes: int) -> None:
        """Raises Shortage where bytes are beyond the share."""
        if (lacks := nbytes - self.room(place.pool)) > 0:
            raise Shortage(place, lacks)
