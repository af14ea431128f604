"""Plans that hold for many steps: when the same slices are wanted again, and how far one got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.growth import Due, Growth
from engine.job import Job
from engine.plan import Compute, Grow, Plan, Pool, Slice, one_token
from engine.view import View

FOREVER = 1 << 30


class Course(NamedTuple):
    """For how many steps slices are wanted, and what the last of them become on the way."""

    steps: int
    later: tuple[tuple[int, tuple[Slice, ...]], ...] = ()


ONCE = Course(1)


def course(plan: Plan, view: View, appends: bool) -> Course:
    """How a plan goes on if nobody arrives, ends or comes in.

    All in service must have a slice: single tokens, and behind them prompts, the last perhaps cut
    by the budget. Where the scheduling `appends` what it has begun last to its decodes, and nobody
    waits for what the prompts leave of the budget, their rest and then their decodes follow.
    Anything else than growth and one launch is not repeated.
    """
    if not plan.ops or plan.restart or plan.refuse or view.training:
        return ONCE
    *before, launch = plan.ops
    if not isinstance(launch, Compute) or not all([type(op) is Grow for op in before]):
        return ONCE
    jobs = [piece.job for piece in launch.slices]
    num_decodes = len(jobs)
    while num_decodes and jobs[num_decodes - 1].is_prefilling:
        num_decodes -= 1
    prompts = jobs[num_decodes:]
    is_new = [not job.computed_tokens for job in prompts]
    if len(jobs) - sum(is_new) != len(view.serving):
        return ONCE
    if any([job.is_prefilling for job in jobs[:num_decodes]]):
        return ONCE
    if not prompts:
        return Course(FOREVER)
    if appends and [*view.serving[num_decodes:], *view.waiting] == prompts:
        return _through(launch.slices, num_decodes)
    last = launch.slices[-1]
    cut = (last.job.remaining_tokens - 1) // last.tokens  # slices like this that leave a rest
    return Course(cut) if cut and len(prompts) == 1 else ONCE


def _through(slices: Sequence[Slice], num_decodes: int) -> Course:
    """The way of prompts into decodes: all but the last end now, the last may take more steps."""
    *ended, last = slices[num_decodes:]
    if any([piece.tokens < piece.job.remaining_tokens for piece in ended]):
        return ONCE
    ones = tuple([one_token(piece.job) for piece in ended])
    job, left = last.job, last.job.remaining_tokens - last.tokens
    later, step = list[tuple[int, tuple[Slice, ...]]](), 1
    if left:
        tokens = sum([piece.tokens for piece in slices]) - (len(slices) - 1)  # beside decodes
        full = (left - 1) // tokens
        if full and tokens > last.tokens:
            later.append((step, (*ones, Slice(job, tokens))))
        step += full
        later.append((step, (*ones, Slice(job, left - full * tokens))))
        step += 1
    return Course(FOREVER, (*later, (step, (*ones, one_token(job)))))


class Repeat:
    """A repeated plan under way."""

    def __init__(self, plan: Plan, done: int = 0, growth: Growth | None = None) -> None:
        self.plan = plan
        self.done = done  # steps issued
        self.growth = growth or Growth.of(plan)

    @property
    def left(self) -> int:
        """Steps that are not issued yet."""
        return self.plan.repeats - self.done

    @property
    def has_prompts(self) -> bool:
        """Whether prompts end with the next step beside the last slice."""
        return not self.done and bool(self.plan.later) and len(self.plan.later[0][1]) > 1

    @property
    def silent(self) -> int:
        """Steps before the last slice yields a token: parts of its prompt but the last."""
        last = self.plan.launch(self.done).slices[-1]
        return (last.job.remaining_tokens - 1) // last.tokens

    def due(self, count: int) -> list[Due]:
        """What grows in the next steps, by step from now on."""
        found, _ = self.growth.before(self.done + count)
        return [(step - self.done, op) for step, op in found]

    def advance(self, count: int) -> None:
        """Steps are issued."""
        self.done += count
        _, self.growth = self.growth.before(self.done)

    def next(self) -> Plan:
        """The next step as a plan of its own."""
        plan = self.plan.one_step(self.done, [op for _, op in self.due(1)])
        self.advance(1)
        return plan

    def fits(self, room_bytes: Callable[[], dict[Pool, int]]) -> bool:
        """Whether what grows with the next step finds room."""
        due = self.due(1)
        if not due:
            return True
        room = room_bytes()
        for _, op in due:
            room[op.place.pool] -= op.nbytes
        return min(room.values()) >= 0

    def without(self, jobs: Sequence[Job]) -> Repeat | None:
        """What is left when some have ended and nobody waits for their room.

        None where a budget has cut a prompt: it would take more now.
        """
        gone = {job.job_id for job in jobs}
        launch = self.plan.launch(self.done)
        if launch.slices[-1].tokens < launch.slices[-1].job.remaining_tokens:
            return None
        slices = tuple([s for s in launch.slices if s.job.job_id not in gone])
        if not slices:
            return None
        writes = tuple([p for p in launch.writes if p.region.owner not in gone])
        later = [
            (first, tuple([s for s in tail if s.job.job_id not in gone]))
            for first, tail in self.plan.later
            if first > self.done
        ]
        launch = replace(launch, slices=slices, writes=writes)
        plan = replace(self.plan, ops=(launch,), later=tuple(later))  # the rest is in the growth
        return Repeat(plan, self.done, self.growth.without(gone))


class Standing:
    """The plan that is issued again without a question, as long as nothing happens."""

    def __init__(self, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self.repeat: Repeat | None = None

    def keep(self, plan: Plan) -> None:
        """A plan was decided; it stands if it holds for more than one step."""
        self.repeat = Repeat(plan) if plan.repeats > 1 and self._is_allowed else None

    def drop(self) -> None:
        """Something happened: the policy has to be asked."""
        self.repeat = None

    def lose(self, jobs: Sequence[Job], somebody_waits: bool) -> None:
        """Jobs have ended: without them, unless somebody may come in for them."""
        if self.repeat is not None:
            self.repeat = None if somebody_waits else self.repeat.without(jobs)

    def next(self, room_bytes: Callable[[], dict[Pool, int]]) -> Plan | None:
        """The plan if it still holds; it ends where the growth of its next step finds no room."""
        repeat = self.repeat
        if repeat is not None and repeat.left and repeat.fits(room_bytes):
            return repeat.plan
        self.repeat = None
        return None
