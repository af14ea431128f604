"""The check of a plan before it is booked: the rules of engine/contract/rules.py for serving.

A plan of the usual form, which is growth and then one launch, is checked where it differs from the
plan before. Any other plan is walked in its order. Decodes that go on as before are checked once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.contract.adapter_check import AdapterCheck, check_free, is_publication
from engine.contract.job import Job, named
from engine.contract.kv_check import WHOLE, Leading, PlanWalk
from engine.contract.plan import (
    TRAINING_LANES,
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
from engine.contract.records import RecordCheck, is_adoption
from engine.contract.regions import (
    Kind,
    PageSize,
    Place,
    Pool,
    Shortage,
    Tier,
    kv_place,
    told,
)
from engine.contract.rules import ContractError, Rule
from engine.contract.training_check import TrainingContract

OPERATIONS = (Compute, Copy, Collective, Grow, Share, Free)
LAUNCHED = frozenset((Compute, Copy, Collective))  # operations that run on a lane


class Books(ABC):
    """The ledger, as far as the checks read it, and its dry run."""

    page: PageSize
    pages: dict[Place, list[int]]
    open: dict[Op, None]
    capacity_bytes: dict[Pool, int]

    places_of: dict[int, dict[Place, None]]

    @abstractmethod
    def room_of(self, pool: Pool) -> int:
        """Free and coming bytes of a pool.

        Args:
            pool: a pool of the machine.

        Returns:
            The bytes.
        """

    @abstractmethod
    def keeps_pages(self, pool: Pool) -> bool:
        """Whether full pages of a pool are kept (prefix caching).

        Args:
            pool: a pool of the machine.

        Returns:
            Whether they are.
        """

    @abstractmethod
    def wrong_pages(self, pool: Pool, job: Job, pages: Sequence[int]) -> list[int]:
        """The kept pages of those given that do not hold their part of a job's beginning.

        Args:
            pool: a pool that keeps pages.
            job: the job that would start on them.
            pages: numbers of pages, in the order of the job's tokens.

        Returns:
            Numbers of the pages with other contents; [] where all fit.
        """

    @abstractmethod
    def expect(self, plan: Plan) -> None:
        """A plan is known to fit: booking it needs no dry run.

        Args:
            plan: the plan that is booked next.
        """

    @abstractmethod
    def dry_run(self, plan: Plan) -> None:
        """Tries a plan without booking it.

        Args:
            plan: the plan of a policy.

        Raises:
            Shortage: a pool lacks room.
            ContractError: the plan breaks a rule.
        """


class Jobs(ABC):
    """The jobs that wait or are in service."""

    jobs: dict[int, Job]

    @abstractmethod
    def has_started(self, job: Job) -> bool:
        """Whether a job is in service or trains.

        Args:
            job: any job.

        Returns:
            Whether it is; False for a job that waits, or that is not in `jobs`.
        """


class PlanCheck:
    """Checks the plans of a policy; it changes no books.

    Of the contents of KV places it keeps only exceptions: see PlanWalk.

    Args:
        ledger: the books.
        jobs: the jobs that wait or are in service.
        leading: gives the decodes of the plan before that head a launch; None where none do.
        lanes: compute lanes of a device.
        training: the check of training.
        is_routed: whether each device is a replica with jobs of its own.
        adapters: the check of adapters; None for a run without any.
        records: the check of records; None for a run in which no job learns.
    """

    def __init__(
        self,
        ledger: Books,
        jobs: Jobs,
        leading: Callable[[Compute], Leading | None],
        lanes: Collection[str],
        training: TrainingContract,
        is_routed: bool,
        adapters: AdapterCheck | None = None,
        records: RecordCheck | None = None,
    ) -> None:
        self._ledger, self._lists, self._leading = ledger, jobs, leading
        self._lanes, self._is_routed = lanes, is_routed
        self._training, self._adapters, self._records = training, adapters, records
        self._page, self._tables, self._open = ledger.page, ledger.pages, ledger.open
        self._jobs = jobs.jobs
        self._filled: dict[Place, int] = {}

    def left(self, job: Job) -> None:
        """A job has left: forgets its places.

        Args:
            job: the job.
        """
        if self._filled:
            for place in [p for p in self._filled if p.region.owner == job.job_id]:
                del self._filled[place]

    def check(self, plan: Any, device: int) -> None:
        """Checks a policy's answer.

        Args:
            plan: the answer, of any type.
            device: the device that the policy was asked for.

        Raises:
            ContractError: the answer is no plan, or breaks a rule; nothing is changed.
        """
        if not isinstance(plan, Plan):
            raise ContractError(Rule.ANSWER, f"{named(plan)} is no plan: return a Plan")
        try:
            if self._is_usual(plan, device):
                self._ledger.expect(plan)
            else:
                self._walk(plan, device)
        except Shortage as short:
            raise ContractError(Rule.ROOM, str(short), short.place.region.owner) from short
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ContractError(Rule.ANSWER, f"a plan that cannot be read: {error}") from error

    # ---- plans of the usual form
    def _is_usual(self, plan: Plan, device: int) -> bool:
        """Whether a plan of one step is growth and one launch that serves, and keeps all rules."""
        ops = plan.ops
        if not ops or plan.restart or plan.refuse or plan.relaid or plan.wake_ns is not None:
            return False
        if self._adapters is not None:
            return False
        launch = ops[-1]
        if type(launch) is not Compute or launch.on not in self._lanes:
            return False
        if launch.reads or launch.after or launch.again or launch.device is not device:
            return False
        slices, writes, page_nbytes = launch.slices, launch.writes, self._page.nbytes
        n, lead, taken = len(slices), 0, 0
        if type(slices) is not tuple or type(writes) is not tuple or len(writes) != n or not n:
            return False
        if launch in self._open or type(ops) is not tuple:
            return False
        if (leading := self._leading(launch)) is not None:
            if (full := leading.full) is None:
                return False
            lead, taken = len(leading.ids), len(full)
            if full and ops[:taken] != full:
                return False
        room = self._ledger.room_of((Tier.GPU, device)) - taken * page_nbytes
        if lead == n:  # only decodes that go on as before
            return room >= 0 and taken + 1 == len(ops)
        grown: dict[Place, int] = {}
        for op in ops[taken:-1]:
            if type(op) is not Grow:
                return False
            place, nbytes = op
            if type(nbytes) is not int or nbytes <= 0 or nbytes % page_nbytes:
                return False
            if place in grown:
                return False
            grown[place] = nbytes
            room -= nbytes
        if room < 0 or (lead + 1 < n and not _are_distinct(slices, lead)):
            return False
        for i in range(lead, n):
            piece, place = slices[i], writes[i]
            given: Any = piece  # compiled, what is known to be an int is one: also True
            if type(piece) is not Slice or piece[2:] != WHOLE or place in self._filled:
                return False
            job, tokens = piece.job, given[1]
            number, table = job.job_id, self._tables.get(place)
            if self._jobs.get(number) is not job or job.training is not None:
                return False
            if self._is_routed and job.device != device:
                return False
            if place != kv_place(number, Tier.GPU, device):
                return False
            if leading is not None and job._clock is leading.clock:
                return False
            context, pages = job.computed_tokens, grown.pop(place, 0) // page_nbytes
            if table is not None:
                pages += len(table)
            elif context:
                return False
            if type(tokens) is not int or not 0 < tokens <= job.remaining_tokens:
                return False
            if context + tokens > pages * self._page.tokens:
                return False
        return not grown

    # ---- any plan, in its order
    def _walk(self, plan: Plan, device: int) -> None:
        _check_form(plan)
        self._check_jobs(plan)
        if plan.relaid:
            self._check_relaid(plan)
        for op in plan.ops:
            if type(op) in (Compute, Collective):
                self._check_launch(op, device)  # type: ignore[arg-type]
        seen = set[Op]()
        for op in plan.ops:
            self._check_operation(op, seen, device)
        self._training.check(plan, device)
        if self._adapters is not None:
            self._adapters.check(plan)
        if self._records is not None:
            self._records.check(plan, device)
        self._follow(plan, device)
        self._ledger.dry_run(plan)
        self._ledger.expect(plan)

    def _follow(self, plan: Plan, device: int) -> None:
        books, jobs, leading = self._ledger, self._jobs, self._leading
        walk = PlanWalk(
            books.page, books.pages, books.places_of, jobs, leading, self._filled, plan, device
        )
        walk.walk()
        if self._records is None:
            for request in walk.recorded:
                what = "a slice is recorded, and no job learns from the request"
                raise ContractError(Rule.RECORD, what, request)

    def _check_jobs(self, plan: Plan) -> None:
        """Rules RESTART and REFUSE."""
        if not plan.restart and not plan.refuse:
            return
        sliced = {s.job.job_id for op in plan.ops if isinstance(op, Compute) for s in op.slices}
        named = set[int]()
        for rule, jobs in ((Rule.RESTART, plan.restart), (Rule.REFUSE, plan.refuse)):
            for job in jobs:
                number = job.job_id
                if self._lists.jobs.get(number) is not job:
                    raise ContractError(rule, f"{rule} of a job that is not there", number)
                if number in named:
                    raise ContractError(rule, f"{rule} of a job that is named already", number)
                if number in sliced:
                    raise ContractError(rule, f"{rule} of a job with a slice in the plan", number)
                if rule is Rule.RESTART and not self._lists.has_started(job):
                    raise ContractError(rule, "restart of a job that waits", number)
                named.add(number)

    def _check_relaid(self, plan: Plan) -> None:
        """Rule RELAID."""
        gone, named = {job.job_id for job in (*plan.restart, *plan.refuse)}, set[int]()
        launches = [op for op in (*plan.ops, *self._open) if isinstance(op, Compute)]
        launched = {piece.job.job_id for op in launches for piece in op.slices}
        for job, number in plan.relaid:
            job_id, training = job.job_id, job.training
            if self._lists.jobs.get(job_id) is not job or training is None or job_id in gone:
                raise ContractError(Rule.RELAID, "a new layout of no job that trains", job_id)
            if job_id in named:
                raise ContractError(Rule.RELAID, "two new layouts of a job", job_id)
            if not training.begins_step or job_id in launched:
                what = "a new layout in a step, or with a launch in flight or in the plan"
                raise ContractError(Rule.RELAID, what, job_id)
            count = len(self._training.layout.alternatives.get(job_id, ()))
            if type(number) is not int or not 0 <= number < count:
                what = f"layout {number!r} of {count}"
                raise ContractError(Rule.RELAID, what, job_id)
            named.add(job_id)

    def _check_operation(self, op: Any, seen: set[Op], device: int) -> None:
        """Checks an operation by itself, and against `seen`, the operations before it."""
        kind = type(op)
        if kind is Free:
            check_free(op.place)
            self._check_own(op.place, device)
        elif kind is Grow:
            self._check_grow(op, device)
        elif kind is Copy:
            self._check_place(op.dst, device)
            self._check_own(op.src, device)
            ends = [p.device for p in (op.src, op.dst) if p.tier is Tier.GPU]
            what = f"copy of {told(op.src)}"
            if ends and device not in ends:
                raise ContractError(Rule.DEVICE, f"{what} in a plan for device {device}")
            is_moved = op.src[0] != op.dst[0]
            publishes = is_moved and self._adapters is not None and is_publication(op)
            adopts = is_moved and self._records is not None and is_adoption(op)
            if op.src == op.dst or (is_moved and not publishes and not adopts):
                what += f" onto {told(op.dst)}: a copy keeps its region"
                raise ContractError(Rule.COPY, what)
        elif kind is Share:
            self._check_place(op.place, device)
            self._check_share(op)
        if kind in LAUNCHED:
            if op in self._open:
                what = f"{named(op)} is in flight already: make a new one for each plan"
                raise ContractError(Rule.OPERATION, what)
            if op in seen:
                raise ContractError(Rule.OPERATION, f"{named(op)} is twice in the plan")
            seen.add(op)

    def _check_share(self, op: Share) -> None:
        """Rule SHARE, but for what the dry run checks."""
        number, pool = op.place.region.owner, op.place.pool
        job = self._jobs.get(number)
        if job is None or job.training is not None or not self._ledger.keeps_pages(pool):
            what = "pages are shared for a job that is there, with prefix caching"
            raise ContractError(Rule.SHARE, what, number)
        if type(op.pages) is not tuple or not op.pages or len({*op.pages}) != len(op.pages):
            raise ContractError(Rule.SHARE, "shared pages are a tuple, and none is twice", number)
        if len(op.pages) * self._page.tokens >= job.known_tokens:
            raise ContractError(Rule.SHARE, "its last token must be computed", number)
        if wrong := self._ledger.wrong_pages(pool, job, op.pages):
            what = f"it would start on pages {wrong}, which hold other tokens"
            raise ContractError(Rule.SHARE, what, number)

    def _check_grow(self, op: Grow, device: int) -> None:
        """Rules PLACE and BYTES."""
        place, nbytes, size = op.place, op.nbytes, self._page.nbytes
        owner, is_kv = place.region.owner, place.region.kind is Kind.KV
        self._check_place(place, device)
        if place.tier is Tier.GPU and place.device != device:
            raise ContractError(Rule.DEVICE, f"{told(place)} grows in a plan for device {device}")
        if type(nbytes) is not int or nbytes < 0:
            what = f"{told(place)} takes {nbytes!r} bytes: not whole, or below zero"
            raise ContractError(Rule.BYTES, what)
        if is_kv and nbytes % size:
            what = f"{told(place)} takes {nbytes} bytes: no whole pages of {size}"
            raise ContractError(Rule.BYTES, what)
        if owner not in self._jobs:
            what = f"{told(place)} takes bytes for a job that is not there"
            raise ContractError(Rule.JOB, what, owner)

    def _check_place(self, place: Place, device: int) -> None:
        """Rule PLACE, for places that may be new; rule HELD covers all others."""
        if place[1:] not in self._ledger.capacity_bytes:
            raise ContractError(Rule.PLACE, f"{told(place)} lies in no pool of this machine")
        (owner, kind, part, slot), _, _ = place
        if kind is Kind.KV and (part or slot):
            raise ContractError(Rule.PLACE, "KV of a job is one region: part 0, slot 0", owner)
        self._check_own(place, device)

    def _check_own(self, place: Place, device: int) -> None:
        if self._is_routed and place.device != device:
            raise ContractError(Rule.PLACE, f"{told(place)} is another replica's")

    def _check_launch(self, op: Compute | Collective, device: int) -> None:
        """Rules DEVICE, JOB, ONCE and LANE."""
        if type(op.device) is not int or op.device != device:
            raise ContractError(
                Rule.DEVICE, f"{named(op)} of device {op.device} in a plan for {device}"
            )
        if type(op.reads) is not tuple or type(op.writes) is not tuple:
            raise ContractError(Rule.ANSWER, "reads and writes are tuples of places")
        if isinstance(op, Collective):
            if type(op.nbytes) is not int or op.nbytes < 0:
                raise ContractError(Rule.BYTES, f"an exchange of {op.nbytes!r} bytes")
            return
        if type(op.slices) is not tuple or not op.slices or type(op.after) is not tuple:
            raise ContractError(Rule.ANSWER, "a launch has a tuple of slices, and at least one")
        serves, seen = False, set[int]()
        for piece in op.slices:
            if type(piece) is not Slice or not isinstance(piece.job, Job):
                raise ContractError(Rule.ANSWER, f"{named(piece)} is no slice of a job")
            job, number = piece.job, piece.job.job_id
            if self._jobs.get(number) is not job:
                raise ContractError(Rule.JOB, "a slice of a job that is not there", number)
            if self._is_routed and job.device not in (None, device):
                raise ContractError(Rule.JOB, f"a slice of a job of device {job.device}", number)
            if job.training is None:
                given: Any = piece  # compiled, what is known to be an int is one: also True
                if type(given[1]) is not int or given[1] < 1:
                    what = f"a slice of {given[1]!r} tokens: whole, and 1 or more"
                    raise ContractError(Rule.TOKENS, what, number)
                if number in seen:
                    raise ContractError(Rule.ONCE, "two slices of one job in a launch", number)
                seen.add(number)
                serves = True
        if op.on not in self._lanes and (serves or op.on not in TRAINING_LANES):
            known = ", ".join(map(str, self._lanes))
            raise ContractError(Rule.LANE, f"a launch on lane {op.on!r}; the device has {known}")
        if serves and op.again:
            raise ContractError(Rule.TOKENS, "a launch that serves is no recompute: restart jobs")


def _check_form(plan: Plan) -> None:
    """Rule ANSWER."""
    for name in ("ops", "restart", "refuse", "relaid"):
        if type(getattr(plan, name)) is not tuple:
            what = f"{name} of a plan is {named(getattr(plan, name))}: it must be a tuple"
            raise ContractError(Rule.ANSWER, what)
    if plan.wake_ns is not None and type(plan.wake_ns) is not int:
        raise ContractError(Rule.ANSWER, f"wake_ns is {plan.wake_ns!r}: whole nanoseconds, or None")
    for op in plan.ops:
        if type(op) not in OPERATIONS:
            raise ContractError(Rule.ANSWER, f"{named(op)} is no operation of a plan")
        if isinstance(op, Compute) and any(
            type(s) is not Slice or not isinstance(s.job, Job) for s in op.slices
        ):
            raise ContractError(Rule.ANSWER, "a launch has slices of jobs")
    for job in (*plan.restart, *plan.refuse):
        if not isinstance(job, Job):
            raise ContractError(Rule.ANSWER, f"{named(job)} is no job")
    for one in plan.relaid:
        if type(one) is not Relaid or not isinstance(one.job, Job):
            raise ContractError(Rule.ANSWER, f"{named(one)} is no new layout of a job")


def _are_distinct(slices: Sequence[Slice], lead: int) -> bool:
    count = len(slices) - lead
    return count < 2 or len({piece[0].job_id for piece in slices[lead:]}) == count
