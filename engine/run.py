"""Many steps of one repeated plan as a single record: expanded only when tables are written."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from engine.executor import Launch, Pieces, Span
from engine.plan import Compute, Grow, Plan, Pool

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length


class Figures(NamedTuple):
    """What a pool holds at one moment; the order of columns in MEMORY."""

    pool: Pool
    capacity_bytes: int
    free_bytes: int
    coming_bytes: int
    kind_bytes: tuple[int, ...]  # in the order of Kind, KV first
    kv_pages: int

    def less(self, nbytes: int, pages: int) -> Figures:
        """The same before these bytes of KV were taken."""
        kv, *others = self.kind_bytes
        return self._replace(
            free_bytes=self.free_bytes + nbytes,
            kind_bytes=(kv - nbytes, *others),
            kv_pages=self.kv_pages - pages,
        )


@dataclass(slots=True, eq=False)
class Run:
    """Steps that were issued at once. The last of them may settle one by one (run-ahead)."""

    plan: Plan
    first: int  # step of the plan
    step: int  # of the first one, over all plans
    number: int  # of the first one, over the plans of the device
    device: int
    pool: Pool
    returned: tuple[int, ...]
    launch: Launch  # of the first step
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    host_ns: int
    settled: int  # steps that settle together
    figures: tuple[Figures, ...]  # before the first step
    grown: Times  # KV bytes taken up to and with each step
    page_nbytes: int
    peak_bytes: Callable[[Launch], int | None]
    grows: Sequence[Grow]  # in the order of booking

    def __len__(self) -> int:
        return len(self.issue_ns)

    def launch_at(self, step: int) -> Launch:
        """The launch of a step. Page tables are left out: nothing here reads them."""
        op, of = self.launch.op, self.launch.pieces
        assert isinstance(op, Compute) and isinstance(of, Pieces)
        if not step:
            return self.launch
        contexts = [c + step * n for c, n in zip(of.contexts, of.tokens, strict=True)]
        pieces = Pieces(of.job_ids, of.tokens, contexts, of.samples, of.tables)
        return Launch(replace(op), (), pieces)

    def unissued_bytes(self, now_ns: int) -> int:
        """KV bytes of steps that are booked but issued only at `now_ns` or later."""
        issued = bisect_left(self.issue_ns, now_ns)
        return self.grown[-1] - (self.grown[issued - 1] if issued else 0)

    # ---- rows, as the recorder has them of single steps
    def plan_rows(self) -> Iterator[tuple[int, int, int, tuple[int, ...], Plan]]:
        for i, at_ns in enumerate(self.issue_ns):
            plan = self.plan.at(self.first + i)
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


def growth(plan: Plan, first: int, count: int) -> list[tuple[int, Grow]]:
    """All that grows in `count` steps from `first` on, in the order of booking."""
    due = [
        (step - first, op)
        for op in plan.ops
        if isinstance(op, Grow)
        for step in op.steps(first + count)
        if step >= first
    ]
    due.sort(key=lambda pair: pair[0])  # stable: within a step in the plan's order
    return due
