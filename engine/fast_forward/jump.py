"""The jump: on a virtual clock, many steps of a repeated plan are issued and settled at once."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, chain
from operator import sub
from typing import Any, NamedTuple

import simpy

from engine.contract.executor import Launch, Repeater, Span
from engine.contract.plan import Compute
from engine.contract.regions import Tier
from engine.fast_forward.repeated_plan import RepeatedPlan, RepeatedSteps, RunSegment, segments
from engine.loop.completions import Completions, DeferredFrees
from engine.loop.issuing import Issuing
from engine.loop.state import EngineState, IssuedOp, Lifecycle, Turn, passed_to
from engine.results.tables import Times

MOST = 1024  # steps of one jump
Moments = tuple[Times, Times, Times]  # when steps are issued, start and end


class LastStep(NamedTuple):
    """A step at the end of a run with which jobs end, or which is open.

    An open one has not ended when the engine asks next: its launch is in the books.
    """

    end_ns: int
    run: RepeatedSteps
    step: int  # of the run
    op: Compute
    is_open: bool
    has_ends: bool  # jobs end with it


class Jump:
    """Issues the steps up to the next arrival or end; at a tie the arrival comes first.

    Results are those of single steps, to the nanosecond and the page. At run-ahead d step i is
    issued when the host has prepared step i-1 and step i-d has ended; it starts when step i-1 has
    ended and the host has prepared it:

        issue[i] = max(issue[i-1] + host, end[i-d])
        start[i] = max(end[i-1], issue[i] + host)

    A run passes up to the issue of the step behind it, where the engine asks next. By then its last
    d-1 steps are open: they end while the next run passes. Only where no run follows does each of
    them settle by an event of its own.
    """

    def __init__(
        self,
        state: EngineState,
        completions: Completions,
        frees: DeferredFrees,
        issuing: Issuing,
        lifecycle: Lifecycle,
        next_arrival_ns: Callable[[], int | None],
        executor: Repeater,
    ) -> None:
        self._state, self._completions, self._frees = state, completions, frees
        self._issuing, self._lifecycle, self._executor = issuing, lifecycle, executor
        self._next_arrival_ns, self._prefix = next_arrival_ns, issuing.prefix
        self._decode_step_ns = 1  # duration of the last step of decodes alone
        self._seen_ns = 0  # about when the steps planned so far end
        self._until_ns: int | None = None  # no step is issued from then on
        self._run: RepeatedSteps | None = None  # the last run
        self._last: deque[LastStep] = deque()  # in the order of their ends
        self.steps = 0

    def carry_out(
        self, repeat: RepeatedPlan, device: int, stands: Callable[[RepeatedPlan], bool]
    ) -> Generator[simpy.Event, Any, bool]:
        """Issues steps at once; returns False where the next step must be issued by itself.

        `stands` says whether the plan still holds behind a run, with the memory that may be shown
        by then.
        """
        run = self._plan(repeat, device) if repeat.is_plain else None
        if run is None:
            return False
        level = self._state.in_flight.level
        while run is not None:
            self._run = run
            self.steps += run.count
            self._issue(run, repeat)
            level[device] += self._state.depth  # jobs that arrive meanwhile wake nothing
            yield from self._pass(run)
            level[device] -= self._state.depth
            if not self._state.jobs or level[device] > len(self._last):
                self.settle_alone()
            self._lifecycle.give_back(device)
            run = self._plan(repeat, device) if stands(repeat) else None
        return True

    def _pass(self, run: RepeatedSteps) -> Turn:
        """Lets time pass up to the next question. Jobs finish at the moment of their end."""
        env, last, asks_ns = self._state.env, self._last, run.asks_ns
        now_ns, due = run.issue_ns[0], None
        while last and last[0].end_ns <= asks_ns:
            step = last.popleft()
            if step.has_ends:
                end_ns = step.end_ns
                if due is None and end_ns < asks_ns:
                    due = simpy.Timeout(env, asks_ns - now_ns)
                if end_ns > now_ns and not passed_to(env, end_ns):
                    yield simpy.Timeout(env, end_ns - now_ns)
                now_ns = end_ns
                self._lifecycle.finish(step.op, end_ns, run.device, step.run.number + step.step)
            if step.is_open:
                self._land(step, run)
        if due is not None:
            yield due
        elif asks_ns > now_ns and not passed_to(env, asks_ns):
            yield simpy.Timeout(env, asks_ns - now_ns)
        if run.end_ns[-1] <= asks_ns:
            self._state.recorder.run_settled(run)
        if self._next_arrival_ns() == asks_ns and self._is_woken(run):  # turns behind an answer
            yield simpy.Timeout(env, 0)

    def _is_woken(self, run: RepeatedSteps) -> bool:
        """Whether the engine asks because a step ends, not because the host is ready."""
        return self._state.depth == 1 or run.asks_ns > run.issue_ns[-1] + run.host_ns

    def _land(self, step: LastStep, now: RepeatedSteps) -> None:
        """An open step of an earlier run has ended, while the run `now` passes."""
        state, end_ns, run, at, op, *_ = self._state, *step
        state.ledger.settle(op)
        state.in_flight.land(op)
        pages = state.ledger.held_pages(run.pool) - now.unissued_pages(end_ns)
        run.last_pages.append(pages - run.held_pages)
        if at == run.count - 1:
            state.recorder.run_settled(run)

    def settle_alone(self) -> None:
        """No run follows now: each open step settles by an event of its own."""
        state, last = self._state, self._last
        for step in last:
            step.run.settled -= 1
        for run in dict.fromkeys([step.run for step in last]):
            state.recorder.run_settled(run)
        for end_ns, run, i, op, *_ in last:
            launch = Launch(op, (), run.launch_at(i).pieces)
            numbers, issue_ns = (run.step + i, run.device, run.number + i), run.issue_ns[i]
            state.in_flight.start(IssuedOp(*numbers, issue_ns, run.host_ns, launch))
            self._executor.hold(launch, Span(op, run.start_ns[i], end_ns), self._lifecycle.settle)
        last.clear()

    def unissued_bytes(self, now_ns: int) -> int:
        """KV that is booked for steps which are issued only at `now_ns` or later."""
        run = self._run
        if run is None or now_ns > run.issue_ns[-1]:
            return 0
        return run.unissued_pages(now_ns) * run.page_nbytes

    # ---- planning: nothing is changed
    def _plan(self, repeat: RepeatedPlan, device: int) -> RepeatedSteps | None:
        end = self._next_end() if self._last else None
        limit, lead, host_ns = self._limit(repeat, device, end), len(repeat.decodes.jobs), 0
        if limit < 1 or not self._is_calm(end):
            return None
        now_ns = self._seen_ns = self._state.now_ns
        until_ns = self._next_arrival_ns()
        if end is not None:  # the next turn of its job may arrive then
            until_ns = end.end_ns if until_ns is None else min(until_ns, end.end_ns)
        self._until_ns = until_ns
        ahead: list[RunSegment] = []
        durations: list[int] = []
        for segment in segments(repeat, limit, self._steps_to_change):
            found = self._executor.repeat(segment.launch, segment.steps)
            if found is None:
                return None
            if segment.first and found[1] != host_ns:  # a run has one host time
                break
            ahead.append(segment)
            durations += found[0]
            host_ns = found[1]
            beside_ns = host_ns if self._state.depth == 1 else 0  # else the host works meanwhile
            self._seen_ns += sum(found[0]) + segment.steps * beside_ns
            if sum(tokens := segment.pieces.tokens[lead:]) == len(tokens):  # decodes alone
                self._decode_step_ns = max(1, durations[-1] + beside_ns, host_ns)
        if not durations:
            return None
        before = self._ends_before()
        issue, start, end = _times(now_ns, before, durations, host_ns)
        if until_ns is not None and issue[-1] >= until_ns:
            limit = bisect_left(issue, until_ns)
            if not limit:
                return None
            issue, start, end = issue[:limit], start[:limit], end[:limit]
            ahead = [segment for segment in ahead if segment.first < limit]
            ahead[-1].cut(limit)
        count = len(issue)
        asks_ns = end[-len(before)] if count >= len(before) else before[count]
        asks_ns = max(asks_ns, issue[-1] + host_ns)
        return self._made(repeat, device, ahead, (issue, start, end), asks_ns, host_ns)

    def _ends_before(self) -> Sequence[int]:
        """When as many plans as may be in flight end, before the first step; 0 for none."""
        depth = self._state.depth
        if depth == 1:
            return (0,)
        found = [step.end_ns for step in self._last]
        if not found:
            found = sorted(self._executor.end_times_ns(self._state.in_flight.tails))
        return [0] * (depth - len(found)) + found

    def _next_end(self) -> LastStep | None:
        """The first open step with which jobs end."""
        return next((step for step in self._last if step.has_ends), None)

    def _steps_to_change(self) -> int:
        """An estimate of the steps up to the next arrival or end.

        It is 1/32 too high: a step too many is cut, a step too few costs another segment.
        """
        if self._until_ns is None:
            return MOST
        left_ns = self._until_ns - self._seen_ns
        return 1 + left_ns * 33 // (32 * self._decode_step_ns) if left_ns > 0 else 0

    def _limit(self, repeat: RepeatedPlan, device: int, end: LastStep | None) -> int:
        """The number of steps to the first end of a job, or to the return of memory.

        `end`: the first open step with which jobs end.
        """
        state, tail, left = self._state, repeat.tail, repeat.decodes.fewest_left(otherwise=MOST)
        if tail:
            tokens_left = self._completions.tokens_left
            left = min(left, tokens_left(tail[-1]) + repeat.silent)
            for job in tail[:-1]:
                left = min(left, tokens_left(job))
        oldest = self._frees.oldest(device)
        if oldest is None and end is not None:
            oldest = end.run.number + end.step
        if oldest is not None:
            left = min(left, oldest + state.depth - state.in_flight.issued[device])
        return min(repeat.left, MOST, left)

    def _is_calm(self, end: LastStep | None) -> bool:
        """Whether no memory is coming back, no wake-up is set, and all ends are those of runs."""
        state = self._state
        if (self._completions and end is None) or state.wakeup.will_come:
            return False
        return state.ledger.is_calm

    def _made(
        self,
        repeat: RepeatedPlan,
        device: int,
        ahead: Sequence[RunSegment],
        times: Moments,
        asks_ns: int,
        host_ns: int,
    ) -> RepeatedSteps | None:
        state, count = self._state, len(times[0])
        due, pages = repeat.due(count)
        grown = array("q", [*accumulate(pages)])
        pool = (Tier.GPU, device)
        if grown[-1] * state.page.nbytes > state.ledger.room_of(pool):
            return None
        return RepeatedSteps(
            state.in_flight.steps,
            state.in_flight.issued[device],
            device,
            pool,
            state.recorder.take_returned(device),
            ahead,
            *times,
            asks_ns,
            host_ns,
            count,
            count,
            state.ledger.figures(),
            grown,
            state.page.nbytes,
            due,
        )

    # ---- issue and settle
    def _issue(self, run: RepeatedSteps, repeat: RepeatedPlan) -> None:
        """Books and issues the steps of a run."""
        state, ledger = self._state, self._state.ledger
        ledger.hold(repeat.places)
        ledger.grow(run.pool, run.grown[-1], repeat.takers(run.count, ledger.pages))
        state.in_flight.number(run.device, run.count)
        state.recorder.ran(run)
        has_ends = self._move_on(run, repeat)
        if state.depth > 1 and not state.jobs:
            run.asks_ns = run.issue_ns[-1] + run.host_ns  # the engine asks nothing, but looks
        last = run.count - 1
        if run.end_ns[last] <= run.asks_ns:
            ledger.touch_again(run.op, run.count, is_open=False)
            if has_ends:
                step = LastStep(run.end_ns[last], run, last, run.segments[-1].op, False, True)
                self._last.append(step)
            return
        if ended := bisect_right(run.end_ns, run.asks_ns):
            ledger.touch_again(run.op, ended, is_open=False)
        for i in range(ended, run.count):
            op = run.segments[-1].op if i == last else run.segment(i).again()
            ledger.touch_again(op, 1, is_open=True)
            state.in_flight.last_compute((op,), run.device)
            self._last.append(LastStep(run.end_ns[i], run, i, op, True, has_ends and i == last))

    def _move_on(self, run: RepeatedSteps, plan: RepeatedPlan) -> bool:
        """Moves the jobs of a run on by all its steps; whether jobs end with the last one.

        Newly admitted jobs are in the tail.
        """
        decodes, tail, lead, prefix = plan.decodes, plan.tail, len(plan.decodes.jobs), self._prefix
        behind = [] if prefix is None else [(job, job.computed_tokens) for job in tail]
        plan.advance(run.count)
        done = decodes.complete()
        for i, job in enumerate(tail, lead):
            self._issuing.begin(job)
            for segment in run.segments:
                job._advance(
                    segment.steps * segment.pieces.tokens[i],
                    segment.steps * segment.pieces.samples[i],
                )
            if self._completions.tokens_left(job) <= 0:
                done.append(job)
        if prefix is not None:
            prefix.keep(run.device, chain(decodes.filled(run.count), behind))
        if done:
            self._completions.end_with(run.segments[-1].op, done)
        if plan.tail:
            plan.gather(self._state.ledger.pages, self._completions.tokens_left)
        return bool(done)


def _times(now_ns: int, before: Sequence[int], durations: Sequence[int], host_ns: int) -> Moments:
    """The moments of steps behind those that end at `before`; these may be in flight at once."""
    depth, count = len(before), len(durations)
    if depth == 1 and host_ns:
        end = array("q", [*accumulate([host_ns + ns for ns in durations], initial=now_ns)])
        issue = end[:-1]
        return issue, array("q", [at + host_ns for at in issue]), end[1:]
    line = [now_ns, *before[1:]]
    gaps = [*map(sub, line[1:], line), *durations]
    if min(gaps) >= host_ns:  # each step is issued when one ends, and starts when another does
        moments = array("q", [*accumulate(gaps, initial=now_ns)])
        return moments[:count], moments[depth - 1 : -1], moments[depth:]
    issues, starts, ends, at_ns = list[int](), list[int](), [*before], now_ns
    for duration_ns in durations:
        at_ns = max(at_ns, ends[-depth])
        issues.append(at_ns)
        at_ns += host_ns
        starts.append(max(ends[-1], at_ns))
        ends.append(starts[-1] + duration_ns)
    return array("q", issues), array("q", starts), array("q", ends[depth:])
