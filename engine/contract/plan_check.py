"""The check of a plan before it is booked: the rules of engine/contract for all that serves.

Plans of the usual form (growth, then one launch) are looked at where they differ from the plan
before. All others are walked in their order. Neither looks again at decodes that go on as they
were, where fast-forward keeps them in a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from engine.contract.job import Job
from engine.contract.kv_check import (
    WHOLE,
    PlanWalk,
    RepeatedPart,
    check_slice,
    first_lack,
    parts_of,
)
from engine.contract.plan import (
    HOST_LANE,
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    GrowCycle,
    Op,
    Plan,
    Share,
    Slice,
)
from engine.contract.regions import SHARED_OWNER, Kind, Place, Tier, kv_place, told
from engine.contract.rules import ContractError, Rule
from engine.contract.training_check import TrainingContract
from engine.contract.view import View
from engine.fast_forward.horizon import base_of
from engine.fast_forward.standing_plan import StandingPlan
from engine.loop.job_lists import JobLists
from engine.memory.dry_run import Shortage
from engine.memory.ledger import Ledger

OPERATIONS = (Compute, Copy, Collective, Grow, GrowCycle, Share, Free)
LAUNCHED = frozenset((Compute, Copy, Collective))  # what runs on a lane


class PlanCheck:
    """Raises ContractError where a plan breaks a rule; changes no books.

    Of contents it keeps exceptions alone: see PlanWalk.
    """

    def __init__(
        self,
        ledger: Ledger,
        roster: JobLists,
        standing: StandingPlan,
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
        if launch.reads or launch.after or launch.again or launch.device is not device:
            return False
        slices, writes, page_nbytes = launch.slices, launch.writes, self._page.nbytes
        n, cohort, lead, taken = len(slices), self._standing.cohort, 0, 0
        if type(slices) is not tuple or type(writes) is not tuple or len(writes) != n or not n:
            return False
        if launch in self._open or type(ops) is not tuple:
            return False
        if cohort is not None and self._standing.leads(launch):
            if cohort.turns is None:
                return False
            full = cohort.turns[cohort.clock % self._page.tokens]
            lead, taken = len(cohort.jobs), len(full)
            if full and ops[:taken] != full:
                return False
        room = self._ledger.room_of((Tier.GPU, device)) - taken * page_nbytes
        if lead == n:  # decodes alone, that go on as they were
            return room >= 0 and taken + 1 == len(ops)
        grown: dict[Place, int] = {}
        for op in ops[taken:-1]:
            if type(op) is not Grow:
                return False
            place, nbytes, first, every = op
            if first or every or type(nbytes) is not int or nbytes <= 0 or nbytes % page_nbytes:
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
            if place != kv_place(number, Tier.GPU, device) or job._pace is cohort:
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
        parts: Sequence[RepeatedPart] = parts_of(plan, i)
        pages = 0 if table is None else len(table)
        return first_lack(job, pages, parts, grows, self._page, self._tokens_left(job))

    # ---- any plan, in its order
    def _walk(self, plan: Plan, device: int) -> None:
        _check_form(plan)
        self._check_jobs(plan)
        if plan.repeats > 1 or plan.later:
            self._check_repeated(plan, device)
            return
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
        PlanWalk(self._ledger, self._jobs, self._standing, self._filled, plan, device).walk()

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
            ends = [p.device for p in (op.src, op.dst) if p.tier is Tier.GPU]
            if ends and device not in ends:
                raise ContractError(
                    Rule.DEVICE, f"copy of {told(op.src)} in a plan for device {device}"
                )
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
        if kind in LAUNCHED:
            if op in self._open:
                what = f"{_named(op)} is in flight already: make a new one for each plan"
                raise ContractError(Rule.OPERATION, what)
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
        if op.place.tier is Tier.GPU and op.place.device != device:
            raise ContractError(
                Rule.DEVICE, f"{told(op.place)} grows in a plan for device {device}"
            )
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
        if type(op.device) is not int or op.device != device:
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

    def _check_repeated(self, plan: Plan, device: int) -> None:
        """Rules of a plan for many steps: growth, then one launch that serves."""
        *before, launch = plan.ops or (None,)
        if not isinstance(launch, Compute) or {*map(type, before)} - {Grow, GrowCycle}:
            raise ContractError(Rule.REPEATS, "a repeated plan is growth and then one launch")
        if plan.restart or plan.refuse:
            raise ContractError(Rule.REPEATS, "a repeated plan restarts and refuses no job")
        self._check_launch(launch, device)
        self._check_operation(launch, set(), device)
        if launch.reads or launch.after or len(launch.writes) != len(launch.slices):
            raise ContractError(Rule.REPEATS, "a repeated launch names the KV of its jobs alone")
        if not _is_course(plan):
            raise ContractError(Rule.REPEATS, "`later` names the last slices at growing steps")
        grows = self._growth(plan, device)
        turns, leads = plan.ops[0] if isinstance(plan.ops[0], GrowCycle) else None, True
        for i, (piece, place) in enumerate(zip(launch.slices, launch.writes, strict=True)):
            job, number = piece.job, piece.job.job_id
            is_gapless = job.recorded_tokens == job.computed_tokens
            check_slice(piece, job.remaining_tokens, is_gapless)
            if place != kv_place(number, Tier.GPU, device):
                raise ContractError(Rule.OWN_KV, f"{told(place)} is written in its stead", number)
            own = grows.pop(place, [])
            leads = leads and not job.is_prefilling and place in self._tables
            if turns is not None:
                self._check_turn(job, place, own, turns, leads)
            if (lack := self._lack(plan, i, own)) is not None:
                raise ContractError(*lack, number)
        for place in grows:
            raise ContractError(
                Rule.REPEATS, f"{told(place)} grows without a slice", place.region.owner
            )
        first = plan.at(0)
        self._follow(first, device)
        self._ledger.dry_run(first)

    def _check_turn(
        self, job: Job, place: Place, own: list[Grow], turns: GrowCycle, leads: bool
    ) -> None:
        """A cycle has the decodes that lead, each a page whenever its last one is full."""
        held = len(self._tables.get(place, ())) * self._page.tokens
        full = Grow(place, self._page.nbytes, held - job.computed_tokens, self._page.tokens)
        in_turns = [op for due in turns.by_step for op in due if op.place == place]
        is_right = [*own[:1]] == [full] and len(in_turns) == 1 if leads else not in_turns
        if not is_right or len(turns.by_step) != self._page.tokens:
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
                        Rule.BYTES,
                        f"{told(one.place)} takes {one.nbytes!r} bytes at step {one.first!r}: "
                        "whole pages, from step 0 on",
                    )
                found.setdefault(one.place, []).append(one)
        return found


def _check_form(plan: Plan) -> None:
    """Rule ANSWER."""
    for name in ("ops", "restart", "refuse", "later"):
        if type(getattr(plan, name)) is not tuple:
            what = f"{name} of a plan is {_named(getattr(plan, name))}: a tuple is wanted"
            raise ContractError(Rule.ANSWER, what)
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


def _is_course(plan: Plan) -> bool:
    """Whether `later` says of the last slices, at growing steps, how many tokens they have then."""
    before, launch = 0, plan.ops[-1]
    assert isinstance(launch, Compute)
    slices = launch.slices
    for entry in plan.later:
        if type(entry) is not tuple or len(entry) != 2:
            return False
        step, last = entry
        if type(step) is not int or step <= before or type(last) is not tuple:
            return False
        before = step
        if not 0 < len(last) <= len(slices):
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
