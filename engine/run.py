"""Many steps of a repeated plan as a single record: expanded only when tables are written."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine.executor import Launch, Span
from engine.figures import Figures
from engine.growth import Due
from engine.leg import Leg
from engine.plan import Compute, Grow, Plan, Pool

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length


@dataclass(slots=True, eq=False)
class Run:
    """Steps that were issued at once. The last of them may settle one by one (run-ahead)."""

    step: int  # of the first one, over all plans
    number: int  # of the first one, over the plans of the device
    device: int
    pool: Pool
    returned: tuple[int, ...]
    legs: Sequence[Leg]
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    host_ns: int
    settled: int  # steps that settle together
    figures: tuple[Figures, ...]  # before the first step
    grown: Times  # KV bytes taken up to and with each step
    page_nbytes: int
    peak_bytes: Callable[[Launch], int | None]
    due: Sequence[Due]  # what grows, by step of the run, in the order of booking

    def __len__(self) -> int:
        return len(self.issue_ns)

    @property
    def op(self) -> Compute:
        """What stands for all steps that settle together."""
        return self.legs[0].op

    def launch_at(self, step: int) -> Launch:
        """The launch of a step."""
        return self._leg(step).launch_at(step)

    def _leg(self, step: int) -> Leg:
        return next(leg for leg in reversed(self.legs) if leg.first <= step)

    def tokens(self) -> Iterator[tuple[Sequence[int], Times]]:
        """Whose tokens the steps that settle together yield, and when: jobs share one list."""
        ids, times, legs = self.legs[0].pieces.job_ids, self.end_ns, self.legs
        if self.settled < len(times):
            times = times[: self.settled]
        if legs[0].samples_all:  # and later ones do so, too
            yield ids, times
            return
        tail = range(len(legs[0].tail))
        silent = [sum([leg.steps for leg in legs if not leg.tail[i][1]]) for i in tail]
        yield ids[: -len(silent)], times
        for job_id, steps in zip(ids[-len(silent) :], silent, strict=True):
            yield (job_id,), times[steps:]

    def unissued_bytes(self, now_ns: int) -> int:
        """KV bytes of steps that are booked but issued only at `now_ns` or later."""
        issued = bisect_left(self.issue_ns, now_ns)
        return self.grown[-1] - (self.grown[issued - 1] if issued else 0)

    # ---- rows, as the recorder has them of single steps
    def plan_rows(self) -> Iterator[tuple[int, int, int, tuple[int, ...], Plan]]:
        grows: dict[int, list[Grow]] = defaultdict(list)
        for i, op in self.due:
            grows[i].append(Grow(op.place, op.nbytes))
        for i, at_ns in enumerate(self.issue_ns):
            plan = Plan((*grows[i], self._leg(i).op))
            yield self.step + i, self.device, at_ns, () if i else self.returned, plan

    def step_rows(self) -> Iterator[tuple[int, int, int, Span, Launch]]:
        times = (self.issue_ns, self.start_ns, self.end_ns)
        for i, (issue, start, end) in enumerate(zip(*times, strict=True)):
            if i < self.settled:
                launch = self.launch_at(i)
                span = Span(launch.op, start, end, self.peak_bytes(launch))
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

    def _after(self, nbytes: int) -> tuple[Figures, ...]:
        pages = nbytes // self.page_nbytes
        return tuple(f.less(-nbytes, -pages) if f.pool == self.pool else f for f in self.figures)
