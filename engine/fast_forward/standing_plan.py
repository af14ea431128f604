"""The standing plan: it is issued again without a question until an event may change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import is_, itemgetter

from engine.contract.job import Job
from engine.contract.kv_check import WHOLE
from engine.contract.plan import COMPUTE_LANE, Compute, Free, Grow, Plan
from engine.contract.policy import Traits
from engine.contract.regions import PageSize, Place, Pool, Tier, kv_place
from engine.contract.rules import BrokenLaw, ContractError, Rule
from engine.contract.view import RunningDecodes, View
from engine.fast_forward.decode_batch import DecodeBatch, GrowCycle
from engine.fast_forward.horizon import cut_anew, has_prompt, horizon, stretched
from engine.fast_forward.reads import SeenReads
from engine.fast_forward.repeated_plan import RepeatedPlan, StretchedPlan

_job = itemgetter(0)  # of a slice


def _serves(plan: Plan, launch: Compute, decodes: DecodeBatch) -> bool:
    """Whether a single step ends in its only launch, and that serves each job once."""
    slices, writes = launch.slices[len(decodes.jobs) :], launch.writes[len(decodes.jobs) :]
    ids = [piece.job.job_id for piece in slices]
    grown = {op.place for op in plan.ops if isinstance(op, Grow)}
    return (
        grown <= {*launch.writes}
        and (launch.on, launch.again, launch.reads) == (COMPUTE_LANE, False, ())
        and not any([isinstance(op, Compute) for op in plan.ops[:-1]])
        and all([piece[2:] == WHOLE and piece.job.training is None for piece in slices])
        and [place.region.owner for place in writes] == ids
        and len({*decodes.ids, *ids}) == len(launch.slices)
    )


class StandingPlan:
    """The last plan, and whether its next step may be issued without a question."""

    def __init__(
        self,
        traits: Traits,
        reads: SeenReads | None,
        page: PageSize,
        tables: Mapping[Place, list[int]],
        tokens_left: Callable[[Job], int],
    ) -> None:
        self._page, self._traits, self._reads = page, traits, reads
        self._holds = False  # also behind a job's end, as the scheduling promises
        self._budget = 0  # of a step, where a job that arrives waits for all prompts; else 0
        self._is_cut_due = False  # jobs have ended: the last prompt takes what they leave
        self._tables, self._tokens_left = tables, tokens_left
        self._last: RepeatedPlan | None = None  # the last plan, even where it holds no more
        self.decodes: DecodeBatch | None = None  # of the last plan
        self._paused: DecodeBatch | None = None  # decodes that the last plan left out, as they are
        self._led: Compute | None = None  # the last launch of which `leads` was true
        self.shown: GrowCycle | None = None  # the growth of the decodes that a View shows
        self.repeat: RepeatedPlan | None = None

    def decided(self, plan: Plan, view: View) -> None:
        """The policy has decided a plan; it stands for as many steps as it holds.

        Raises:
            ContractError: KV that is promised as reserved does not hold the tokens of these steps.
        """
        self._last = self.repeat = None
        self._is_cut_due, self._budget = False, 0
        before, self._paused = self.decodes, None
        if plan.ops:
            launch = plan.ops[-1]
            if isinstance(launch, Compute):
                made = self._stretched(plan, view) or StretchedPlan.once(plan, launch)
                self._last = self.repeat = self._stand(made)
        self.decodes = None if self._last is None else self._last.decodes
        if before is not None and before is not self.decodes and not _touches(plan, before):
            self._paused = before
        self._led = None

    def _stretched(self, plan: Plan, view: View) -> StretchedPlan | None:
        """The plan for more steps than one, if it holds for more."""
        traits = self._traits
        self._holds = traits.repeats
        if traits.kv_growth == "asked" or plan.wake_ns is not None:
            return None
        if view.training and not traits.repeats:  # no read is noted where a job trains
            return None
        if not traits.repeats and not (self._reads and self._reads.hold(plan, view.waiting)):
            return None
        found = horizon(plan, view, traits.appends)
        if found.steps < 2:
            return None
        # Room only shrinks while a plan stands, so a job that finds no room finds none later. With
        # prefix caching this holds only where no prompt fills pages that a waiting job could share,
        # and no KV comes back by a copy: its pages are not kept, so that the beginning of a kept
        # prefix could be taken before its end.
        if traits.prefix_caching and view.waiting and (traits.swaps or has_prompt(plan)):
            return None
        if found.in_turn and traits.repeats and not traits.prefix_caching:
            self._budget = traits.step_tokens
        made = stretched(plan, view, found, traits, self.shown)
        if made is None or made.steps < 2:
            return None
        if traits.kv_growth == "reserved":
            self._check_reserved(made)
        return made

    def _check_reserved(self, made: StretchedPlan) -> None:
        """Rule KV_PAGES of the steps ahead, for which no plan is asked that could be checked."""
        page_tokens, reserved = self._page.tokens, self._traits.reserved_tokens
        grown: dict[Place, int] = {}
        for op in made.grows:
            grown[op.place] = grown.get(op.place, 0) + op.nbytes // self._page.nbytes
        for piece in made.launch.slices:
            place = kv_place(piece.job.job_id, Tier.GPU, made.launch.device)
            pages = len(self._tables.get(place, ())) + grown.get(place, 0)
            tokens = piece.job.known_tokens + made.steps - 1
            if tokens > pages * page_tokens:
                what = (
                    f'Traits(kv_growth="reserved", reserved_tokens={reserved}) do not hold: '
                    f"{pages} pages of {page_tokens} for {tokens} tokens of the steps ahead"
                )
                raise ContractError(Rule.KV_PAGES, what, piece.job.job_id)

    def _stand(self, made: StretchedPlan) -> RepeatedPlan | None:
        plan, launch, cycle = made.plan, made.launch, made.cycle
        decodes, has_cycle = self.decodes, cycle is not None
        if (
            decodes is not None and made.steps == 1
        ):  # a plan of several steps takes memory from no job
            self._part(decodes, plan)
        if made.steps == 1 and launch.reads:  # what trains reads weights, and stands for nothing
            return None
        is_led = launch is self._led or (decodes is not None and _leads(decodes, launch))
        if decodes is None or not is_led or (has_cycle and decodes.turns is None):
            decodes = DecodeBatch(self._page)
        lead = len(decodes.jobs)
        jobs = list(map(_job, launch.slices[lead:]))
        if self._join(decodes, jobs, launch.writes[lead:]) and not _leads(decodes, launch):
            return None
        if cycle is not None and cycle is not self.shown and not _is_same(cycle, decodes.cycle()):
            raise BrokenLaw("law 15: a plan that stands grows otherwise than its decodes")
        if made.steps == 1 and not _serves(plan, launch, decodes):
            return None
        if (
            not has_cycle
            and decodes.jobs
            and not (made.steps == 1 and _grows_in_turn(plan, decodes))
        ):
            decodes.turns = None
        return RepeatedPlan(made, decodes, self._budget)

    def _part(self, decodes: DecodeBatch, plan: Plan) -> None:
        """Removes jobs that lose their memory or are refused from the decodes."""
        gone = {job.job_id for job in (*plan.restart, *plan.refuse)}
        gone.update([op.place.region.owner for op in plan.ops if isinstance(op, Free)])
        for owner in gone.intersection(decodes.ids):
            decodes.leave(decodes.ids.index(owner))
            self._led = None

    def _join(self, decodes: DecodeBatch, jobs: Sequence[Job], places: Sequence[Place]) -> bool:
        """Jobs join up to the first one that is no decode; whether the first one is a decode."""
        if not jobs or jobs[0].is_prefilling:
            return False
        pairs = takewhile(self._is_decode, zip(jobs, places, strict=False))
        decodes.join(pairs, self._tables, self._tokens_left)
        return True

    def _is_decode(self, pair: tuple[Job, Place]) -> bool:
        job, place = pair
        is_own = place.region.owner == job.job_id and place in self._tables  # and held already
        return is_own and not job.is_prefilling

    def leads(self, launch: Compute) -> bool:
        """Whether a launch begins with the decodes of the last plan, in their order.

        The launch has as many slices as writes.
        """
        decodes = self.decodes
        if decodes is None or not 0 < len(decodes.jobs) <= len(launch.writes):
            return False
        if not all(map(is_, decodes.slices, launch.slices)):
            return False
        if launch.writes[: len(decodes.places)] != decodes.places:
            return False
        self._led = launch
        return True

    def clear(self) -> None:
        """Forgets the plan before."""
        self._last = self.repeat = self.decodes = self._paused = self._led = None

    def drop(self) -> None:
        """An event may change the plan: the policy is asked next."""
        self.repeat = None

    def wait_behind(self) -> None:
        """A request waits: the policy is asked next, unless the prompts leave it no token."""
        if self.repeat is not None and not (self._is_cut_due or self.repeat.wait_behind()):
            self.repeat = None

    def lose(self, jobs: Sequence[Job], others_wait: bool) -> None:
        """Jobs have ended: the plan goes on without them.

        The policy is asked instead where a waiting job may take their room, or a prompt more of the
        budget; but not where a prompt in turn takes all of the budget.
        """
        last = self._last
        if last is None:
            return
        if not self._holds:
            self.repeat = None
        elif last.still:
            self._is_cut_due = True
        elif (others_wait or last.is_cut) and not self._is_cut_due:
            self.repeat = None
        last.lose(jobs)
        if not last.jobs:
            self._last = self.repeat = self.decodes = None

    def goes_on(self, room_bytes: Callable[[], dict[Pool, int]], others_wait: bool) -> bool:
        """Whether the plan holds for its next step, which finds room or not."""
        repeat = self.repeat
        if repeat is not None and self._is_cut_due:
            self._is_cut_due = False
            held = len(self._tables[repeat.places[-1]])
            room = room_bytes()[Tier.GPU, repeat.device] // self._page.nbytes
            if not cut_anew(repeat, held, room - self._traits.spare_pages, others_wait):
                repeat = self.repeat = None
        return repeat is not None and repeat.left > 0

    def next(self, room_bytes: Callable[[], dict[Pool, int]], others_wait: bool) -> Plan | None:
        """The plan while it holds; it ends where the growth of its next step finds no room."""
        if self.goes_on(room_bytes, others_wait):
            repeat = self.repeat
            assert repeat is not None
            if repeat.fits(room_bytes):
                return repeat.plan
        self.repeat = None
        return None

    def running(self, serving: Sequence[Job]) -> RunningDecodes | None:
        """The decodes of the last plan; None where it did not have all jobs in service."""
        last, decodes = self._last, self.decodes
        if last is None or decodes is None:
            return None
        if self._paused is not None and not decodes.jobs:
            decodes = self._paused
        if [*decodes.jobs, *last.tail] != serving:
            return None
        self.decodes, self._last = decodes, None  # jobs of its tail may join the decodes now
        self._join(decodes, last.tail, last.places)
        self.shown = decodes.cycle()
        rest = serving[len(decodes.jobs) :]
        if self.shown is None or not all([job.is_prefilling for job in rest]):
            return None
        return RunningDecodes(decodes.slices, decodes.places, self.shown.by_step[0])


def _grows_in_turn(plan: Plan, decodes: DecodeBatch) -> bool:
    """Whether a single step grows by just what its decodes need now."""
    if decodes.turns is None:
        return False
    taken, ids = [op for op in plan.ops[:-1] if isinstance(op, Grow)], {*decodes.ids}
    own = {op.place: op.nbytes for op in taken if op.place.region.owner in ids}
    return own == {op.place: op.nbytes for op in decodes.due(1)[0]}


def _touches(plan: Plan, decodes: DecodeBatch) -> bool:
    """Whether a plan is more than growth and a launch of other jobs than these decodes."""
    ids = {*decodes.ids}
    if not ids or not plan.ops or not isinstance(plan.ops[-1], Compute):
        return True
    if any([piece.job.job_id in ids for piece in plan.ops[-1].slices]):
        return True
    return not all([type(op) is Grow and op.place.region.owner not in ids for op in plan.ops[:-1]])


def _leads(decodes: DecodeBatch, launch: Compute) -> bool:
    n = len(decodes.jobs)
    return launch.slices[:n] == decodes.slices and launch.writes[:n] == decodes.places


def _is_same(cycle: GrowCycle, other: GrowCycle | None) -> bool:
    if other is None:
        return False
    places = [[[op.place for op in ops] for ops in c.by_step] for c in (cycle, other)]
    return places[0] == places[1]
