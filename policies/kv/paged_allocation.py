"""What all paged memory policies share: the slices of a batch get pages of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Kind, Place, Tier, kv_place
from engine.contract.view import View

Demand = Callable[[Slice], int]  # bytes of KV that a job must hold to run a slice
Preempt = Callable[[Job], None]  # writes what takes all of a job's KV off the device
PROMPTS = ("as_computed", "must_fit", "reserved")


@dataclass(frozen=True)
class PagedRules:
    """How engines differ in allocating pages (vLLM, SOSP'23, and its later versions).

    Args:
        watermark: share of the KV pool, in whole pages, that an admission leaves free.
        prompts: when the pages of a prompt are allocated. `as_computed`: slice by slice.
            `must_fit`: slice by slice, but the whole prompt must find room at its admission.
            `reserved`: all of them at its admission.
        spare_pages: pages that must be free for a decode to run, also where it needs none.
        gives_way: a running job that finds no victim is preempted itself; else it waits.
        prefix_caching: full pages are kept when no job holds them, and an admitted job starts on
            the kept pages of its prefix.
        swapped_first: no waiting job is admitted while a job is swapped out, and one that finds no
            room keeps all jobs behind it out (vLLM). If False, a waiting job may take the room that
            a swapped-out job is too large for: that job may then stay out long.

    Raises:
        ValueError: `watermark` is not in [0, 1), `prompts` is none of the three, or `spare_pages`
            is below 0.
    """

    watermark: float = 0.01
    prompts: str = "as_computed"
    spare_pages: int = 0
    gives_way: bool = False
    prefix_caching: bool = False
    swapped_first: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise ValueError(f"paged memory: watermark is {self.watermark}, must be in [0, 1)")
        if self.prompts not in PROMPTS:
            raise ValueError(f"paged memory: prompts is {self.prompts!r}, not of {PROMPTS}")
        if self.spare_pages < 0:
            raise ValueError(
                f"paged memory: spare_pages is {self.spare_pages}, must not be below 0"
            )

    @property
    def traits(self) -> Traits:
        """A running job takes a page when its last page is full, and at no other time."""
        return Traits(
            kv_growth="page", spare_pages=self.spare_pages, prefix_caching=self.prefix_caching
        )

    def paged_demand(self, view: View) -> Demand:
        """The bytes of the pages that a job must hold to run a slice.

        Args:
            view: the view that the slices are of.

        Returns:
            A function from a slice to bytes of whole pages.
        """
        (page_tokens, page_nbytes), is_reserved = view.page, self.prompts == "reserved"

        def demand(piece: Slice) -> int:  # PageSize.bytes_for in line: called for every slice
            job = piece.job
            tokens = job.known_tokens if is_reserved else job.computed_tokens + piece.tokens
            return -(-tokens // page_tokens) * page_nbytes

        return demand


NO_RULES = PagedRules(watermark=0.0)


class PagedAllocation:
    """Walks a batch in its order and writes a plan for the slices that find their pages.

    A running job that finds no free page preempts jobs behind it: later in the batch, or not in it.
    A job without KV on the device, because it waits or was swapped out, is admitted under these
    conditions:

    - Its pages fit into free room, and the watermark stays free beside them. The watermark does not
      count where no job in service has KV on the device.
    - The plan has preempted no job.
    - If it waits, no swapped-out job is left (unless the rules say `swapped_first=False`).

    Room counts coming bytes. So a launch may wait for a copy, but the plan is alike in every
    backend.

    Args:
        batch: one slice per job, the most wanted first.
        view: what the policy was shown.
        plan: where operations are written.
        demand: bytes that a job must hold to run a slice.
        preempt: takes a victim's KV off the device; None: no job is preempted.
        rules: watermark, allocation of prompts, spare pages.
    """

    def __init__(
        self,
        batch: tuple[Slice, ...],
        view: View,
        plan: PlanBuilder,
        demand: Demand,
        preempt: Preempt | None = None,
        rules: PagedRules = NO_RULES,
    ) -> None:
        self._batch, self._view, self._demand, self._preempt = batch, view, demand, preempt
        self._plan, self._rules = plan, rules
        self._pool = (Tier.GPU, view.device)
        self._spare_bytes = rules.spare_pages * view.page.nbytes
        # Running decodes take their pages together only by the usual demand.
        is_usual = type(rules).paged_demand is PagedRules.paged_demand
        self._running = view.leading_decodes(batch) if is_usual else None
        self._known = 0 if self._running is None else len(self._running.slices)
        self._slices: list[Slice] = []
        self._places: list[Place] = []
        self._preempted: set[int] = set()
        self._closed = False  # no more admissions in this plan
        # Computed at their first use: most plans never use them.
        self._away: set[int] | None = None
        self._victims: list[Job] | None = None
        self._fixed_bytes: int | None = None

    def write(self) -> None:
        """Writes the plan: none where nothing fits."""
        held_before, device = self._view.held_bytes.get, self._view.device
        demand, preempted = self._demand, self._preempted
        known = self._place_running()
        lacks_spare = self._lacks_spare
        for piece in self._batch[known:]:
            job_id = piece.job.job_id
            if job_id in preempted:
                continue
            here = kv_place(job_id, Tier.GPU, device)
            held = held_before(here, 0)  # a job has one slice, so this plan grew nothing for it
            if not held or demand(piece) > held or lacks_spare:  # else: most decodes of most steps
                placed = self._placed(piece, here, held)
                if placed is None:
                    continue
                piece, lacks_spare = placed, self._lacks_spare
            self._slices.append(piece)
            self._places.append(here)
        if self._slices:
            self._plan.compute(self._slices, self._places)

    def _place_running(self) -> int:
        """Places all running decodes together if all find their pages, spare ones included.

        Returns:
            The number of slices placed. It is 0 where pages lack: decodes that are placed one by
            one may preempt each other.
        """
        running = self._running
        if running is None:
            return 0
        need = len(running.full) * self._view.page.nbytes + self._spare_bytes
        if self._plan.room(self._pool) < need or not self._plan.grow_running(running):
            return 0
        self._slices += running.slices
        self._places += running.places
        return self._known

    def _jobs_away(self) -> set[int]:
        """Jobs in service whose KV is not on the device."""
        if self._away is None:
            behind = max(self._known, len(self._view.running_decodes()))  # decodes that run hold it
            held, jobs = self._plan.held, self._view.serving[behind:]
            away = [job.job_id for job in jobs if not held(self._here(job))] if jobs else []
            self._away = {*away}
        return self._away

    def _here(self, job: Job) -> Place:
        return kv_place(job.job_id, Tier.GPU, self._view.device)

    def _bytes_beside_kv(self) -> int:
        """Bytes of the device that hold no KV."""
        if self._fixed_bytes is None:
            held = self._view.held_bytes
            others = [place for place in held if place.region.kind is not Kind.KV]
            self._fixed_bytes = sum([held[place] for place in others if place.pool == self._pool])
        return self._fixed_bytes

    def _victims_left(self) -> list[Job]:
        """Jobs in service, the next victim last: the batch in its order, then all other jobs."""
        if self._victims is None:
            batch = {piece.job.job_id: piece.job for piece in self._batch}
            others = [job for job in self._view.serving if job.job_id not in batch]
            self._victims = [*batch.values(), *others]
        return self._victims

    @property
    def _lacks_spare(self) -> bool:
        return self._spare_bytes > self._plan.room(self._pool)

    def _placed(self, piece: Slice, here: Place, held: int) -> Slice | None:
        """The slice as it runs, None where its job finds no pages."""
        return self._place_held(piece, here, held) if held else self._admit(piece, here)

    def _place_held(self, piece: Slice, here: Place, held: int) -> Slice | None:
        need = max(0, self._demand(piece) - held)
        ask = max(need, self._spare_bytes) if self._spare_bytes and piece.tokens == 1 else need
        while ask > self._plan.room(self._pool) and self._preempt_last(piece.job):
            self._closed = True
        if ask <= self._plan.room(self._pool):
            self._plan.grow(here, need)
            return piece
        self._closed = True
        is_hopeless = self._refuse_if_hopeless(piece, held + ask)
        if self._rules.gives_way and self._preempt is not None and not is_hopeless:
            self._preempt(piece.job)
        return None

    def _preempt_last(self, taker: Job) -> bool:
        """Preempts the last job behind `taker` that has KV on the device; whether there was one."""
        preempt, victims = self._preempt, self._victims_left()
        while preempt is not None and victims and victims[-1] is not taker:
            victim = victims.pop()
            if self._plan.held(self._here(victim)):
                preempt(victim)
                self._preempted.add(victim.job_id)
                return True
        return False

    def _admit(self, piece: Slice, here: Place) -> Slice | None:
        job, page = piece.job, self._view.page
        if self._closed:
            self._refuse_if_hopeless(piece, self._whole_bytes(job, self._demand(piece)))
            return None
        away = kv_place(job.job_id, Tier.HOST, self._view.device) if job.computed_tokens else None
        swapped = self._plan.held(away) if away else 0
        found = () if away else self._plan.found(job)
        need = self._demand(piece)
        if found:
            behind = len(found) * page.tokens
            piece = piece._replace(tokens=min(piece.tokens, job.known_tokens - behind))
            need = self._demand(piece._replace(tokens=behind + piece.tokens))
        whole = self._whole_bytes(job, need)
        shared = (len(found) - self._plan.idle(found)) * page.nbytes
        full = whole - shared + self._left_free_bytes() > self._plan.room(self._pool)
        is_first = self._rules.swapped_first
        if full or (is_first and self._jobs_away() and not swapped):
            if full:
                self._refuse_if_hopeless(piece, whole)
            self._closed = is_first or not swapped
            return None
        if away and swapped:
            self._plan.move(away, here)
            self._jobs_away().discard(job.job_id)
        self._plan.share(here, found)
        self._plan.grow(here, need - swapped - len(found) * page.nbytes)
        return piece

    def _left_free_bytes(self) -> int:
        """Bytes of the watermark; 0 where no job in service has KV on the device."""
        share = self._rules.watermark
        if not share or len(self._view.serving) == len(self._jobs_away()):
            return 0
        resident = self._view.layout.places.items()
        weights = sum([nbytes for place, nbytes in resident if place.pool == self._pool])
        page, pool_bytes = self._view.page.nbytes, self._view.capacity_bytes[self._pool] - weights
        return int(share * max(0, pool_bytes) / page) * page  # a share may be less than the weights

    def _whole_bytes(self, job: Job, need: int) -> int:
        """Bytes that must find room for a job to be admitted."""
        is_whole = self._rules.prompts == "must_fit"
        return max(need, self._view.page.bytes_for(job.known_tokens)) if is_whole else need

    def _refuse_if_hopeless(self, piece: Slice, nbytes: int) -> bool:
        """Refuses a job whose bytes the pool could not hold even for this job alone."""
        if nbytes <= self._view.capacity_bytes[self._pool] - self._bytes_beside_kv():
            return False
        self._plan.refuse(piece.job)
        return True
