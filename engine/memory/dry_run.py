"""The dry run of a plan, which books nothing, and the plan builder of memory policies over it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.contract.adapter_check import adapters_of, is_publication
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
from engine.contract.records import is_adoption
from engine.contract.regions import Kind, Place, Pool, Shortage, Tier, told
from engine.contract.rules import ContractError, Rule
from engine.contract.view import KeptPages, RunningDecodes, View
from engine.memory.room_shares import Parts, RoomShares, count_kept

UNKNOWN = -1  # bytes of a place that was not looked at yet
NO_PAGES: Mapping[Pool, KeptPages] = MappingProxyType({})


class DryRun:
    """What pools and places would hold while a plan is applied, operation by operation.

    The ledger uses it to check a plan, the plan builder to write one. Neither is changed.

    Args:
        room_bytes: free and coming bytes of each pool.
        held_bytes: bytes of each place that is held.
        page_runs: dry runs on pages, for pools where jobs share them.
        page_nbytes: bytes of a KV page.
    """

    def __init__(
        self,
        room_bytes: Mapping[Pool, int],
        held_bytes: Mapping[Place, int],
        page_runs: Mapping[Pool, KeptPages] = NO_PAGES,
        page_nbytes: int = 0,
    ) -> None:
        self.room_bytes = dict(room_bytes)
        self._page_runs, self._page_nbytes = page_runs, page_nbytes
        self._held = held_bytes
        self._unentered: Sequence[Grow] = ()  # growth that `_known` lacks yet
        self._known = dict[Place, int | None]()  # places that were looked at; None: not held

    def held(self, place: Place) -> int | None:
        """Bytes at a place, None where nothing is."""
        if self._unentered:
            self._catch_up()
        found = self._known.get(place, UNKNOWN)
        if found == UNKNOWN:
            found = self._known[place] = self._held.get(place)
        return found

    def grow(self, place: Place, nbytes: int) -> None:
        """Takes bytes. Raises Shortage and changes nothing where they are not there."""
        _, tier, device = place
        pool = (tier, device)
        left = self.room_bytes[pool] - nbytes
        if left < 0:
            raise Shortage(place, -left)
        self.room_bytes[pool] = left
        before = self._known.get(place, UNKNOWN)
        if before == UNKNOWN:
            before = self._held.get(place)
        self._known[place] = (before or 0) + nbytes  # the unentered may be added behind
        if self._page_runs and (pages := self._page_runs.get(pool)):
            if place.region.kind is Kind.KV:
                pages.take(place, nbytes // self._page_nbytes)
            else:
                pages.lend(left)

    def grow_held(self, pool: Pool, grows: Sequence[Grow], nbytes: int) -> None:
        """Takes `nbytes` in all for held places of a pool; the caller has seen that they fit.

        The bytes of each place are added when a place is looked at: most plans look at none.
        """
        if self._page_runs:
            for op in grows:
                self.grow(op.place, op.nbytes)
            return
        if self._unentered:
            self._catch_up()
        self.room_bytes[pool] -= nbytes
        self._unentered = grows

    def _catch_up(self) -> None:
        grows, self._unentered = self._unentered, ()
        for place, nbytes in grows:
            before = self._known.get(place, UNKNOWN)
            if before == UNKNOWN:
                before = self._held.get(place)
            self._known[place] = (before or 0) + nbytes

    def share(self, op: Share) -> None:
        """Starts a place on pages; pages without a holder take room. Shortage as in `grow`."""
        place, pages = op.place, self._page_run(op.place)
        if pages is None:
            raise ContractError(
                Rule.SHARE, f"pages for {told(place)}: the policy has no prefix caching"
            )
        if self.held(place) is not None:
            raise ContractError(Rule.SHARE, f"pages for {told(place)}, which holds some")
        left = self.room_bytes[place.pool] - pages.idle(op.pages) * self._page_nbytes
        if left < 0:
            raise Shortage(place, -left)
        pages.share(place, op.pages)
        self.room_bytes[place.pool] = left
        self._known[place] = len(op.pages) * self._page_nbytes

    def free(self, place: Place) -> None:
        """Gives a place back."""
        nbytes = self.held(place)
        if nbytes is None:
            raise ContractError(Rule.HELD, f"free of {told(place)}, which is not held")
        pages = self._page_runs.get(place.pool) if self._page_runs else None
        is_kv = place.region.kind is Kind.KV
        if pages is not None and is_kv:
            nbytes = pages.free(place) * self._page_nbytes
        self.room_bytes[place.pool] += nbytes
        self._known[place] = None
        if pages is not None and not is_kv:
            pages.lend(self.room_bytes[place.pool])

    def copy(self, op: Copy) -> None:
        """Books a new destination. An existing one must have the size of the source."""
        nbytes = self.held(op.src)
        if nbytes is None:
            raise ContractError(Rule.HELD, f"copy of {told(op.src)}, which is not held")
        there = self.held(op.dst)
        is_same = op.src.region == op.dst.region or is_publication(op) or is_adoption(op)
        if there not in (None, nbytes) or not is_same:
            raise ContractError(Rule.COPY, f"copy of {nbytes} bytes onto {there} at {told(op.dst)}")
        if there is None:
            self.grow(op.dst, nbytes)

    def compute(self, op: Compute, lead: int = 0) -> None:
        """Checks that all places of a launch are held, and lie where it runs.

        The first `lead` places that it writes are known to be.
        """
        tier, device = (Tier.HOST, 0) if op.on == "cpu" else (Tier.GPU, op.device)
        held, known = self._held, self._known
        for place in (*op.reads, *op.writes[lead:]):
            nbytes = known.get(place, UNKNOWN)
            is_held = place in held if nbytes == UNKNOWN else nbytes is not None
            if not is_held:
                raise ContractError(Rule.HELD, f"launch touches {told(place)}, which is not held")
            if place[1] is not tier or (tier is Tier.GPU and place[2] != device):
                raise ContractError(Rule.TIER, f"launch on {op.lane} touches {told(place)}")
        for place in op.after:
            if self.held(place) is None:
                raise ContractError(Rule.HELD, f"launch waits for {told(place)}, which is not held")

    def collective(self, op: Collective) -> None:
        """Checks that all places of an exchange are held, and lie on its device."""
        for place in (*op.reads, *op.writes):
            if self.held(place) is None:
                raise ContractError(
                    Rule.HELD, f"{op.pattern} touches {told(place)}, which is not held"
                )
            if place.pool != (Tier.GPU, op.device):
                raise ContractError(Rule.TIER, f"{op.pattern} on {op.lane} touches {told(place)}")

    def _page_run(self, place: Place) -> KeptPages | None:
        return self._page_runs.get(place.pool) if place.region.kind is Kind.KV else None

    def apply(self, op: Op | Grow | Share | Free, lead: int = 0) -> None:
        """One operation of a plan, in order."""
        if isinstance(op, Free):
            self.free(op.place)
        elif isinstance(op, Grow):
            is_kv = op.place.region.kind is Kind.KV
            is_whole = op.nbytes >= 0 and not (is_kv and op.nbytes % self._page_nbytes)
            if not is_whole:
                what = f"{told(op.place)} takes {op.nbytes} bytes: below zero, or no whole pages"
                raise ContractError(Rule.BYTES, what)
            self.grow(op.place, op.nbytes)
        elif isinstance(op, Compute):
            self.compute(op, lead)
        elif isinstance(op, Copy):
            self.copy(op)
        elif isinstance(op, Collective):
            self.collective(op)
        else:
            assert isinstance(op, Share)
            self.share(op)

    def run(self, plan: Plan, lead: int = 0) -> None:
        """The whole plan. Raises Shortage where it does not fit. For `lead` see `compute`."""
        for op in plan.ops:
            self.apply(op, lead)


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

    _shares: RoomShares | None = None  # of the room; None where no share has written

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
        self,
        room_bytes: Mapping[Pool, int],
        make_room: MakeRoom | None = None,
        gives_way: Collection[Place] = (),
    ) -> PlanBuilder:
        return _LimitedBuilder(self, None, room_bytes, make_room, gives_way)

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
        self._shares = shares = self._shares or RoomShares(([], [], [], []))
        parts, before = self._parts, dict(self._dry_run.room_bytes)
        shares.sign(None, parts)
        count_kept(share, written, self._pages, before)
        write(written)
        shares.sign(share, parts)
        shares.charge(share, before, self._dry_run.room_bytes)

    def _discard_share(self, share: _LimitedBuilder) -> None:
        """Takes back what a share has written, and tries all other operations again in order."""
        if self._shares is None:
            return
        self._shares.sign(None, self._parts)
        kept, writers = self._shares.without(share, self._parts)
        shares, (pages, dry_run) = RoomShares(writers), self._begun()
        for op, writer in zip(kept[0], writers[0], strict=True):
            before = dict(dry_run.room_bytes)
            if writer is not None:
                count_kept(writer, op, pages, before)
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


class _LimitedBuilder(PlanBuilder):
    """Writes into another builder's plan, on its dry run, within a share of the room.

    What it may take is what its share has left, and the builder that it was made within.

    Args:
        whole: the builder that holds the plan.
        outer: the share that it was made within; None: within the whole room.
        share_bytes: bytes that it may take of each pool; a pool that is not named is not limited.
        make_room: called before bytes are taken that a pool of the share lacks; it frees places.
        gives_way: what it may free.
    """

    def __init__(
        self,
        whole: DryRunPlanBuilder,
        outer: _LimitedBuilder | None,
        share_bytes: Mapping[Pool, int],
        make_room: MakeRoom | None = None,
        gives_way: Collection[Place] = (),
    ) -> None:
        self._whole, self._outer, self._make_room = whole, outer, make_room
        self.gives_way: Collection[Place] = gives_way
        if outer is not None and outer.gives_way:
            self.gives_way = {*gives_way, *outer.gives_way}
        self.share_bytes: Mapping[Pool, int] = dict(share_bytes)
        self.around: tuple[_LimitedBuilder, ...] = (self, *(() if outer is None else outer.around))

    @property
    def page_nbytes(self) -> int:
        return self._whole._page_nbytes

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
        kept = self._whole._pages
        return kept.idle(pages, self.gives_way) if kept else 0

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        if not pages:
            return
        made = self._whole.idle(pages)
        self._check(place, self.idle(pages) * self.page_nbytes, made * self.page_nbytes)
        while made != (idle := self._whole.idle(pages)):  # what gave way held some of them
            made = idle
            self._make(place.pool, idle * self.page_nbytes)
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
        self,
        room_bytes: Mapping[Pool, int],
        make_room: MakeRoom | None = None,
        gives_way: Collection[Place] = (),
    ) -> PlanBuilder:
        return _LimitedBuilder(self._whole, self, room_bytes, make_room, gives_way)

    def _add(self, op: Op | Share | Free) -> None:
        self._write(self._whole._add, op)

    def _write(self, write: Callable[[Any], object], written: object) -> None:
        self._whole._write_as(self, write, written)

    def _check(self, place: Place, nbytes: int, taken_bytes: int | None = None) -> None:
        """Raises Shortage where bytes are beyond the share; so many of them are taken now."""
        if (lacks := nbytes - self.room(place.pool)) > 0:
            raise Shortage(place, lacks)
        self._make(place.pool, nbytes if taken_bytes is None else taken_bytes)
        if self._outer is not None and (lacks := nbytes - self._outer.room(place.pool)) > 0:
            raise Shortage(place, lacks)

    def _make(self, pool: Pool, nbytes: int) -> None:
        """Has room made where the builder around this one lacks bytes, then around that one."""
        within = self._outer or self._whole
        if self._make_room is not None and within.room(pool) < nbytes:
            self._make_room(pool, nbytes)
        if self._outer is not None:
            self._outer._make(pool, nbytes)
