"""A repeated plan under way: how far it got, and what is left of it when jobs have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import dropwhile

from engine.cohort import Cohort
from engine.decodes import Decodes
from engine.growth import Due, Growth
from engine.job import Job
from engine.plan import COMPUTE_LANE, Compute, Grow, PageSize, Plan, Pool, Work

WHOLE = (Work.FORWARD, None, 0, 0, False)  # a slice of serving, but for its job and tokens


class Repeat:
    """A repeated plan under way."""

    def __init__(self, plan: Plan, before: Repeat | None = None) -> None:
        """The cohort of the plan `before` goes on where its jobs lead this one, too."""
        self.plan = plan
        self.jobs = [piece.job for piece in plan.slices]
        self.done = 0  # steps issued
        self.growth = Growth.of(plan)
        self._after = 0, self.growth  # what is left after so many steps, as last asked for
        cohort = Cohort() if before is None else before._cohort
        leads = self.jobs[: min(len(cohort.jobs), len(self.jobs) - 1)] == cohort.jobs
        self._cohort: Cohort = cohort if leads else Cohort()

    @property
    def left(self) -> int:
        """Steps that are not issued yet."""
        return self.plan.repeats - self.done

    @property
    def silent(self) -> int:
        """Steps before the last slice yields a token: parts of its prompt but the last."""
        if self.plan.later:
            return max(0, self.plan.later[-1][0] - 1 - self.done)
        last = self.plan.slices[-1]
        return (last.job.remaining_tokens - 1) // last.tokens

    def due(self, count: int) -> list[Due]:
        """What grows in the next steps, by step from now on."""
        found, after = self.growth.before(self.done + count)
        self._after = count, after
        return [(step - self.done, op) for step, op in found]

    def cohort(self, tokens_left: Callable[[Job], int]) -> Cohort:
        """All decodes before the last slice, as columns."""
        cohort, jobs = self._cohort, self.jobs
        known = len(cohort.jobs)
        lead = max(known, len(jobs) - 1)
        while lead > known and jobs[lead - 1].is_prefilling:
            lead -= 1
        if lead > known:
            cohort.join(jobs[known:lead], tokens_left)
        return cohort

    def advance(self, count: int) -> None:
        """Steps are issued."""
        self.done += count
        asked, after = self._after
        self.growth = after if asked == count else self.growth.before(self.done)[1]
        self._after = 0, self.growth
        self._cohort.advance(count)

    def next(self) -> Plan:
        """The next step as a plan of its own."""
        plan = self.plan.one_step(self.done, [op for _, op in self.due(1)])
        self.advance(1)
        return plan

    def fits(self, room_bytes: Callable[[], dict[Pool, int]]) -> bool:
        """Whether what grows with the next step finds room."""
        due = self.growth.next_ops()
        if not due:
            return True
        room = room_bytes()
        for op in due:
            room[op.place.pool] -= op.nbytes
        return min(room.values()) >= 0

    @property
    def is_cut(self) -> bool:
        """Whether a budget has cut its last slice: there would be more of it if others left."""
        last = self.plan.slices_at(self.done)[-1]
        return last.tokens < last.job.remaining_tokens

    def lose(self, jobs: Sequence[Job]) -> None:
        """Jobs have ended: they are in it no more."""
        launch, gone, cohort = self.plan.ops[-1], {job.job_id for job in jobs}, self._cohort
        assert isinstance(launch, Compute)
        slices, writes = self.plan.slices_at(self.done), launch.writes
        for job in jobs:
            i = self.jobs.index(job)
            assert writes[i].region.owner == job.job_id, "a repeated launch writes slice by slice"
            del self.jobs[i]
            slices, writes = slices[:i] + slices[i + 1 :], writes[:i] + writes[i + 1 :]
            if i < len(cohort.jobs):
                cohort.leave(i)
        if cohort.jobs and len(cohort.jobs) == len(self.jobs):
            cohort.leave(-1)  # it is the last slice now
        later = tuple(
            [
                (first, tuple([piece for piece in tail if piece.job.job_id not in gone]))
                for first, tail in self.plan.later
                if first > self.done
            ]
        )
        launch = Compute(slices, launch.reads, writes, launch.device)
        self.plan = Plan((launch,), repeats=self.plan.repeats, later=later)
        self.growth = self.growth.without(gone)  # where all that grows is now
        self._after = 0, self.growth

    def decodes(self, serving: Sequence[Job], page: PageSize) -> Decodes | None:
        """What it says of all that are in service; None where it does not."""
        if self.jobs != serving or not self.done:
            return None
        launch, slices = self.plan.ops[-1], self.plan.slices_at(self.done)
        assert isinstance(launch, Compute)
        writes, last = launch.writes, slices[-1]
        prompt = last.job.job_id if last.job.is_prefilling else None
        if prompt is not None:
            slices, writes = slices[:-1], writes[:-1]
        growth = self.growth.as_cycle(page, prompt)
        if growth is None or sum(map(len, growth.by_step)) != len(slices):
            return None
        return Decodes(slices, writes, growth)


def _is_plain(plan: Plan) -> bool:
    """Whether a single step could be one of a repeated plan: growth, and a launch of single tokens
    of decodes and then of prompts."""
    launch = plan.ops[-1] if plan.ops else None
    if plan.restart or plan.refuse or not isinstance(launch, Compute) or launch.reads:
        return False
    slices, is_growth = launch.slices, [type(op) is Grow for op in plan.ops[:-1]]
    jobs = [piece.job for piece in slices]
    prompts = list(dropwhile(lambda job: not job.is_prefilling, jobs))
    return (
        all(is_growth)
        and (launch.on, launch.again) == (COMPUTE_LANE, False)
        and all([piece[2:] == WHOLE and piece.job.training is None for piece in slices])
        and all([job.is_prefilling for job in prompts])
        and [place.region.owner for place in launch.writes] == [job.job_id for job in jobs]
        and len({job.job_id for job in jobs}) == len(jobs)
    )


class Standing:
    """The plan that is issued again without a question, as long as nothing happens."""

    def __init__(self, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self._last: Repeat | None = None  # also when it does not hold any more
        self.repeat: Repeat | None = None

    def keep(self, plan: Plan) -> None:
        """A plan was decided; it stands for as many steps as it holds."""
        stands = self._is_allowed and (plan.repeats > 1 or _is_plain(plan))
        self._last = self.repeat = Repeat(plan, self._last) if stands else None

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
            self._last = self.repeat = None

    def next(self, room_bytes: Callable[[], dict[Pool, int]]) -> Plan | None:
        """The plan if it still holds; it ends where the growth of its next step finds no room."""
        repeat = self.repeat
        if repeat is not None and repeat.left and repeat.fits(room_bytes):
            return repeat.plan
        self.repeat = None
        return None

    def decodes(self, serving: Sequence[Job], page: PageSize) -> Decodes | None:
        """Those of the last plan, if it had all that are in service."""
        return None if self._last is None else self._last.decodes(serving, page)
