"""The check of a plan before it is booked: the rules of engine/contract for all that serves.

Plans of the usual form (growth, then one launch) are looked at where they differ from the plan
before. All others are walked in their order. Neither looks at decodes that go on as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.balance import Shortage
from engine.contract import ContractError, Rule
from engine.job import Job
from engine.ledger import Ledger
from engine.page_need import Part, first_lack, parts_of
from engine.plan import (
    HOST_LANE,
    SHARED_OWNER,
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    GrowCycle,
    Kind,
    Op,
    Place,
    Plan,
    Share,
    Slice,
    Tier,
    Work,
    kv_place,
)
from engine.regions import told
from engine.roster import Roster
from engine.standing import Standing
from engine.stretch import base_of
from engine.training_contract import TrainingContract
from engine.view import View

WHOLE = (Work.FORWARD, None, 0, 0, False)  # a slice of serving, but for its job and tokens
OPERATIONS = (Compute, Copy, Collective, Grow, GrowCycle, Share, Free)
GONE = -1  # tokens of a place that is not held
LAUNCHED = frozenset((Compute, Copy, Collective))  # what runs on a lane


class PlanCheck:
    """Raises ContractError where a plan breaks a rule; changes no books.

    `filled` says of KV places which do not follow their job how many of its tokens they hold: a
    place that was grown and not written, or a copy. Every other KV place of a job holds all that
    the job has computed.
    """

    def __init__(
        self,
        ledger: Ledger,
        roster: Roster,
        standing: Standing,
        tokens_left: Callable[[Job], int],
        lanes: Collection[str],
        training: TrainingContract,
        is_routed: bool,
    ) -> None:
        self._ledger, self._roster, self._standing = ledger, roster, standing
        self._tokens_left, self._lanes, self._is_routed = tokens_left, lanes, is_routed
        self._training = training
        self._page, self._tables, self._open = ledger.page, ledger.pages, ledger.open
        self._jobs = roster.jobs
        self._filled: dict[Place, int] = {}

    def left(self, job: Job) -> None:
        """A job has left: nothing needs to be known of its places."""
        if self._filled:
            for place in [p for p in self._filled if p.region.owner == job.job_id]:
                del self._filled[place]

    def check(self, plan: Any, device: int, view: View | None = None) -> None:
        """Raises ContractError where a policy's answer to a view of a device breaks a rule."""
        if not isinstance(plan, Plan):
            raise ContractError(Rule.ANSWER, f"{_named(plan)} is no plan: return a Plan")
        if type(plan.repeats) is not int or plan.repeats < 1:
            raise ContractError(Rule.REPEATS, f"repeats is {plan.repeats!r}: 1 or more, and whole")
        try:
            base = plan if view is None or plan.repeats == 1 else base_of(plan, view)
            if base is None or not self._is_usual(base, device):
                self._walk(plan, device)
            elif base is plan:
                self._ledger.expect(plan)
        except Shortage as short:  # a name of its own: compiled, a variable has one type
            raise ContractError(Rule.ROOM, str(short), short.place.region.owner) from short
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ContractError(Rule.ANSWER, f"a plan that cannot be read: {error}") from error

    # ---- plans of the usual form
    def _is_usual(self, plan: Plan, device: int) -> bool:
        """Whether a plan of one step is growth and one launch that serves, and keeps all rules."""
        ops = plan.ops
        if not ops or plan.restart or plan.refuse or plan.later or plan.wake_ns is not None:
            return False
        launch = ops[-1]
        if type(launch) is not Compute or launch.on not in self._lanes:
            return False
        if launch.reads or launch.after or launch.again or launch.device != device:
            return False
        slices, writes, page_nbytes = launch.slices, launch.writes, self._page.nbytes
        n, cohort, lead, taken = len(slices), self._standing.cohort, 0, 0
        if type(slices) is not tuple or type(writes) is not tuple or len(writes) != n or not n:
            return False
        if launch in self._open or self._is_routed:
            return False
        if cohort is not None and self._standing.leads(launch):
            if cohort.turns is None:
                return False
            full = cohort.turns[cohort.clock % self._page.tokens]
            lead, taken = len(cohort.jobs), len(full)
            if full and ops[:taken] != full:
                return False
        room = self._ledger.room_of((Tier.GPU, device)) - taken * page_nbytes
        grown: dict[Place, int] = {}
        for op in ops[taken:-1]:
            if type(op) is not Grow:
                return False
            place, nbytes, first, every = op
            if first or every or type(nbytes) is not int or nbytes <= 0 or nbytes % page_nbytes:
                return False
            grown[place] = grown.get(place, 0) + nbytes
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
            if place != kv_place(number, Tier.GPU, device) or job._moves_with(cohort):
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

    def _is_growth(self, op: Grow) -> bool:
        _, nbytes, first, every = op
        return (
            type(nbytes) is type(first) is type(every) is int
            and nbytes > 0
            and not nbytes % self._page.nbytes
            and first >= 0
            and every >= 0
        )

    def _lack(self, plan: Plan, i: int, grows: Sequence[Grow]) -> tuple[Rule, str] | None:
        """What a job lacks in a repeated plan, and at which step; None where it lacks nothing."""
        launch = plan.ops[-1]
        assert isinstance(launch, Compute)
        job, place = launch.slices[i].job, launch.writes[i]
        table = self._ledger.pages.get(place)
        if table is None and job.computed_tokens:
            return Rule.KV_CONTENTS, "its KV is not on the device"
        parts: Sequence[Part] = parts_of(plan, i)
        pages = 0 if table is None else len(table)
        return first_lack(job, pages, parts, grows, self._page, self._tokens_left(job))

    # ---- any plan, in its order
    def _walk(self, plan: Plan, device: int) -> None:
        _check_form(plan)
        self._check_jobs(plan)
        if plan.repeats > 1 or plan.later:
            self._check_repeated(plan, device)
            return
        seen = set[Op]()
        for op in plan.ops:
            self._check_operation(op, seen, device)
        self._training.check(plan, device)
        self._ledger.dry_run(plan)
        _Walk(self, plan, device).walk()
        self._ledger.expect(plan)

    def _check_jobs(self, plan: Plan) -> None:
        """Rules RESTART and REFUSE."""
        if not plan.restart and not plan.refuse:
            return
        sliced = {s.job.job_id for op in plan.ops if isinstance(op, Compute) for s in op.slices}
        named = set[int]()
        for rule, jobs in ((Rule.RESTART, plan.restart), (Rule.REFUSE, plan.refuse)):
            for job in jobs:
                number = job.job_id
                if self._roster.jobs.get(number) is not job:
                    raise ContractError(rule, f"{rule} of a job that is not there", number)
                if number in named:
                    raise ContractError(rule, f"{rule} of a job that is named already", number)
                if number in sliced:
                    raise ContractError(rule, f"{rule} of a job with a slice in the plan", number)
                if rule is Rule.RESTART and not self._roster.has_started(job):
                    raise ContractError(rule, "restart of a job that waits", number)
                named.add(number)

    def _check_operation(self, op: Any, seen: set[Op], device: int) -> None:
        """What can be said of an operation by itself, and `seen`, those before it in the plan."""
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
            if op.src[0] != op.dst[0] or op.src == op.dst:
                raise ContractError(
                    Rule.COPY,
                    f"copy of {told(op.src)} onto {told(op.dst)}: a copy keeps its region",
                )
        elif kind is Share:
            self._check_place(op.place, device)
            self._check_share(op)
        elif kind is GrowCycle:
            raise ContractError(Rule.REPEATS, "a GrowCycle stands in a repeated plan only")
        else:
            self._check_launch(op, device)
        if kind in LAUNCHED:
            if op in self._open:
                raise ContractError(Rule.OPERATION, f"{_named(op)} is in flight already")
            if op in seen:
                raise ContractError(Rule.OPERATION, f"{_named(op)} is twice in the plan")
            seen.add(op)

    def _check_share(self, op: Share) -> None:
        """Rule SHARE, as far as it can be said before the dry run."""
        number, sharing = op.place.region.owner, self._ledger.sharing.get(op.place.pool)
        job = self._jobs.get(number)
        if job is None or job.training is not None or sharing is None:
            raise ContractError(
                Rule.SHARE, "pages are shared for a job that is there, with prefix caching", number
            )
        if type(op.pages) is not tuple or not op.pages or len({*op.pages}) != len(op.pages):
            raise ContractError(Rule.SHARE, "shared pages are a tuple, and none is twice", number)
        if len(op.pages) * self._page.tokens >= job.known_tokens:
            raise ContractError(Rule.SHARE, "its last token must be computed", number)
        if wrong := sharing.cache.wrong(job, op.pages):
            raise ContractError(
                Rule.SHARE, f"it would start on pages {wrong}, which hold other tokens", number
            )

    def _check_grow(self, op: Grow, device: int) -> None:
        """Rules PLACE and BYTES."""
        nbytes, is_kv = op.nbytes, op.place.region.kind is Kind.KV
        self._check_place(op.place, device)
        if type(nbytes) is not int or nbytes < 0:
            raise ContractError(
                Rule.BYTES, f"{told(op.place)} takes {nbytes!r} bytes: not whole, or below zero"
            )
        if is_kv and nbytes % self._page.nbytes:
            raise ContractError(
                Rule.BYTES,
                f"{told(op.place)} takes {nbytes} bytes: no whole pages of {self._page.nbytes}",
            )
        if op.place.region.owner not in self._jobs:
            raise ContractError(
                Rule.JOB,
                f"{told(op.place)} takes bytes for a job that is not there",
                op.place.region.owner,
            )
        if op.first or op.every:
            raise ContractError(
                Rule.REPEATS, f"{told(op.place)} grows by steps in a plan of one step"
            )

    def _check_place(self, place: Place, device: int) -> None:
        """Rule PLACE, where bytes begin: what is touched, copied or freed must be held anyway."""
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
        if op.device != device:
            raise ContractError(
                Rule.DEVICE, f"{_named(op)} of device {op.device} in a plan for {device}"
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
                raise ContractError(Rule.ANSWER, f"{_named(piece)} is no slice of a job")
            job, number = piece.job, piece.job.job_id
            if self._jobs.get(number) is not job:
                raise ContractError(Rule.JOB, "a slice of a job that is not there", number)
            if self._is_routed and job.device not in (None, device):
                raise ContractError(Rule.JOB, f"a slice of a job of device {job.device}", number)
            if job.training is None:
                if number in seen:
                    raise ContractError(Rule.ONCE, "two slices of one job in a launch", number)
                seen.add(number)
                serves = True
        if op.on not in self._lanes and (serves or op.on != HOST_LANE):
            known = ", ".join(map(str, self._lanes))
            raise ContractError(Rule.LANE, f"a launch on lane {op.on!r}; the device has {known}")
        if serves and op.again:
            raise ContractError(Rule.TOKENS, "a launch that serves is no recompute: restart jobs")

    def _check_repeated(self, plan: Plan, device: int) -> None:
        """Rules of a plan for many steps: growth, then one launch that serves."""
        *before, launch = plan.ops or (None,)
        if not isinstance(launch, Compute) or {*map(type, before)} - {Grow, GrowCycle}:
            raise ContractError(Rule.REPEATS, "a repeated plan is growth and then one launch")
        if plan.restart or plan.refuse:
            raise ContractError(Rule.REPEATS, "a repeated plan restarts and refuses nobody")
        self._check_operation(launch, set(), device)
        if launch.reads or launch.after or len(launch.writes) != len(launch.slices):
            raise ContractError(Rule.REPEATS, "a repeated launch names the KV of its jobs alone")
        if not _is_course(plan, 0):
            raise ContractError(Rule.REPEATS, "`later` names the last slices at growing steps")
        grows = self._growth(plan, device)
        turns = plan.ops[0] if isinstance(plan.ops[0], GrowCycle) else None
        for i, (piece, place) in enumerate(zip(launch.slices, launch.writes, strict=True)):
            number = piece.job.job_id
            self._check_slice(piece, piece.job.remaining_tokens)
            if place != kv_place(number, Tier.GPU, device):
                raise ContractError(Rule.OWN_KV, f"{told(place)} is written in its stead", number)
            own = grows.pop(place, [])
            if turns is not None:
                self._check_turn(piece.job, place, own, turns)
            if (lack := self._lack(plan, i, own)) is not None:
                raise ContractError(*lack, number)
        for place in grows:
            raise ContractError(
                Rule.REPEATS, f"{told(place)} grows without a slice", place.region.owner
            )
        first = plan.at(0)
        self._ledger.dry_run(first)
        _Walk(self, first, device).walk()

    def _check_turn(self, job: Job, place: Place, own: list[Grow], turns: GrowCycle) -> None:
        """A cycle has all decodes that lead, each a page whenever its last one is full."""
        held = len(self._tables.get(place, ())) * self._page.tokens
        full = Grow(place, self._page.nbytes, held - job.computed_tokens, self._page.tokens)
        in_turns = [op for due in turns.by_step for op in due if op.place == place]
        if in_turns and (len(in_turns) > 1 or own[0] != full or job.is_prefilling):
            raise ContractError(
                Rule.REPEATS, "a GrowCycle grows decodes as their pages are full", job.job_id
            )

    def _growth(self, plan: Plan, device: int) -> dict[Place, list[Grow]]:
        """What each place takes, and when."""
        found: dict[Place, list[Grow]] = {}
        for number, op in enumerate(plan.ops[:-1]):
            ops: list[Grow] = []
            if isinstance(op, GrowCycle):
                if number or not op.by_step:
                    raise ContractError(Rule.REPEATS, "a GrowCycle comes first, and has steps")
                every = len(op.by_step)
                ops = [
                    Grow(one.place, one.nbytes, step, every)
                    for step, due in enumerate(op.by_step)
                    for one in due
                ]
            elif isinstance(op, Grow):
                ops = [op]
            for one in ops:
                self._check_place(one.place, device)
                if not self._is_growth(one):
                    raise ContractError(
                        Rule.BYTES, f"{told(one.place)} takes {one.nbytes!r} bytes: no whole pages"
                    )
                found.setdefault(one.place, []).append(one)
        return found

    def _check_slice(self, piece: Slice, remaining_tokens: int) -> None:
        """Rule TOKENS."""
        told: Any = piece  # compiled, what is known to be an int is one: also True
        number, tokens = piece.job.job_id, told[1]
        if piece[2:-1] != WHOLE[:-1]:
            raise ContractError(
                Rule.TOKENS, "a served slice goes forward through all layers, and no more", number
            )
        if type(tokens) is not int or not 0 < tokens <= remaining_tokens:
            raise ContractError(
                Rule.TOKENS, f"{tokens!r} tokens, {remaining_tokens} remain", number
            )
        if piece.record and piece.job.recorded_tokens != piece.job.computed_tokens:
            raise ContractError(Rule.TOKENS, "a record is a gapless prefix", number)


class _Walk:
    """One walk over the operations of a plan, with what it moves on laid over the books."""

    def __init__(self, check: PlanCheck, plan: Plan, device: int) -> None:
        self._check, self._plan, self._device = check, plan, device
        self._ledger, self._page = check._ledger, check._page
        self._jobs = check._roster.jobs
        self._computed: dict[int, int] = {}  # tokens of jobs that the plan moves on
        self._known: dict[int, int] = {}
        self._tokens: dict[Place, int | None] = {}  # as `filled`; None where a place follows
        self._pages: dict[Place, int] = {}
        self._sliced = {
            s.job.job_id for op in plan.ops if isinstance(op, Compute) for s in op.slices
        }
        gone = [job.job_id for job in (*plan.restart, *plan.refuse)]
        self._given_up = {*gone}

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
                self._check._filled.pop(place, None)
            else:
                self._check._filled[place] = tokens

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
        """Tokens of its job whose keys and values a place holds."""
        if self._pages_of(place) is None:
            return GONE
        found = self._tokens.get(place, self._check._filled.get(place))
        return self._computed_of(job) if found is None else found

    def _others(self, place: Place) -> list[Place]:
        """Other places that hold this KV."""
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
            raise ContractError(
                Rule.SHARE, "a job shares pages where it begins, with a slice behind them", number
            )
        self._computed[number] = tokens
        self._tokens[place], self._pages[place] = None, len(op.pages)

    def _copy(self, op: Copy) -> None:
        src, dst, job = op.src, op.dst, self._jobs.get(op.src.region.owner)
        pages = self._pages_of(src)
        assert pages is not None, "the dry run has seen that it is held"
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
                raise ContractError(
                    Rule.KV_FREED, "its only KV is freed: name the job in `restart`", number
                )
        self._pages[place] = self._tokens[place] = GONE

    def _compute(self, op: Compute, is_only: bool) -> None:
        served = [piece for piece in op.slices if piece.job.training is None]
        own = {kv_place(piece.job.job_id, Tier.GPU, self._device) for piece in served}
        for place in op.writes:
            if place.region.kind is Kind.KV and place not in own:
                owner = self._jobs.get(place.region.owner)
                if owner is None or owner.training is None:
                    raise ContractError(
                        Rule.OWN_KV, "its KV is written without a slice", place.region.owner
                    )
        written = set(op.writes)
        for piece in self._to_look_at(op, served) if is_only else served:
            self._serve(piece, written)

    def _to_look_at(self, op: Compute, served: Sequence[Slice]) -> Sequence[Slice]:
        """All but the decodes that go on as they were: they have room in their last pages."""
        cohort = self._check._standing.cohort
        if cohort is None or cohort.turns is None or not self._check._standing.leads(op):
            return served
        moved = {place.region.owner for place in self._pages}
        full = cohort.turns[cohort.clock % self._page.tokens]
        moved.update([due.place.region.owner for due in full])
        moved &= {*cohort.ids}
        looked = [op.slices[cohort.ids.index(number)] for number in moved]
        return [*looked, *[s for s in op.slices[len(cohort.jobs) :] if s.job.training is None]]

    def _serve(self, piece: Slice, written: Collection[Place]) -> None:
        job, number = piece.job, piece.job.job_id
        computed, place = self._computed_of(job), kv_place(number, Tier.GPU, self._device)
        known = self._known.get(number, job.known_tokens)
        if number in self._known:
            raise ContractError(
                Rule.ONCE, "a slice behind its next token, with which it may have ended", number
            )
        self._check._check_slice(piece, known - computed)
        pages = self._pages_of(place)
        if pages is None:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not held", number)
        if place not in written:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not among the writes", number)
        if computed + piece.tokens > pages * self._page.tokens:
            raise ContractError(
                Rule.KV_PAGES,
                f"{pages} pages of {self._page.tokens} for {computed} + {piece.tokens} tokens",
                number,
            )
        there = self._tokens_of(place, job)
        if there < computed:
            raise ContractError(
                Rule.KV_CONTENTS, f"{told(place)} holds {there} of its {computed} tokens", number
            )
        if self._tokens.get(place, self._check._filled.get(place)) is not None:
            for other in self._others(place):  # those that followed the job do so no more
                self._tokens[other] = self._tokens_of(other, job)
        self._tokens[place] = None
        if piece.tokens == known - computed:
            self._known[number] = known + 1
        self._computed[number] = computed + piece.tokens


def _check_form(plan: Plan) -> None:
    """Rule ANSWER."""
    for name in ("ops", "restart", "refuse", "later"):
        if type(getattr(plan, name)) is not tuple:
            raise ContractError(Rule.ANSWER, f"{name} of a plan is a tuple")
    if plan.wake_ns is not None and type(plan.wake_ns) is not int:
        raise ContractError(Rule.ANSWER, f"wake_ns is {plan.wake_ns!r}: whole nanoseconds, or None")
    for op in plan.ops:
        if type(op) not in OPERATIONS:
            raise ContractError(Rule.ANSWER, f"{_named(op)} is no operation of a plan")
        if isinstance(op, Compute) and any(
            type(s) is not Slice or not isinstance(s.job, Job) for s in op.slices
        ):
            raise ContractError(Rule.ANSWER, "a launch has slices of jobs")
    for job in (*plan.restart, *plan.refuse):
        if not isinstance(job, Job):
            raise ContractError(Rule.ANSWER, f"{_named(job)} is no job")


def _is_course(plan: Plan, lead: int) -> bool:
    """Whether `later` says of the last slices, at growing steps, how many tokens they have then."""
    before, launch, repeats = 0, plan.ops[-1], plan.repeats
    assert isinstance(launch, Compute)
    if type(repeats) is not int or type(plan.later) is not tuple:
        return False
    slices = launch.slices
    for entry in plan.later:
        if type(entry) is not tuple or len(entry) != 2:
            return False
        step, last = entry
        if type(step) is not int or step <= before or type(last) is not tuple:
            return False
        before = step
        if not 0 < len(last) <= len(slices) - lead:
            return False
        for piece, first in zip(last, slices[-len(last) :], strict=True):
            if type(piece) is not Slice or piece[0] is not first[0] or piece[2:] != WHOLE:
                return False
            if type(piece[1]) is not int or piece[1] < 1:
                return False
    return True


def _are_distinct(slices: Sequence[Slice], lead: int) -> bool:
    count = len(slices) - lead
    return count < 2 or len({piece[0].job_id for piece in slices[lead:]}) == count


def _named(value: object) -> str:
    """What it is, for messages."""
    return f"a {type(value).__name__}" if value is not None else "None"
