"""The check of a plan before it is booked: the rules of engine/contract/rules.py for serving.

A plan of the usual form, which is growth and then one launch, is checked where it differs from the
plan before. Any other plan is walked in its order. Decodes that go on as before are checked once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from engine.contract.job import Job, TokenClock
from engine.contract.plan import (
    HOST_LANE,
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Op,
    Plan,
    Share,
    Slice,
)
from engine.contract.policy import named
from engine.contract.regions import (
    SHARED_OWNER,
    Kind,
    PageSize,
    Place,
    Pool,
    Tier,
    Work,
    kv_place,
    told,
)
from engine.contract.rules import ContractError, Rule
from engine.contract.training_check import TrainingContract

WHOLE = (Work.FORWARD, None, 0, 0, False)  # fields of a served slice behind job and tokens
GONE = -1  # tokens of a place that is not held
OPERATIONS = (Compute, Copy, Collective, Grow, Share, Free)
LAUNCHED = frozenset((Compute, Copy, Collective))  # operations that run on a lane


class Leading(NamedTuple):
    """Decodes of the plan before that head a launch in their order, and go on as before.

    Attributes:
        ids: their jobs.
        full: a page for each decode whose pages are full; None where that is not known.
        clock: the clock that they move with.
    """

    ids: tuple[int, ...]
    full: tuple[Grow, ...] | None
    clock: TokenClock


class Books(ABC):
    """The ledger, as far as the checks read it, and its dry run."""

    page: PageSize
    pages: dict[Place, list[int]]
    open: dict[Op, None]
    capacity_bytes: dict[Pool, int]

    places_of: dict[int, dict[Place, None]]

    @abstractmethod
    def room_of(self, pool: Pool) -> int:
        """Free and coming bytes of a pool."""

    @abstractmethod
    def keeps_pages(self, pool: Pool) -> bool:
        """Whether full pages of a pool are kept (prefix caching)."""

    @abstractmethod
    def wrong_pages(self, pool: Pool, job: Job, pages: Sequence[int]) -> list[int]:
        """The kept pages of those given that do not hold their part of a job's beginning."""

    @abstractmethod
    def expect(self, plan: Plan) -> None:
        """A plan is known to fit: booking it needs no dry run."""

    @abstractmethod
    def dry_run(self, plan: Plan) -> None:
        """Raises Shortage or ContractError where a plan cannot be booked."""


