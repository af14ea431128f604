"""What all paged memory policies share: seating wanted slices in the pages of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.draft import Draft
from engine.job import Job
from engine.plan import Kind, Place, Plan, Slice, Tier, kv_place
from engine.view import View

Demand = Callable[[Slice], int]  # bytes of KV that a job must hold to run a slice
Preempt = Callable[[Draft, Job], None]  # takes all of a job's KV off the device


class Seating:
    """Walks the wanted slices in order and drafts a plan for as many as fit.

    A running job may preempt less wanted ones (later in the batch, or not in it). A job that holds
    nothing on the device, because it waits or was swapped out, takes only free room, keeps
    `watermark` of the pool free unless it is alone, and stays out after any preemption; who waits
    also stays behind those swapped out. Rests on coming bytes, so it may wait for a copy but
    decides the same in every backend.
    """

    def __init__(
        self,
        batch: Sequence[Slice],
        view: View,
        demand: Demand,
        preempt: Preempt | None = None,
        watermark: float = 0.0,
    ) -> None:
        self._batch, self._view, self._demand, self._preempt = batch, view, demand, preempt
        self._draft = Draft(view)
        self._pool = (Tier.GPU, view.device)
        self._watermark_bytes = int(watermark * view.capacity_bytes[self._pool])
        self._seated: list[Slice] = []
        self._victims = self._less_wanted()
        self._preempted: set[int] = set()
        self._closed = False  # nobody new comes in
        self._away = sum(1 for job in view.serving if not self._draft.held(self._here(job)))

    def plan(self) -> Plan:
        """The drafted plan; empty where nothing fits."""
        for piece in self._batch:
            if piece.job.job_id in self._preempted:
                continue
            holds = self._draft.held(self._here(piece.job))
            if self._seat_running(piece) if holds else self._seat_new(piece):
                self._seated.append(piece)
        if self._seated:
            self._draft.compute(self._seated, [self._here(s.job) for s in self._seated])
        return self._draft.plan()

    def _here(self, job: Job) -> Place:
        return kv_place(job.job_id, Tier.GPU, self._view.device)

    def _less_wanted(self) -> list[Job]:
        """Jobs in service, most wanted first: in the order of the batch, then all others."""
        if self._preempt is None:
            return []
        batch = {piece.job.job_id: piece.job for piece in self._batch}
        others = [job for job in self._view.serving if job.job_id not in batch]
        return [*batch.values(), *others]

    def _seat_running(self, piece: Slice) -> bool:
        here = self._here(piece.job)
        need = self._demand(piece) - self._draft.held(here)
        while need > self._draft.room(self._pool) and self._take_from_victim(piece.job):
            self._closed = True
        if need > self._draft.room(self._pool):
            self._refuse_if_hopeless(piece)
            self._closed = True
            return False
        self._draft.grow(here, max(0, need))
        return True

    def _take_from_victim(self, taker: Job) -> bool:
        while self._victims and self._victims[-1] is not taker:
            victim = self._victims.pop()
            if self._draft.held(self._here(victim)) and self._preempt is not None:
                self._preempt(self._draft, victim)
                self._preempted.add(victim.job_id)
                return True
        return False

    def _seat_new(self, piece: Slice) -> bool:
        away = self._draft.held(kv_place(piece.job.job_id, Tier.HOST))
        need, keep = self._demand(piece), self._watermark_bytes if self._view.serving else 0
        full = need + keep > self._draft.room(self._pool)
        if self._closed or full or (self._away and not away):
            if full:
                self._refuse_if_hopeless(piece)
            self._closed = True
            return False
        here = self._here(piece.job)
        if away:
            self._draft.move(kv_place(piece.job.job_id, Tier.HOST), here)
            self._away -= 1
        self._draft.grow(here, need - away)
        return True

    def _refuse_if_hopeless(self, piece: Slice) -> None:
        """Refuses a job that would not fit into the pool even if it were alone."""
        held = self._view.held_bytes.items()
        fixed = sum(n for p, n in held if p.pool == self._pool and p.region.kind is not Kind.KV)
        if self._demand(piece) > self._view.capacity_bytes[self._pool] - fixed:
            self._draft.refuse(piece.job)
