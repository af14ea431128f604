"""A repeated plan under way: its growth, the steps that are left, and its steps as one record."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import chain
from operator import add, attrgetter, eq, itemgetter
from typing import Any, NamedTuple

from engine.contract.executor import Contexts, Launch, Pieces, Span
from engine.contract.job import Job
from engine.contract.plan import Compute, Grow, Plan, Slice
from engine.contract.regions import PageSize, Place, Pool
from engine.fast_forward.decode_batch import DecodeBatch, GrowCycle, Tables
from engine.results.schema import Figures
from engine.results.tables import Times

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
    """The growth that is still to come, by step and then in the plan's order. Immutable."""

    def __init__(self, queue: list[tuple[int, int, TimedGrow]]) -> None:
        self._queue = queue  # a heap: next step, index in the plan, operation
        self.first = queue[0][0] if queue else FAR  # the next step at which something grows
        self._before: tuple[int, list[Due], Growth] | None = None  # the last answer of `before`

    @classmethod
    def of(cls, grows: Sequence[TimedGrow]) -> Growth:
        """The growth of a repeated plan beside its cycle."""
        queue = [(op.first, i, op) for i, op in enumerate(grows)]
        heapify(queue)
        return cls(queue)

    def before(self, step: int) -> tuple[list[Due], Growth]:
        """The growth before a step, and the growth that is left then."""
        if self._before is not None and self._before[0] == step:
            return self._before[1:]
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
        self._before = (step, due, Growth(queue))
        return self._before[1:]

    def is_in_turn(self, steps: Mapping[Place, int], page: PageSize) -> bool:
        """Whether just these places grow, next at these steps, by a page whenever one is full."""
        a_page = (page.nbytes, page.tokens)
        found = {op.place: at for at, _, op in self._queue if (op.nbytes, op.every) == a_page}
        return len(self._queue) == len(steps) and found == steps

    def without(self, owners: Collection[int]) -> Growth:
        """The growth of all other owners."""
        queue = [due for due in self._queue if due[2].place.region.owner not in owners]
        heapify(queue)
        return Growth(queue)

    def with_last(self, owner: int, grows: Sequence[TimedGrow]) -> Growth:
        """The growth where an owner, the last in order, grows otherwise from now on."""
        queue = [due for due in self._queue if due[2].place.region.owner != owner]
        queue += [(op.first, FAR + i, op) for i, op in enumerate(grows)]
        heapify(queue)
        return Growth(queue)

    def behind(self, step: int) -> list[TimedGrow]:
        """What is still to grow, as counted from a step."""
        return [op._replace(first=at - step) for at, _, op in self._queue]


Taken = Grow | TimedGrow
Part = tuple[tuple[Slice, ...], int]
_job, _tokens = itemgetter(0), itemgetter(1)  # of a slice
_is_prefilling = attrgetter("is_prefilling")


def parts_of(tail: tuple[Slice, ...], later: Later, steps: int) -> list[Part]:
    """The slices that a tail of a launch has one after the other, each up to the step it holds."""
    found, now = list[Part](), tail
    for step, last in later:
        found.append((now, step))
        now = tail[: -len(last)] + last
    return [*found, (now, steps)]


def part_at(parts: Sequence[Part], step: int) -> Part:
    """The slices of a tail at a step, and the step at which others follow."""
    for part in parts:
        if step < part[1]:
            break
    return part


