"""The plan builder of memory policies, over the dry run of a plan; and shares of its room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

from engine.contract.adapter_check import adapters_of
from engine.contract.job import Job
from engine.contract.plan import (
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Op,
    Plan,
    Relaid,
    Share,
    Slice,
)
from engine.contract.policy import MakeRoom, PlanBuilder
from engine.contract.regions import Place, Pool, Shortage, Tier
from engine.contract.view import KeptPages, RunningDecodes, View
from engine.memory.dry_run import NO_PAGES, DryRun


class DryRunPlanBuilder(PlanBuilder):
    """The PlanBuilder of the contract. Nothing is booked; the view is not changed.

    The plan may take bytes that are still coming: its launch then waits for them, so the plan does
    not depend on how long copies take.

    Args:
        view: the state that the plan begins with; its device is the plan's.

    Raises:
        Shortage: by any method that takes bytes, where a pool has too few.
        ContractError: by any method, where the ledger would not book the operation.
    """

    _shares: _Shares | None = None  # of the room; None where no share has written

    def __init__(self, view: View) -> None:
        self._view = view
        self._pages, self._dry_run = self._begun()
        self._ops: list[Op | Grow | Share | Free] = []
        self._restart, self._refuse, self._relaid = list[Job](), list[Job](), list[Relaid]()
        self._device, self._page_nbytes = view.device, view.page.nbytes

    def _begun(self) -> tuple[KeptPages | None, DryRun]:
        """The dry run of an empty plan, and that on its pages."""
        view, coming = self._view, self._view.coming_bytes
        pages = view.kept_pages() if view.kept_pages is not None else None
        room = {pool: nbytes + coming[pool] for pool, nbytes in view.free_bytes.items()}
        page_runs = NO_PAGES if pages is None else {(Tier.GPU, view.device): pages}
        return pages, DryRun(room, view.held_bytes, page_runs, view.page.nbytes)

    def __bool__(self) -> bool:
        return bool(self._ops or self._restart or self._refuse or self._relaid)

    def room(self, pool: Pool) -> int:
        return self._dry_run.room_bytes[pool]

    def held(self, place: Place) -> int:
        return self._dry_run.held(place) or 0

    def holds(self, place: Place) -> bool:
        return self._dry_run.held(place) is not None

    def found(self, job: Job) -> tuple[int, ...]:
        return self._pages.found(job) if self._pages else ()

    def start_of(self, job: Job) -> int:
        tokens = job.computed_tokens
        if tokens or self._pages is None:
            return tokens
        shares = [op for op in self._ops if isinstance(op, Share)]
        own = [op.pages for op in shares if op.place.region.owner == job.job_id]
        return len(own[0]) * self._view.page.tokens if own else 0

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
            self._ops.append(op)

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

    def join(self, op: Compute) -> None:
        last = self._last_served()
        if last is None or last.lane != op.lane:
            self.launch(op)
            return
        slices, reads = (*last.slices, *op.slices), (*last.reads, *op.reads)
        self._put_last(last, Compute(slices, reads, (*last.writes, *op.writes), op.device, op.on))

    def served(self) -> tuple[Slice, ...]:
        last = self._last_served()
        return () if last is None else last.slices

    def record(self, places: Mapping[int, Sequence[Place]]) -> None:
        last = self._last_served()
        assert last is not None, "a plan that ends with a launch which serves"
        slices = [s._replace(record=True) if s.job.job_id in places else s for s in last.slices]
        writes = (*last.writes, *[place for own in places.values() for place in own])
        self._put_last(last, Compute(tuple(slices), last.reads, writes, last.device, last.on))

    def _last_served(self) -> Compute | None:
        """The launch that serves, if nothing but what makes room follows it."""
        behind = list[Place]()
        for op in reversed(self._ops):
            if isinstance(op, Compute):
                serves = op.slices[0].job.training is None
                return op if serves and {*op.reads, *op.writes}.isdisjoint(behind) else None
            if isinstance(op, Free) or (isinstance(op, Copy) and op.dst.tier is Tier.HOST):
                behind.append(op.place if isinstance(op, Free) else op.src)
            elif not isinstance(op, Grow):
                return None
        return None

    def _put_last(self, before: Compute, after: Compute) -> None:
        """Puts another launch in the place of one, behind all that the plan has."""
        at = next(i for i in reversed(range(len(self._ops))) if self._ops[i] is before)
        if self._shares is not None:
            self._shares.sign(None, self._parts)
            self._shares.forget(at)
        self._ops[at:] = [*self._ops[at + 1 :], after]

    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        if self._view.adapters:
            self._ops.append(self._served(slices, writes))
        else:
            self._ops.append(Compute(tuple(slices), (), tuple(writes), self._device))

    def _served(self, slices: Sequence[Slice], writes: Sequence[Place]) -> Compute:
        """A launch that serves; it reads the adapters of its jobs."""
        device = self._device
        reads = adapters_of(slices, device) if self._view.adapters else ()
        return Compute(tuple(slices), reads, tuple(writes), device)

    def restart(self, job: Job) -> None:
        self._restart.append(job)

    def refuse(self, job: Job) -> None:
        self._refuse.append(job)

    def relay(self, job: Job, number: int) -> None:
        self._relaid.append(Relaid(job, number))

    def discard(self) -> None:
        self._pages, self._dry_run = self._begun()
        for part in self._parts:
            part.clear()
        self._shares = None

    def within(
        self, room_bytes: Mapping[Pool, int], make_room: MakeRoom | None = None
    ) -> PlanBuilder:
        return _LimitedBuilder(self, None, room_bytes, make_room)

    def plan(self) -> Plan:
        """The finished plan: the operations in the order in which they were added."""
        jobs = tuple(self._restart), tuple(self._refuse)
        return Plan(tuple(self._ops), *jobs, relaid=tuple(self._relaid))

    def _add(self, op: Op | Grow | Share | Free) -> None:
        self._dry_run.apply(op)
        self._ops.append(op)

    # ---- shares of the room
    @property
    def _parts(self) -> Parts:
        return self._ops, self._restart, self._refuse, self._relaid

    def _write_as(
        self, share: _LimitedBuilder, write: Callable[[Any], object], written: object
    ) -> None:
        """Writes for a share: what is added is signed, and its bytes count for the share."""
        self._shares = shares = self._shares or _Shares(([], [], [], []))
        parts, before = self._parts, dict(self._dry_run.room_bytes)
        shares.sign(None, parts)
        write(written)
        shares.sign(share, parts)
        shares.charge(share, before, self._dry_run.room_bytes)

    def _discard_share(self, share: _LimitedBuilder) -> None:
        """Takes back what a share has written, and tries all other operations again in order."""
        if self._shares is None:
            return
        self._shares.sign(None, self._parts)
        kept, writers = self._shares.without(share, self._parts)
        shares, (pages, dry_run) = _Shares(writers), self._begun()
        for op, writer in zip(kept[0], writers[0], strict=True):
            before = dict(dry_run.room_bytes)
            if isinstance(op, Grow):
                dry_run.grow(op.place, op.nbytes)
            elif not isinstance(op, Compute):  # booking checks its places
                dry_run.apply(op)
            if writer is not None:
                shares.charge(writer, before, dry_run.room_bytes)
                if (excess := shares.excess_bytes(writer)) > 0:
                    raise Shortage(op.dst if isinstance(op, Copy) else op.place, excess)
        self._pages, self._dry_run, self._shares = pages, dry_run, shares
        self._ops, self._restart, self._refuse, self._relaid = kept


Parts = tuple[list[Any], ...]  # operations, restarts, refusals and new layouts of a plan
Writers = tuple[list["_LimitedBuilder | None"], ...]  # of each of these; None: of no share


class _Shares:
    """Which share wrote each part of a plan, and the bytes that each share of the room has taken.

    Args:
        writers: of each operation, restart, refusal and new layout that is signed.
    """

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self.taken_bytes = Counter[tuple[_LimitedBuilder, Pool]]()

    def sign(self, writer: _LimitedBuilder | None, parts: Parts) -> None:
        """Signs all that is not signed yet."""
        for part, writers in zip(parts, self._writers, strict=True):
            if count := len(part) - len(writers):
                writers.extend([writer] * count)

    def charge(
        self, writer: _LimitedBuilder, before: Mapping[Pool, int], after: Mapping[Pool, int]
    ) -> None:
        """Counts a change of room for a share and for those that it was made within."""
        for pool, nbytes in before.items():
            if taken := nbytes - after[pool]:
                for share in writer.around:
                    self.taken_bytes[share, pool] += taken

    def excess_bytes(self, writer: _LimitedBuilder) -> int:
        """By how much a share, or one that it was made within, is taken beyond its bytes."""
        over = [
            self.taken_bytes[share, pool] - nbytes
            for share in writer.around
            for pool, nbytes in share.share_bytes.items()
        ]
        return max(over, default=0)

    def forget(self, at: int) -> None:
        """The operation with this index is taken out."""
        del self._writers[0][at]

    def has_written(self, share: _LimitedBuilder) -> bool:
        """Whether a part of the plan is of a share, or of one within."""
        return any([w is not None and share in w.around for part in self._writers for w in part])

    def without(self, share: _LimitedBuilder, parts: Parts) -> tuple[Parts, Writers]:
        """The parts of a plan and their writers without those of a share."""
        stays = [[w is None or share not in w.around for w in part] for part in self._writers]
        kept = tuple([[*compress(*given)] for given in zip(parts, stays, strict=True)])
        left = tuple([[*compress(*given)] for given in zip(self._writers, stays, strict=True)])
        return kept, left


class _LimitedBuilder(PlanBuilder):
    """Writes into another builder's plan, on its dry run, within a share of the room.

    What it may take is what its share has left, and the builder that it was made within.

    Args:
        whole: the builder that holds the plan.
        outer: the share that it was made within; None: within the whole room.
        share_bytes: bytes that it may take of each pool; a pool that is not named is not limited.
        make_room: called before bytes are taken that a pool of the share lacks; it frees places.
    """

    def __init__(
        self,
        whole: DryRunPlanBuilder,
        outer: _LimitedBuilder | None,
        share_bytes: Mapping[Pool, int],
        make_room: MakeRoom | None = None,
    ) -> None:
        self._whole, self._outer, self._make_room = whole, outer, make_room
        self.share_bytes = dict(share_bytes)
        self.around: tuple[_LimitedBuilder, ...] = (self, *(() if outer is None else outer.around))

    def __bool__(self) -> bool:
        shares = self._whole._shares
        return shares is not None and shares.has_written(self)

    def room(self, pool: Pool) -> int:
        shares, around, limits = self._whole._shares, self.around, list[int]()
        if self._make_room is not None and pool in self.share_bytes:
            around = (self,)  # more than is free can be made
        else:
            limits.append(self._whole.room(pool))
        for share in around:
            if (left := share.share_bytes.get(pool)) is not None:
                limits.append(left - (shares.taken_bytes[share, pool] if shares is not None else 0))
        return min(limits)

    def held(self, place: Place) -> int:
        return self._whole.held(place)

    def holds(self, place: Place) -> bool:
        return self._whole.holds(place)

    def found(self, job: Job) -> tuple[int, ...]:
        return self._whole.found(job)

    def start_of(self, job: Job) -> int:
        return self._whole.start_of(job)

    def idle(self, pages: Sequence[int]) -> int:
        return self._whole.idle(pages)

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        if pages:
            self._check(place, self.idle(pages) * self._whole._page_nbytes)
            self._add(Share(place, pages))

    def grow(self, place: Place, nbytes: int) -> None:
        if nbytes:
            self.grow_all((Grow(place, nbytes),))

    def grow_all(self, grows: Sequence[Grow]) -> None:
        for op in grows:
            self._check(op.place, op.nbytes)
            self._write(self._whole.grow_all, (op,))

    def grow_running(self, running: RunningDecodes) -> bool:
        nbytes, pool = len(running.full) * self._whole._page_nbytes, (Tier.GPU, self._whole._device)
        if min(self.room(pool), self._whole.room(pool)) < nbytes:
            return False  # room is made for one at a time, as for decodes that no plan before had
        self._write(self._whole.grow_running, running)
        return True

    def free(self, place: Place) -> None:
        self._add(Free(place))

    def move(self, src: Place, dst: Place) -> None:
        self.copy(src, dst)
        self.free(src)

    def copy(self, src: Place, dst: Place) -> None:
        if not self.holds(dst):
            self._check(dst, self.held(src))
        self._add(Copy(src, dst))

    def launch(self, op: Compute) -> None:
        self._write(self._whole.launch, op)

    def join(self, op: Compute) -> None:
        self._write(self._whole.join, op)

    def served(self) -> tuple[Slice, ...]:
        return self._whole.served()

    def record(self, places: Mapping[int, Sequence[Place]]) -> None:
        self._write(self._whole.record, places)

    def exchange(self, op: Collective) -> None:
        self._add(op)

    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        self.launch(self._whole._served(slices, writes))

    def restart(self, job: Job) -> None:
        self._write(self._whole.restart, job)

    def refuse(self, job: Job) -> None:
        self._write(self._whole.refuse, job)

    def relay(self, job: Job, number: int) -> None:
        self._write(lambda asked: self._whole.relay(*asked), (job, number))

    def discard(self) -> None:
        self._whole._discard_share(self)

    def within(
        self, room_bytes: Mapping[Pool, int], make_room: MakeRoom | None = None
    ) -> PlanBuilder:
        return _LimitedBuilder(self._whole, self, room_bytes, make_room)

    def _add(self, op: Op | Share | Free) -> None:
        self._write(self._whole._add, op)

    def _write(self, write: Callable[[Any], object], written: object) -> None:
        self._whole._write_as(self, write, written)

    def _check(self, place: Place, nbytes: int) -> None:
        """Raises Shortage where bytes are beyond the share."""
        if (lacks := nbytes - self.room(place.pool)) > 0:
            raise Shortage(place, lacks)
        self._make(place.pool, nbytes)
        if self._outer is not None and (lacks := nbytes - self._outer.room(place.pool)) > 0:
            raise Shortage(place, lacks)

    def _make(self, pool: Pool, nbytes: int) -> None:
        """Has room made where the builder around this one lacks bytes, then around that one."""
        within = self._outer or self._whole
        if self._make_room is not None and within.room(pool) < nbytes:
            self._make_room(pool, nbytes)
        if self._outer is not None:
            self._outer._make(pool, nbytes)
