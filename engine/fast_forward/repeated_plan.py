"""A repeated plan under way: its progress, its growth, and what is left when jobs have ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.plan import Compute, Grow, Plan, Slice
from engine.contract.regions import PageSize, Place, Pool
from engine.fast_forward.decode_batch import DecodeBatch, GrowCycle, Tables

Due = tuple[int, "TimedGrow"]  # with its step
Later = tuple[tuple[int, tuple[Slice, ...]], ...]  # from a step on, the last slices are these
FAR = 1 << 62
_step = itemgetter(0)


class TimedGrow(NamedTuple):
    """Adds bytes to a place at step `first` of a plan, then every `every` steps (0: once)."""

    place: Place
    nbytes: int
    first: int = 0
    every: int = 0


class StretchedPlan(NamedTuple):
    """A plan that holds for `steps` steps, each of them a plan of its own.

    `later` says what the last slices of its launch become, and at which step: the rest of a prompt,
    then its decodes. A plan of one step may hold any operations; one of several is growth, maybe
    the decodes' `cycle` before it, and one launch.
    """

    plan: Plan  # its first step, as the policy has decided
    launch: Compute
    grows: tuple[TimedGrow, ...]
    cycle: GrowCycle | None = None
    steps: int = 1
    later: Later = ()

    @classmethod
    def once(cls, plan: Plan, launch: Compute) -> StretchedPlan:
        """A plan for a single step, which ends in a launch."""
        grows = [TimedGrow(op.place, op.nbytes) for op in plan.ops if isinstance(op, Grow)]
        return cls(plan, launch, tuple(grows))


class Growth:
    """All that is still to grow: by step, within a step in the plan's order. Never changed."""

    def __init__(self, queue: list[tuple[int, int, TimedGrow]]) -> None:
        self._queue = queue  # a heap: each operation with its next step and where it is in the plan
        self.first = queue[0][0] if queue else FAR  # the next step at which something grows
        self._told: tuple[int, list[Due], Growth] | None = None  # the last answer of `before`

    @classmethod
    def of(cls, grows: Sequence[TimedGrow]) -> Growth:
        """All that a repeated plan takes beside its cycle."""
        queue = [(op.first, i, op) for i, op in enumerate(grows)]
        heapify(queue)
        return cls(queue)

    def before(self, step: int) -> tuple[list[Due], Growth]:
        """What grows before that step, and what is left then."""
        if self._told is not None and self._told[0] == step:
            return self._told[1:]
        queue = self._queue.copy()
        due: list[Due] = []
        while queue and queue[0][0] < step:
            at, i, op = queue[0]
            due.append((at, op))
            if op.every:
                heapreplace(queue, (at + op.every, i, op))
            else:
                heappop(queue)
        due.sort(key=_step)
        self._told = (step, due, Growth(queue))
        return self._told[1:]

    def is_in_turn(self, steps: Mapping[Place, int], page: PageSize) -> bool:
        """Whether just these places grow, next at these steps, by a page whenever it is full."""
        a_page = (page.nbytes, page.tokens)
        found = {op.place: at for at, _, op in self._queue if (op.nbytes, op.every) == a_page}
        return len(self._queue) == len(steps) and found == steps

    def without(self, owners: Collection[int]) -> Growth:
        """The same for all others."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        return Growth(queue)


Taken = Grow | TimedGrow
Part = tuple[tuple[Slice, ...], int]
_job, _is_prefilling = itemgetter(0), attrgetter("is_prefilling")


def _parts(plan: StretchedPlan, lead: int) -> list[Part]:
    """What follows the first slices of a repeated plan, and up to which step."""
    part = plan.launch.slices[lead:]
    if not plan.later:
        return [(part, plan.steps)]
    found, now = list[Part](), part
    for step, last in plan.later:
        found.append((now, step))
        now = part[: -len(last)] + last
    return [*found, (now, plan.steps)]


class RepeatedPlan:
    """A repeated plan under way: a batch of decodes, and a tail of prompts behind it."""

    def __init__(self, plan: StretchedPlan, cohort: DecodeBatch) -> None:
        launch, lead = plan.launch, len(cohort.jobs)
        self.plan, self.steps, self.cohort, self.device = (
            plan.plan,
            plan.steps,
            cohort,
            launch.device,
        )
        self.done = 0  # steps issued
        self.growth = Growth.of(plan.grows)  # beside the decodes'
        self._has_cycle = plan.cycle is not None
        self.places = launch.writes[lead:]  # of the tail
        self._writes, self._first = launch.writes, launch
        self._parts = _parts(plan, lead)  # what follows the decodes, and up to which step
        self.tail: list[Job] = list(map(_job, launch.slices[lead:]))
        self._silent = self._steps_to_a_token() if self.tail else 0
        self.is_plain = plan.steps > 1 or self._is_plain()

    def _is_plain(self) -> bool:
        """Whether a single step is nothing but growth and a launch of decodes and then prompts."""
        plan = self.plan
        is_growth = all([type(op) is Grow for op in plan.ops[:-1]])
        is_still = not (plan.restart or plan.refuse)
        return is_growth and is_still and all([job.is_prefilling for job in self.tail])

    @property
    def jobs(self) -> list[Job]:
        """All that are in it."""
        return [*self.cohort.jobs, *self.tail]

    @property
    def left(self) -> int:
        """Steps that are not issued yet."""
        return self.steps - self.done

    @property
    def silent(self) -> int:
        """Steps before the last of its tail yields a token: parts of its prompt but the last."""
        return max(0, self._silent - self.done)

    def _steps_to_a_token(self) -> int:
        left, steps = self.tail[-1].remaining_tokens, 0
        for part, until in self._parts:
            tokens = part[-1].tokens
            if tokens * (until - steps) >= left:
                return steps + (left - 1) // tokens
            left -= tokens * (until - steps)
            steps = until
        return steps

    def part(self, step: int) -> Part:
        """The slices of the tail at that step, and the step at which they become others."""
        for part in self._parts:
            if step < part[1]:
                break
        return part

    def launch(self, part: tuple[Slice, ...], step: int) -> Compute:
        """The launch of a step, with its part behind the cohort; the plan's own is the first."""
        if not step:
            return self._first
        return Compute(self.cohort.slices + part, (), self._writes, self.device, self._first.on)

    def due(self, count: int) -> tuple[list[tuple[Taken, ...]], list[int]]:
        """What grows in each of the next steps, in the order of booking, and how many pages."""
        found = list[tuple[Taken, ...]]([()] * count)
        if self._has_cycle:
            found = [*self.cohort.due(count)]
        pages, page_nbytes, done = list(map(len, found)), self.cohort.page.nbytes, self.done
        if self.growth.first < done + count:
            for step, op in self.growth.before(done + count)[0]:
                found[step - done] += (op,)
                more, rest = divmod(op.nbytes, page_nbytes)
                assert more >= 0 and not rest, (
                    f"{op.place} takes {op.nbytes} bytes: below zero, or no whole pages"
                )
                pages[step - done] += more
        return found, pages

    def takers(self, count: int, tables: Mapping[Place, list[int]]) -> Iterator[list[int]]:
        """The page tables that grow in the next steps, once for each page, in the same order."""
        found: list[Tables] = self.cohort.takers(count) if self._has_cycle else [()] * count
        if self.growth.first < self.done + count:
            page_nbytes = self.cohort.page.nbytes
            for step, op in self.growth.before(self.done + count)[0]:
                found[step - self.done] += (tables[op.place],) * (op.nbytes // page_nbytes)
        return chain.from_iterable(found)

    def advance(self, count: int) -> None:
        """Steps are issued."""
        self.done += count
        if self.growth.first < self.done:
            self.growth = self.growth.before(self.done)[1]
        self.cohort.clock += count

    def gather(self, tables: Mapping[Place, list[int]], tokens_left: Callable[[Job], int]) -> None:
        """Where its tail decodes from now on, it moves with the cohort: nothing else changes."""
        page, done, tail = self.cohort.page, self.done, self.tail
        is_last = self.part(done)[1] == self.steps
        if not (is_last and self._has_cycle) or any(map(_is_prefilling, tail)):
            return
        pairs = [*zip(tail, self.places, strict=True)]
        spare = {place: len(tables[place]) * page.tokens - j.computed_tokens for j, place in pairs}
        if not all([0 <= tokens < page.tokens for tokens in spare.values()]):
            return
        if self.growth.is_in_turn({place: done + tokens for place, tokens in spare.items()}, page):
            self.cohort.join(pairs, tables, tokens_left)
            self.tail, self.places, self.growth = [], (), Growth([])
            self._parts = [((), self.steps)]

    def next(self) -> Plan:
        """The next step as a plan of its own."""
        if self.steps == 1:
            return self.plan
        grows = [Grow(op.place, op.nbytes) for op in self.due(1)[0][0]]
        return Plan((*grows, self.launch(self.part(self.done)[0], self.done)))

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
                (tuple([piece for piece in part if piece.job is not job]), until)
                for part, until in self._parts
            ]
        self._writes = cohort.places + self.places
        self.growth = self.growth.without(gone)