class RepeatedPlan:
    """A repeated plan under way: a batch of decodes, and a tail of prompts behind it.

    `budget`: the most tokens of a step, where jobs that arrive wait for the prompts; else 0.
    """

    def __init__(self, plan: StretchedPlan, decodes: DecodeBatch, budget: int = 0) -> None:
        launch, lead = plan.launch, len(decodes.jobs)
        self.budget = budget
        self.plan, self.steps, self.decodes, self.device = (
            plan.plan,
            plan.steps,
            decodes,
            launch.device,
        )
        self.done = 0  # steps that are issued
        self.growth = Growth.of(plan.grows)  # beside the growth of the decodes
        self.has_cycle = plan.cycle is not None
        self.places = launch.writes[lead:]  # of the tail
        self._writes, self._first = launch.writes, launch
        self.parts = parts_of(
            launch.slices[lead:], plan.later, plan.steps
        )  # slices behind the decodes, and up to which step
        self.tail: list[Job] = list(map(_job, launch.slices[lead:]))
        self._silent = self._steps_to_a_token() if self.tail else 0
        self.is_plain = plan.steps > 1 or self._is_plain()

    def _is_plain(self) -> bool:
        """Whether a single step is only growth and one launch, of decodes and then prompts."""
        plan = self.plan
        is_growth = all([type(op) is Grow for op in plan.ops[:-1]])
        is_still = not (plan.restart or plan.refuse or plan.relaid)
        return is_growth and is_still and all([job.is_prefilling for job in self.tail])

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the plan."""
        return [*self.decodes.jobs, *self.tail]

    @property
    def left(self) -> int:
        """Steps that are not issued yet."""
        return self.steps - self.done

    @property
    def silent(self) -> int:
        """Steps before the last job of the tail yields a token: all but the last of its prompt."""
        return max(0, self._silent - self.done)

    @property
    def still(self) -> int:
        """Steps that no arrival changes: the last prompt takes what is left of the budget."""
        silent = self._silent - self.done
        if silent <= 0 or not self.budget:
            return 0
        behind: int = sum(map(_tokens, part_at(self.parts, self.done)[0]))
        return silent if len(self.decodes.ids) + behind == self.budget else 0

    def wait_behind(self) -> bool:
        """A job waits behind the prompts; returns whether the plan holds for its next step."""
        self.steps = min(self.steps, self.done + self.still)
        return self.left > 0

    def go_on(self, parts: list[Part], steps: int, end: int, growth: Growth) -> None:
        """The tail goes on with other slices and growth; its last prompt ends with step `end`."""
        self.parts, self.steps, self._silent, self.growth = parts, steps, end, growth

    def _steps_to_a_token(self) -> int:
        left, steps = self.tail[-1].remaining_tokens, 0
        for part, until in self.parts:
            tokens = part[-1].tokens
            if tokens * (until - steps) >= left:
                return steps + (left - 1) // tokens
            left -= tokens * (until - steps)
            steps = until
        return steps

    def launch(self, part: tuple[Slice, ...], step: int) -> Compute:
        """The launch of a step, with `part` behind the decodes; step 0 has the plan's own."""
        if not step:
            return self._first
        return Compute(self.decodes.slices + part, (), self._writes, self.device, self._first.on)

    def due(self, count: int) -> tuple[list[tuple[Taken, ...]], list[int]]:
        """The growth of each of the next steps, in the order of booking, and its pages."""
        found: list[tuple[Taken, ...]] = [()] * count
        if self.has_cycle:
            found = [*self.decodes.due(count)]
        pages, page_nbytes, done = list(map(len, found)), self.decodes.page.nbytes, self.done
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
        """The page tables that grow in the next steps, once for each page, in that order."""
        found: list[Tables] = self.decodes.takers(count) if self.has_cycle else [()] * count
        if self.growth.first < self.done + count:
            page_nbytes = self.decodes.page.nbytes
            for step, op in self.growth.before(self.done + count)[0]:
                found[step - self.done] += (tables[op.place],) * (op.nbytes // page_nbytes)
        return chain.from_iterable(found)

    def advance(self, count: int) -> None:
        """Moves the plan on by steps that are issued."""
        self.done += count
        if self.growth.first < self.done:
            self.growth = self.growth.before(self.done)[1]
        self.decodes.clock += count

    def gather(self, tables: Mapping[Place, list[int]], tokens_left: Callable[[Job], int]) -> None:
        """Moves the tail into the decodes, where it only decodes from now on."""
        page, done, tail = self.decodes.page, self.done, self.tail
        is_last = part_at(self.parts, done)[1] == self.steps
        if not (is_last and self.has_cycle) or any(map(_is_prefilling, tail)):
            return
        pairs = [*zip(tail, self.places, strict=True)]
        spare = {place: len(tables[place]) * page.tokens - j.computed_tokens for j, place in pairs}
        if not all([0 <= tokens < page.tokens for tokens in spare.values()]):
            return
        if self.growth.is_in_turn({place: done + tokens for place, tokens in spare.items()}, page):
            self.decodes.join(pairs, tables, tokens_left)
            self.tail, self.places, self.growth = [], (), Growth([])
            self.parts = [((), self.steps)]

    def next(self) -> Plan:
        """The next step as a plan of its own."""
        if self.steps == 1:
            return self.plan
        grows = [Grow(op.place, op.nbytes) for op in self.due(1)[0][0]]
        return Plan((*grows, self.launch(part_at(self.parts, self.done)[0], self.done)))

    def fits(self, room_bytes: Callable[[], dict[Pool, int]]) -> bool:
        """Whether the growth of the next step finds room."""
        (due,), (pages,) = self.due(1)
        return not pages or pages * self.decodes.page.nbytes <= room_bytes()[due[0].place.pool]

    @property
    def is_cut(self) -> bool:
        """Whether a budget has cut the last slice: it would be longer if other jobs left."""
        if not self.tail:
            return False
        last = part_at(self.parts, self.done)[0][-1]
        return last.tokens < last.job.remaining_tokens

    def lose(self, jobs: Sequence[Job]) -> None:
        """Removes jobs that have ended."""
        decodes, gone = self.decodes, [job.job_id for job in jobs]
        for job in jobs:
            if job in decodes.jobs:
                decodes.leave(decodes.jobs.index(job))
                continue
            i = self.tail.index(job)
            del self.tail[i]
            self.places = self.places[:i] + self.places[i + 1 :]
            self.parts = [
                (tuple([piece for piece in part if piece.job is not job]), until)
                for part, until in self.parts
            ]
        self._writes = decodes.places + self.places
        if self.growth.first < FAR:
            self.growth = self.growth.without(gone)


@dataclass(slots=True, eq=False)
class RunSegment:
    """Steps of a run with equal slices; `first` counts from the run's beginning.

    Slices of decodes come first: each computes one token and yields one. A slice of the tail is a
    part of a prompt, which yields nothing, the end of one, which takes one step, or a decode.
    """

    first: int
    steps: int
    op: Compute  # of the first step, as are `pieces` and `launch`
    pieces: Pieces
    launch: Launch
    host_ns: int = 0  # of each step

    def cut(self, end: int) -> None:
        """Cuts the segment where its run ends with step `end`."""
        self.steps = min(self.steps, end - self.first)

    def again(self) -> Compute:
        """An operation for another step than the first."""
        return self.op.again_as(self.op.slices)

    def launch_at(self, step: int) -> Launch:
        """The launch of a step of the run, without page tables: rows of results have none."""
        behind, of = step - self.first, self.pieces
        if not behind:
            return self.launch
        contexts = of.contexts
        assert isinstance(contexts, Contexts)
        later = contexts.after(behind, of.tokens)
        pieces = Pieces(of.job_ids, of.tokens, later, of.samples, of.tables)
        return Launch(self.again(), (), pieces)


_first = attrgetter("first")  # step of a segment
_job_id, _computed, _known = map(attrgetter, ("job_id", "computed_tokens", "known_tokens"))


@cache
def _decodes(count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens and samples of `count` decodes, kept once for all launches."""
    return (1,) * count, (True,) * count


@cache
def _no_tables(count: int) -> Sequence[Sequence[int]]:
    return ((),) * count


def segments(repeat: RepeatedPlan, count: int, reach: Callable[[], int]) -> Iterable[RunSegment]:
    """The next steps of a repeated plan, `count` at most; no job moves on.

    `reach` gives the most steps of each segment before it is made; 0 ends the run.
    """
    if repeat.tail:
        return _with_tail(repeat, count, reach)
    decodes, steps = repeat.decodes, min(reach(), count)
    if not steps:
        return ()
    ids, (ones, trues) = decodes.ids, _decodes(len(decodes.ids))
    pieces = Pieces(ids, ones, decodes.ahead(0, ()), trues, _no_tables(len(ids)))
    op = repeat.launch((), repeat.done)
    return (RunSegment(0, steps, op, pieces, Launch(op, (), pieces)),)


def _with_tail(repeat: RepeatedPlan, count: int, reach: Callable[[], int]) -> Iterator[RunSegment]:
    """See `segments`."""
    decodes, tail, done, first = repeat.decodes, repeat.tail, repeat.done, 0
    ids, (ones, trues) = decodes.ids, _decodes(len(decodes.ids))
    ids += tuple(map(_job_id, tail))
    contexts, known = list(map(_computed, tail)), list(map(_known, tail))
    tables = _no_tables(len(ids))
    while first < count and (reached := reach()) > 0:
        part, until = part_at(repeat.parts, done + first)
        steps = min(reached, count - first, until - done - first)
        tokens = tuple(map(_tokens, part))
        samples = tuple(map(eq, map(add, contexts, tokens), known))
        now = decodes.ahead(first, contexts)
        pieces = Pieces(ids, ones + tokens, now, trues + samples, tables)
        op = repeat.launch(part, done + first)
        yield RunSegment(first, steps, op, pieces, Launch(op, (), pieces))
        first += steps
        if first < count:
            contexts = [context + steps * n for context, n in zip(contexts, tokens, strict=True)]
            known = [tokens_now + steps * n for tokens_now, n in zip(known, samples, strict=True)]


class StepsAhead(NamedTuple):
    """Steps up to the end of a job, not issued yet: a run, or a part of one."""

    segments: list[RunSegment]
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    asks_ns: int  # when the engine may ask for the step behind the last one
    due: list[tuple[Taken, ...]]  # what grows at each step, in the order of booking
    grown: Times  # KV pages taken up to and with each step


@dataclass(slots=True, eq=False)
class RepeatedSteps:
    """Steps that were issued at once. The last of them may end while another run passes."""

    step: int  # of the first one, over all plans
    number: int  # of the first one, over the plans of the device
    device: int
    pool: Pool
    returned: dict[int, tuple[int, ...]]  # by step, the jobs whose memory comes back before it
    figures: tuple[Figures, ...]  # before the first step
    held_pages: int  # of KV, before the first step
    page_nbytes: int
    segments: list[RunSegment]  # this and what follows are as of StepsAhead
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    asks_ns: int
    due: list[tuple[Taken, ...]]
    grown: Times
    count: int  # steps
    settled: int  # steps that do not settle by an event of their own
    ended: int  # steps that end before the next question
    told: int  # steps whose tokens are delivered
    last_pages: list[int]  # as `grown`, where the last steps settle
    entered: int = 0  # segments whose launches are in the books
    back_pages: int = 0  # of KV, which come back behind the last step

    def add(self, steps: StepsAhead, returned: tuple[int, ...]) -> None:
        """Goes on with more steps, before which memory of jobs comes back."""
        if returned:
            self.returned[self.count] = returned
        for segment in steps.segments:
            segment.first += self.count
        pages, self.back_pages = self.grown[-1] - self.back_pages, 0
        self.grown.extend(map(pages.__add__, steps.grown))
        self.segments += steps.segments
        self.issue_ns += steps.issue_ns
        self.start_ns += steps.start_ns
        self.end_ns += steps.end_ns
        self.asks_ns = steps.asks_ns
        self.due += steps.due
        self.count = self.settled = self.ended = len(self.issue_ns)

    def launch_at(self, step: int) -> Launch:
        """The launch of a step."""
        return self.segment(step).launch_at(step)

    def segment(self, step: int) -> RunSegment:
        """The segment of a step."""
        return self.segments[bisect_right(self.segments, step, key=_first) - 1]

    def tokens(self, until: int) -> list[tuple[tuple[int, ...], Times]]:
        """Requests that get tokens in the steps up to this one that are not told, and when."""
        begin, self.told = self.told, until
        found: list[tuple[tuple[int, ...], Times]] = []
        for segment in self.segments:
            first, behind = segment.first, segment.first + segment.steps
            if first < until and begin < behind:
                times = self.end_ns[max(first, begin) : min(behind, until)]
                found.append((segment.pieces.sampled_ids, times))
        return found

    def unissued_pages(self, now_ns: int) -> int:
        """KV pages of steps that are booked but issued only at `now_ns` or later.

        Less than 0 where more pages come back than are taken.
        """
        issued = bisect_left(self.issue_ns, now_ns)
        return self.grown[-1] - self.back_pages - (self.grown[issued - 1] if issued else 0)

    def settled_pages(self) -> Times:
        """As `grown`, where each step settles: by then later steps are issued."""
        ends = self.end_ns[: self.settled - len(self.last_pages)]
        pages = [self.grown[bisect_left(self.issue_ns, end_ns) - 1] for end_ns in ends]
        return array("q", pages + self.last_pages)

    def grows(self) -> Iterator[Sequence[Taken]]:
        """The growth of each step, in the order of booking."""
        return iter(self.due)

    # ---- rows, as the recorder has them of single steps
    def plan_rows(self) -> Iterator[tuple[int, int, int, tuple[int, ...], Plan]]:
        for i, (at_ns, due) in enumerate(zip(self.issue_ns, self.due, strict=True)):
            plan = Plan((*[Grow(op.place, op.nbytes) for op in due], self.segment(i).op))
            yield self.step + i, self.device, at_ns, self.returned.get(i, ()), plan

    def step_rows(self) -> Iterator[tuple[int, int, int, Span, Launch]]:
        times = (self.issue_ns, self.start_ns, self.end_ns)
        for i, (issue, start, end) in enumerate(zip(*times, strict=True)):
            if i < self.settled:
                launch = self.launch_at(i)
                span = Span(launch.op, start, end)
                yield self.step + i, issue, self.segment(i).host_ns, span, launch

    def memory_rows(self) -> Iterator[tuple[int, str, int, Sequence[Figures], Any]]:
        """At each issue, and at each settle after all that was issued before it."""
        grown = self.grown
        for i, at_ns in enumerate(self.issue_ns):
            yield at_ns, "issue", self.step + i, self._after(grown[i]), None
        for i, pages in enumerate(self.settled_pages()):
            yield self.end_ns[i], "settle", self.step + i, self._after(pages), None

    def _after(self, pages: int) -> tuple[Figures, ...]:
        nbytes = pages * self.page_nbytes
        return tuple(f.less(-nbytes, -pages) if f.pool == self.pool else f for f in self.figures)