class Jobs(ABC):
    """The jobs that wait or are in service."""

    jobs: dict[int, Job]

    @abstractmethod
    def has_started(self, job: Job) -> bool:
        """Whether a job is in service or trains."""


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
    """

    def __init__(
        self,
        ledger: Books,
        jobs: Jobs,
        leading: Callable[[Compute], Leading | None],
        lanes: Collection[str],
        training: TrainingContract,
        is_routed: bool,
    ) -> None:
        self._ledger, self._lists, self._leading = ledger, jobs, leading
        self._lanes, self._is_routed = lanes, is_routed
        self._training = training
        self._page, self._tables, self._open = ledger.page, ledger.pages, ledger.open
        self._jobs = jobs.jobs
        self._filled: dict[Place, int] = {}

    def left(self, job: Job) -> None:
        """A job has left: forgets its places."""
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
        except MemoryError as short:  # a Shortage of the dry run
            place: Place = short.place  # type: ignore[attr-defined]
            raise ContractError(Rule.ROOM, str(short), place.region.owner) from short
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ContractError(Rule.ANSWER, f"a plan that cannot be read: {error}") from error

    # ---- plans of the usual form
    def _is_usual(self, plan: Plan, device: int) -> bool:
        """Whether a plan of one step is growth and one launch that serves, and keeps all rules."""
        ops = plan.ops
        if not ops or plan.restart or plan.refuse or plan.wake_ns is not None:
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
            piece: Any = slices[i]  # compiled, what is known to be an int is one: also True
            place = writes[i]
            if type(piece) is not Slice or piece[2:] != WHOLE or place in self._filled:
                return False
            job, tokens = piece[0], piece[1]
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
        for op in plan.ops:
            if type(op) in (Compute, Collective):
                self._check_launch(op, device)  # type: ignore[arg-type]
        seen = set[Op]()
        for op in plan.ops:
            self._check_operation(op, seen, device)
        self._training.check(plan, device)
        self._follow(plan, device)
        self._ledger.dry_run(plan)
        self._ledger.expect(plan)

    def _follow(self, plan: Plan, device: int) -> None:
        PlanWalk(self._ledger, self._jobs, self._leading, self._filled, plan, device).walk()

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

    def _check_operation(self, op: Any, seen: set[Op], device: int) -> None:
        """Checks an operation by itself, and against `seen`, the operations before it."""
        kind = type(op)
        if kind is Free:
            if op.place.region.owner == SHARED_OWNER:
                raise ContractError(Rule.JOB, f"free of {told(op.place)}, which belongs to no job")
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
            if op.src[0] != op.dst[0] or op.src == op.dst:
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
        if op.on not in self._lanes and (serves or op.on != HOST_LANE):
            known = ", ".join(map(str, self._lanes))
            raise ContractError(Rule.LANE, f"a launch on lane {op.on!r}; the device has {known}")
        if serves and op.again:
            raise ContractError(Rule.TOKENS, "a launch that serves is no recompute: restart jobs")


class PlanWalk:
    """One walk over the operations of a plan that serves; its changes lie over the books.

    A KV place follows its job where it holds all tokens that the job has computed. `filled` has the
    tokens of every place that does not: one that was grown and not written, or a copy. A walk that
    finds no breach leaves `filled` as the plan does.
    """

    def __init__(
        self,
        ledger: Books,
        jobs: Mapping[int, Job],
        leading: Callable[[Compute], Leading | None],
        filled: dict[Place, int],
        plan: Plan,
        device: int,
    ) -> None:
        self._ledger, self._page, self._jobs = ledger, ledger.page, jobs
        self._leading, self._filled = leading, filled
        self._plan, self._device = plan, device
        self._computed: dict[int, int] = {}  # tokens of jobs that the plan moves on
        self._known: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._tokens: dict[Place, int | None] = {}  # as `filled`; None where a place follows
        self._pages: dict[Place, int] = {}
        self._sliced = {
            s.job.job_id for op in plan.ops if isinstance(op, Compute) for s in op.slices
        }
        self._given_up = {job.job_id for job in (*plan.restart, *plan.refuse)}

    def walk(self) -> None:
        """Raises ContractError where the order of the plan breaks a rule."""
        launches = [op for op in self._plan.ops if isinstance(op, Compute)]
        for op in self._plan.ops:
            if isinstance(op, Compute):
                self._compute(op, is_only=len(launches) == 1)
            elif isinstance(op, Copy):
                if op.src.region.kind is Kind.KV:
                    self._copy(op)
            elif isinstance(op, Grow | Share | Free) and op.place.region.kind is Kind.KV:
                if isinstance(op, Grow):
                    self._grow(op)
                elif isinstance(op, Share):
                    self._share(op)
                else:
                    self._free(op)
        for place, tokens in self._tokens.items():
            if tokens is None or tokens == GONE:
                self._filled.pop(place, None)
            else:
                self._filled[place] = tokens

    # ---- what is where
    def _pages_of(self, place: Place) -> int | None:
        """Pages of a place; None where it is not held."""
        if place in self._pages:
            found = self._pages[place]
            return None if found == GONE else found
        table = self._ledger.pages.get(place)
        return None if table is None else len(table)

    def _computed_of(self, job: Job) -> int:
        return self._computed.get(job.job_id, job.computed_tokens)

    def _tokens_of(self, place: Place, job: Job) -> int:
        """The tokens of a job whose keys and values a place holds."""
        if self._pages_of(place) is None:
            return GONE
        found = self._tokens.get(place, self._filled.get(place))
        return self._computed_of(job) if found is None else found

    def _others(self, place: Place) -> list[Place]:
        """Other places that hold the KV of this one's job."""
        booked = self._ledger.places_of.get(place.region.owner, ())
        return [
            other
            for other in dict.fromkeys((*booked, *self._pages))
            if other != place and other.region == place.region and self._pages_of(other) is not None
        ]

    # ---- operations
    def _grow(self, op: Grow) -> None:
        place, pages = op.place, self._pages_of(op.place)
        if pages is None:
            self._tokens[place] = 0
        self._pages[place] = (pages or 0) + op.nbytes // self._page.nbytes

    def _share(self, op: Share) -> None:
        place, number = op.place, op.place.region.owner
        job, tokens = self._jobs.get(number), len(op.pages) * self._page.tokens
        if job is None or self._computed_of(job) or number not in self._sliced:
            what = "a job shares pages where it begins, with a slice behind them"
            raise ContractError(Rule.SHARE, what, number)
        self._computed[number] = tokens
        self._tokens[place], self._pages[place] = None, len(op.pages)

    def _copy(self, op: Copy) -> None:
        src, dst, job = op.src, op.dst, self._jobs.get(op.src.region.owner)
        pages = self._pages_of(src)
        if pages is None:
            raise ContractError(Rule.HELD, f"copy of {told(src)}, which is not held")
        if job is None or job.training is not None:
            return
        tokens, there = self._tokens_of(src, job), self._tokens_of(dst, job)
        if there > tokens:
            raise ContractError(
                Rule.COPY,
                f"copy of {tokens} tokens from {src.tier} over {there} newer ones on {dst.tier}",
                job.job_id,
            )
        if there < tokens:
            self._tokens[dst] = tokens
        self._pages[dst] = pages

    def _free(self, op: Free) -> None:
        place, number = op.place, op.place.region.owner
        job = self._jobs.get(number)
        if job is not None and job.training is None and number not in self._given_up:
            computed = self._computed_of(job)
            rest = [self._tokens_of(other, job) for other in self._others(place)]
            if computed and max(rest, default=GONE) < computed:
                what = "its only KV is freed: name the job in `restart`"
                raise ContractError(Rule.KV_FREED, what, number)
        self._pages[place] = self._tokens[place] = GONE

    def _compute(self, op: Compute, is_only: bool) -> None:
        served = [piece for piece in op.slices if piece.job.training is None]
        own = {kv_place(piece.job.job_id, Tier.GPU, self._device) for piece in served}
        for place in op.writes:
            if place.region.kind is Kind.KV and place not in own:
                owner = self._jobs.get(place.region.owner)
                if owner is None or owner.training is None:
                    what = "its KV is written without a slice"
                    raise ContractError(Rule.OWN_KV, what, place.region.owner)
        written = set(op.writes)
        for piece in self._to_look_at(op, served) if is_only else served:
            self._serve(piece, written)

    def _to_look_at(self, op: Compute, served: Sequence[Slice]) -> Sequence[Slice]:
        """The slices to check: decodes that go on as before have room in their last pages."""
        leading = self._leading(op)
        if leading is None or leading.full is None:
            return served
        moved = {place.region.owner for place in self._pages}
        moved.update([due.place.region.owner for due in leading.full])
        moved &= {*leading.ids}
        looked = [op.slices[leading.ids.index(number)] for number in moved]
        return [*looked, *[s for s in op.slices[len(leading.ids) :] if s.job.training is None]]

    def _serve(self, piece: Slice, written: Collection[Place]) -> None:
        job, number = piece.job, piece.job.job_id
        computed, place = self._computed_of(job), kv_place(number, Tier.GPU, self._device)
        known = self._known.get(number, job.known_tokens)
        if number in self._known:
            what = "a slice behind its next token, with which it may have ended"
            raise ContractError(Rule.ONCE, what, number)
        recorded = self._recorded.get(number, job.recorded_tokens)
        _check_slice(piece, known - computed, is_gapless=recorded == computed)
        if piece.record:
            self._recorded[number] = recorded + piece.tokens
        pages = self._pages_of(place)
        if pages is None:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not held", number)
        if place not in written:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not among the writes", number)
        if computed + piece.tokens > pages * self._page.tokens:
            what = f"{pages} pages of {self._page.tokens} for {computed} + {piece.tokens} tokens"
            raise ContractError(Rule.KV_PAGES, what, number)
        there = self._tokens_of(place, job)
        if there < computed:
            what = f"{told(place)} holds {there} of its {computed} tokens"
            raise ContractError(Rule.KV_CONTENTS, what, number)
        if self._tokens.get(place, self._filled.get(place)) is not None:
            for other in self._others(place):  # places that followed the job stay behind
                self._tokens[other] = self._tokens_of(other, job)
        self._tokens[place] = None
        if piece.tokens == known - computed:
            self._known[number] = known + 1
        self._computed[number] = computed + piece.tokens


def _check_slice(piece: Slice, remaining_tokens: int, is_gapless: bool) -> None:
    """Rule TOKENS. `is_gapless`: whether activations of all computed tokens are kept."""
    given: Any = piece  # compiled, what is known to be an int is one: also True
    number, tokens = piece.job.job_id, given[1]
    if piece[2:-1] != WHOLE[:-1]:
        what = "a served slice goes forward through all layers, and no more"
        raise ContractError(Rule.TOKENS, what, number)
    if type(tokens) is not int or not 0 < tokens <= remaining_tokens:
        what = f"a slice of {tokens!r} tokens, but {remaining_tokens} remain"
        raise ContractError(Rule.TOKENS, what, number)
    if piece.record and not is_gapless:
        raise ContractError(Rule.TOKENS, "a record is a gapless prefix", number)


def _check_form(plan: Plan) -> None:
    """Rule ANSWER."""
    for name in ("ops", "restart", "refuse"):
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


def _are_distinct(slices: Sequence[Slice], lead: int) -> bool:
    count = len(slices) - lead
    return count < 2 or len({piece[0].job_id for piece in slices[lead:]}) == count
