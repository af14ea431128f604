"""A repeated plan under way: how far it got, and what is left of it when jobs have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from engine.cohort import Cohort
from engine.decodes import Decodes
from engine.growth import Growth
from engine.job import Job
from engine.plan import (
    COMPUTE_LANE,
    Compute,
    Grow,
    GrowCycle,
    PageSize,
    Place,
    Plan,
    Pool,
    Slice,
    Work,
)

WHOLE = (Work.FORWARD, None, 0, 0, False)  # a slice of serving, but for its job and tokens


class Repeat:
    """A repeated plan under way: a cohort of decodes, and prompts behind it."""

    def __init__(self, plan: Plan, cohort: Cohort) -> None:
        launch, lead = plan.ops[-1], len(cohort.jobs)
        assert isinstance(launch, Compute)
        self.plan, self.cohort, self.device = plan, cohort, launch.device
        self.done = 0  # steps issued
        self.growth = Growth.of(plan)  # beside the cohort's
        self._has_cycle = isinstance(plan.ops[0], GrowCycle)
        self.places = launch.writes[lead:]
        self._parts = [(0, launch.slices[lead:])]  # what follows the cohort, from which step on
        for step, last in plan.later:
            self._parts.append((step, self._parts[0][1][: -len(last)] + last))
        self.tail = [piece.job for piece in launch.slices[lead:]]

    @property
    def jobs(self) -> list[Job]:
        """All that are in it."""
        return [*self.cohort.jobs, *self.tail]

    @property
    def left(self) -> int:
        """Steps that are not issued yet."""
        return self.plan.repeats - self.done

    @property
    def silent(self) -> int:
        """Steps before the last of its tail yields a token: parts of its prompt but the last."""
        left, steps = self.tail[-1].remaining_tokens, 0
        while steps < self.left:
            part, until = self.part(self.done + steps)
            tokens, span = part[-1].tokens, until - self.done - steps
            if tokens * span >= left:
                return steps + (left - 1) // tokens
            left -= tokens * span
            steps += span
        return steps

    def part(self, step: int) -> tuple[tuple[Slice, ...], int]:
        """The slices of the tail at that step, and the step at which they become others."""
        now, until = self._parts[0][1], self.plan.repeats
        for first, slices in self._parts:
            if first > step:
                until = first
                break
            now = slices
        return now, until

    def launch(self, part: tuple[Slice, ...]) -> Compute:
        """A new launch, with that part behind the cohort."""
        cohort = self.cohort
        return Compute(cohort.slices + part, (), cohort.places + self.places, self.device)

    def due(self, count: int) -> tuple[list[tuple[Grow, ...]], list[int]]:
        """What grows in each of the next steps, in the order of booking, and how many pages."""
        none = list[tuple[Grow, ...]]([()]) * count
        found = self.cohort.due(count) if self._has_cycle else none
        pages, page_nbytes, done = list(map(len, found)), self.cohort.page.nbytes, self.done
        if self.growth.first < done + count:
            for step, op in self.growth.before(done + count)[0]:
                found[step - done] += (op,)
                pages[step - done] += op.nbytes // page_nbytes
        return found, pages

    def advance(self, count: int) -> None:
        """Steps are issued."""
        self.done += count
        if self.growth.first < self.done:
            self.growth = self.growth.before(self.done)[1]
        self.cohort.clock += count

    def next(self) -> Plan:
        """The next step as a plan of its own."""
        grows = [Grow(op.place, op.nbytes) for op in self.due(1)[0][0]]
        plan = Plan((*grows, self.launch(self.part(self.done)[0])))
        self.advance(1)
        return plan

    def fits(self, room_bytes: Callable[[], dict[Pool, int]]) -> bool:
        """Whether what grows with the next step finds room."""
        (due,), (pages,) = self.due(1)
        return not pages or pages * self.cohort.page.nbytes <= room_bytes()[due[0].place.pool]

    @property
    def is_cut(self) -> bool:
        """Whether a budget has cut its last slice: there would be more of it if others left."""
        if not self.tail:
            return False
        last = self.part(self.done)[0][-1]
        return last.tokens < last.job.remaining_tokens

    def lose(self, jobs: Sequence[Job]) -> None:
        """Jobs have ended: they are in it no more."""
        cohort, gone = self.cohort, {job.job_id for job in jobs}
        for job in jobs:
            if job in cohort.jobs:
                cohort.leave(cohort.jobs.index(job))
                continue
            i = self.tail.index(job)
            del self.tail[i]
            self.places = self.places[:i] + self.places[i + 1 :]
            self._parts = [
                (first, tuple([piece for piece in part if piece.job is not job]))
                for first, part in self._parts
            ]
        self.growth = self.growth.without(gone)


def _is_plain(plan: Plan, launch: Compute, cohort: Cohort) -> bool:
    """Whether a single step could be one of a repeated plan: growth, and a launch of a cohort and
    then of prompts."""
    if plan.restart or plan.refuse or launch.reads:
        return False
    lead, is_growth = len(cohort.jobs), [type(op) is Grow for op in plan.ops[:-1]]
    prompts, writes = launch.slices[lead:], launch.writes[lead:]
    ids = [piece.job.job_id for piece in prompts]
    return (
        all(is_growth)
        and (launch.on, launch.again) == (COMPUTE_LANE, False)
        and all([piece[2:] == WHOLE and piece.job.training is None for piece in prompts])
        and all([piece.job.is_prefilling for piece in prompts])
        and [place.region.owner for place in writes] == ids
        and len({*cohort.ids, *ids}) == len(launch.slices)
    )


class Standing:
    """The plan that is issued again without a question, as long as nothing happens."""

    def __init__(
        self,
        is_allowed: bool,
        page: PageSize,
        held_bytes: Mapping[Place, int],
        tokens_left: Callable[[Job], int],
    ) -> None:
        self._is_allowed, self._page = is_allowed, page
        self._held_bytes, self._tokens_left = held_bytes, tokens_left
        self._last: Repeat | None = None  # also when it does not hold any more
        self._cohort: Cohort | None = None  # of the last plan
        self._shown: GrowCycle | None = None  # of the cohort, as a View has it
        self.repeat: Repeat | None = None

    def keep(self, plan: Plan) -> None:
        """A plan was decided; it stands for as many steps as it holds."""
        self._last = self.repeat = self._stand(plan) if self._is_allowed and plan.ops else None
        self._cohort = None if self._last is None else self._last.cohort

    def _stand(self, plan: Plan) -> Repeat | None:
        launch, cycle = plan.ops[-1], plan.ops[0]
        if not isinstance(launch, Compute):
            return None
        cohort, has_cycle = self._cohort, isinstance(cycle, GrowCycle)
        if cohort is None or not _leads(cohort, launch) or (has_cycle and cohort.turns is None):
            cohort = Cohort(self._page)
        lead = len(cohort.jobs)
        jobs = [piece.job for piece in launch.slices[lead:]]
        if self._join(cohort, jobs, launch.writes[lead:]) and not _leads(cohort, launch):
            return None
        if isinstance(cycle, GrowCycle) and cycle is not self._shown:
            assert _is_same(cycle, cohort.cycle()), "a cycle grows as decodes fill their pages"
        if plan.repeats == 1 and not _is_plain(plan, launch, cohort):
            return None
        if not has_cycle and cohort.jobs and not _grows_in_turn(plan, cohort):
            cohort.turns = None
        return Repeat(plan, cohort)

    def _join(self, cohort: Cohort, jobs: Sequence[Job], places: Sequence[Place]) -> bool:
        """Whoever decodes, up to the first who does not, comes into the cohort; if anybody does."""
        if not jobs or jobs[0].is_prefilling:
            return False
        pairs = takewhile(_is_decode, zip(jobs, places, strict=False))
        cohort.join(pairs, self._held_bytes, self._tokens_left)
        return True

    def drop(self) -> None:
        """Something happened: the policy has to be asked."""
        self.repeat = None

    def lose(self, jobs: Sequence[Job], somebody_waits: bool) -> None:
        """Jobs have ended: without them, unless somebody may come in for them, or a prompt would
        take more of the budget now."""
        last = self._last
        if last is None:
            return
        if somebody_waits or last.is_cut:
            self.repeat = None
        last.lose(jobs)
        if not last.jobs:
            self._last = self.repeat = self._cohort = None

    def next(self, room_bytes: Callable[[], dict[Pool, int]]) -> Plan | None:
        """The plan if it still holds; it ends where the growth of its next step finds no room."""
        repeat = self.repeat
        if repeat is not None and repeat.left and repeat.fits(room_bytes):
            return repeat.plan
        self.repeat = None
        return None

    def decodes(self, serving: Sequence[Job]) -> Decodes | None:
        """The decodes of the last plan; None where it did not have all that are in service."""
        last, cohort = self._last, self._cohort
        if last is None or cohort is None or last.jobs != serving:
            return None
        self._last = None  # what it had may come into the cohort now
        self._join(cohort, last.tail, last.places)
        self._shown = cohort.cycle()
        rest = serving[len(cohort.jobs) :]
        if self._shown is None or not all([job.is_prefilling for job in rest]):
            return None
        return Decodes(cohort.slices, cohort.places, self._shown)


def _grows_in_turn(plan: Plan, cohort: Cohort) -> bool:
    """Whether a single step takes what its decodes need now, and no more."""
    if plan.repeats > 1 or cohort.turns is None:
        return False
    taken = [op for op in plan.ops[:-1] if isinstance(op, Grow)]
    own = {op.place: op.nbytes for op in taken if op.place in cohort.places}
    return own == {op.place: op.nbytes for op in cohort.due(1)[0]}


def _leads(cohort: Cohort, launch: Compute) -> bool:
    n = len(cohort.jobs)
    return launch.slices[:n] == cohort.slices and launch.writes[:n] == cohort.places


def _is_decode(pair: tuple[Job, Place]) -> bool:
    job, place = pair
    return not job.is_prefilling and place.region.owner == job.job_id


def _is_same(cycle: GrowCycle, other: GrowCycle | None) -> bool:
    places = [[[op.place for op in ops] for ops in c.by_step] for c in (cycle, other) if c]
    return places[0] == places[-1] and len(places) == 2
