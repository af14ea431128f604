"""Many steps of a repeated plan as a single record: expanded only when tables are written."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.deliveries import Times
from engine.executor import Launch, Span
from engine.figures import Figures
from engine.leg import Leg
from engine.plan import Compute, Grow, Plan, Pool


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
    count: int  # steps
    settled: int  # steps that settle together
    figures: tuple[Figures, ...]  # before the first step
    grown: Times  # KV pages taken up to and with each step
    page_nbytes: int
    due: Sequence[Sequence[Grow]]  # what grows at each step, in the order of booking

    @property
    def op(self) -> Compute:
        """What stands for all steps that settle together."""
        return self.legs[0].op

    def launch_at(self, step: int) -> Launch:
        """The launch of a step."""
        return self._leg(step).launch_at(step)

    def _leg(self, step: int) -> Leg:
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
