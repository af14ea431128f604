"""Steps of a repeated plan with equal slices, and many steps as one record."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, attrgetter, eq, itemgetter, mul
from typing import Any

from engine.contract.executor import Contexts, Launch, Pieces, Span
from engine.contract.plan import Compute, Grow, Plan
from engine.contract.regions import Pool
from engine.fast_forward.repeated_plan import RepeatedPlan, Taken
from engine.results.deliveries import Times
from engine.results.schema import Figures


@dataclass(slots=True, eq=False)
class Segment:
    """Steps of a run with one launch; `first` counts from the run's beginning.

    A cohort of decodes leads its slices: one token each, and one more is sampled. Those in the tail
    may be parts of prompts, which yield nothing, their ends, which take one step, or decodes.
    """

    first: int
    steps: int
    op: Compute  # of its first step, and so its pieces
    pieces: Pieces
    launch: Launch  # of both

    def cut(self, end: int) -> None:
        """Leaves of it what there is in a run of so many steps."""
        self.steps = min(self.steps, end - self.first)

    def launch_at(self, step: int) -> Launch:
        """The launch of a step of the run. Page tables are left out: nothing here reads them."""
        behind, of = step - self.first, self.pieces
        if not behind:
            return self.launch
        contexts = of.contexts
        assert isinstance(contexts, Contexts)
        later = contexts.after(behind, of.tokens)
        pieces = Pieces(of.job_ids, of.tokens, later, of.samples, of.tables)
        return Launch(self.op.again_as(self.op.slices), (), pieces)


_tokens = itemgetter(1)  # of a slice
_job_id, _computed, _known = map(attrgetter, ("job_id", "computed_tokens", "known_tokens"))


@cache
def _decodes(count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens and samples of so many decodes: kept once for all launches."""
    return (1,) * count, (True,) * count


@cache
def _no_tables(count: int) -> Sequence[Sequence[int]]:
    return ((),) * count


def segments(repeat: RepeatedPlan, count: int, reach: Callable[[], int]) -> Iterator[Segment]:
    """The next steps of a repeated plan, with all jobs as they are; `count` at most.

    `reach` says before each leg how many are wanted at once: none ends it.
    """
    cohort, tail, first = repeat.cohort, repeat.tail, 0
    ids, (ones, trues) = cohort.ids, _decodes(len(cohort.ids))
    contexts: list[int] = []  # of the tail, and the same below
    known: list[int] = []
    if tail:
        ids += tuple(map(_job_id, tail))
        contexts, known = list(map(_computed, tail)), list(map(_known, tail))
    tables = _no_tables(len(ids))
    tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    steps = 0
    while first < count and (wanted := reach()) > 0:
        if first and tail:
            contexts = list(map(add, contexts, map(mul, itertools.repeat(steps), tokens)))
            known = list(map(add, known, map(mul, itertools.repeat(steps), samples)))
        part, until = repeat.part(repeat.done + first)
        steps = min(wanted, min(count, until - repeat.done) - first)
        now = cohort.ahead(first, contexts)
        if part:
            tokens = tuple(map(_tokens, part))
            samples = tuple(map(eq, map(add, contexts, tokens), known))
            pieces = Pieces(ids, ones + tokens, now, trues + samples, tables)
        else:
            pieces = Pieces(ids, ones, now, trues, tables)
        op = repeat.launch(part, repeat.done + first)
        yield Segment(first, steps, op, pieces, Launch(op, (), pieces))
        first += steps


@dataclass(slots=True, eq=False)
class RepeatedSteps:
    """Steps that were issued at once. The last of them may settle one by one (run-ahead)."""

    step: int  # of the first one, over all plans
    number: int  # of the first one, over the plans of the device
    device: int
    pool: Pool
    returned: tuple[int, ...]
    legs: Sequence[Segment]
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    host_ns: int
    count: int  # steps
    settled: int  # steps that settle together
    figures: tuple[Figures, ...]  # before the first step
    grown: Times  # KV pages taken up to and with each step
    page_nbytes: int
    due: Sequence[Sequence[Taken]]  # what grows at each step, in the order of booking

    @property
    def op(self) -> Compute:
        """What stands for all steps that settle together."""
        return self.legs[0].op

    def launch_at(self, step: int) -> Launch:
        """The launch of a step."""
        return self._leg(step).launch_at(step)

    def _leg(self, step: int) -> Segment:
        return next(leg for leg in reversed(self.legs) if leg.first <= step)

    def tokens(self) -> list[tuple[tuple[int, ...], Times]]:
        """Whose tokens the steps that settle together yield, and when."""
        end_ns, settled = self.end_ns, self.settled
        return [
            (leg.pieces.sampled_ids, end_ns[leg.first : min(leg.first + leg.steps, settled)])
            for leg in self.legs
            if leg.first < settled
        ]

    def unissued_bytes(self, now_ns: int) -> int:
        """KV bytes of steps that are booked but issued only at `now_ns` or later."""
        issued = bisect_left(self.issue_ns, now_ns)
        pages = self.grown[-1] - (self.grown[issued - 1] if issued else 0)
        return pages * self.page_nbytes

    # ---- rows, as the recorder has them of single steps
    def plan_rows(self) -> Iterator[tuple[int, int, int, tuple[int, ...], Plan]]:
        for i, (at_ns, due) in enumerate(zip(self.issue_ns, self.due, strict=True)):
            plan = Plan((*[Grow(op.place, op.nbytes) for op in due], self._leg(i).op))
            yield self.step + i, self.device, at_ns, () if i else self.returned, plan

    def step_rows(self) -> Iterator[tuple[int, int, int, Span, Launch]]:
        times = (self.issue_ns, self.start_ns, self.end_ns)
        for i, (issue, start, end) in enumerate(zip(*times, strict=True)):
            if i < self.settled:
                launch = self.launch_at(i)
                span = Span(launch.op, start, end)
                yield self.step + i, issue, self.host_ns, span, launch

    def memory_rows(self) -> Iterator[tuple[int, str, int, Sequence[Figures], Any]]:
        """At each issue, and at each settle after all that was issued before it."""
        grown = self.grown
        for i, at_ns in enumerate(self.issue_ns):
            yield at_ns, "issue", self.step + i, self._after(grown[i]), None
        ends = self.end_ns[: self.settled]
        issued = [bisect_left(self.issue_ns, end_ns) for end_ns in ends]
        for i, (at_ns, count) in enumerate(zip(ends, issued, strict=True)):
            yield at_ns, "settle", self.step + i, self._after(grown[count - 1]), None

    def _after(self, pages: int) -> tuple[Figures, ...]:
        nbytes = pages * self.page_nbytes
        return tuple(f.less(-nbytes, -pages) if f.pool == self.pool else f for f in self.figures)
