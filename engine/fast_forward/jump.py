"""The jump: on a virtual clock, many steps of a repeated plan are issued and settled at once."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, chain
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
Moments = tuple[Times, Times, Times, int]  # when steps are issued, start and end; the next question


class LateStep(NamedTuple):
    """The last step of a run, or one that has not ended when the engine asks next."""

    run: RepeatedSteps
    step: int  # of the run
    op: Compute
    is_open: bool  # its launch is in the books: it has not ended when the engine asks next
    has_ends: bool  # jobs end with it

    @property
    def end_ns(self) -> int:
        """When it ends."""
        return self.run.end_ns[self.step]

    @property
    def number(self) -> int:
        """Over the plans of the device."""
        return self.run.number + self.step


class Jump:
    """Issues the steps up to the next arrival or end; at a tie the arrival comes first.

    Results are those of single steps, to the nanosecond and the page. At run-ahead d step i is
    issued when the host has prepared step i-1 and step i-d has ended; it starts when step i-1 has
    ended and the host has prepared it:

        issue[i] = max(issue[i-1] + host, end[i-d])
        start[i] = max(end[i-1], issue[i] + host)

    A run passes up to the issue of the step behind it, where the engine asks next. The last d-1
    steps are late: they have not ended by then. They end while the next run passes. Only where no
    run follows does each of them settle by an event of its own.
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
        self._late: deque[LateStep] = deque()
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
            if not self._state.jobs or level[device] > len(self._late):
                self.settle_alone()
            self._lifecycle.give_back(device)
            run = self._plan(repeat, device) if stands(repeat) else None
        return True

    def _pass(self, run: RepeatedSteps) -> Turn:
        """Lets time pass up to the next question. Jobs finish at the moment of their end."""
        env, late, asks_ns = self._state.env, self._late, run.asks_ns
        due: simpy.Event | None = None
        while late and (end_ns := late[0].end_ns) <= asks_ns:
            step = late.popleft()
            if step.has_ends:
                if due is None and end_ns < asks_ns:
                    due = simpy.Timeout(env, asks_ns - self._state.now_ns)
                yield from self._wait_for(end_ns)
            self._land(step, run)
        yield from self._wait_for(asks_ns) if due is None else (due,)
        is_woken = self._state.depth == 1 or asks_ns > run.issue_ns[-1] + run.host_ns
        if is_woken and self._next_arrival_ns() == asks_ns:  # turns that arrive with the answer
            yield simpy.Timeout(env, 0)

    def _wait_for(self, at_ns: int) -> Turn:
        state = self._state
        if at_ns > state.now_ns and not passed_to(state.env, at_ns):
            yield simpy.Timeout(state.env, at_ns - state.now_ns)

    def _land(self, step: LateStep, now: RepeatedSteps) -> None:
        """A step has ended, while the run `now` passes."""
        state, run, end_ns = self._state, step.run, step.end_ns
        if step.is_open:
            state.ledger.settle(step.op)
            state.in_flight.land(step.op)
            pages = state.ledger.held_pages(run.pool) - now.unissued_pages(end_ns)
            run.late_pages.append(pages - run.held_pages)
        if step.step == run.count - 1:
            state.recorder.run_settled(run)
        if step.has_ends:
            self._lifecycle.finish(step.op, end_ns, run.device, step.number)

    def settle_alone(self) -> None:
        """No run follows now: each late step settles by an event of its own."""
        state, late = self._state, self._late
        for step in late:
            step.run.settled -= 1
        for run in dict.fromkeys([step.run for step in late]):
            state.recorder.run_settled(run)
        for run, i, op, *_ in late:
            launch = Launch(op, (), run.launch_at(i).pieces)
            numbers, issue_ns = (run.step + i, run.device, run.number + i), run.issue_ns[i]
            state.in_flight.start(IssuedOp(*numbers, issue_ns, run.host_ns, launch))
            span = Span(op, run.start_ns[i], run.end_ns[i])
            self._executor.hold(launch, span, self._lifecycle.settle)
        late.clear()

    def unissued_bytes(self, now_ns: int) -> int:
        """KV that is booked for steps which are issued only at `now_ns` or later."""
        run = self._run
        if run is None or now_ns > run.issue_ns[-1]:
            return 0
        return run.unissued_pages(now_ns) * run.page_nbytes

    # ---- planning: nothing is changed
    def _plan(self, repeat: RepeatedPlan, device: int) -> RepeatedSteps | None:
        limit, lead, host_ns = self._limit(repeat, device), len(repeat.decodes.jobs), 0
        if limit < 1 or not self._is_calm():
            return None
        now_ns = self._seen_ns = self._state.now_ns
        until_ns = self._until_ns = self._first_change_ns()
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
        times = self._times(now_ns, durations, host_ns)
        if until_ns is not None and times[0][-1] >= until_ns:
            limit = bisect_left(times[0], until_ns)
            if not limit:
                return None
            times = self._times(now_ns, durations[:limit], host_ns)
            ahead = [segment for segment in ahead if segment.first < limit]
            ahead[-1].cut(limit)
        return self._made(repeat, device, ahead, times, host_ns)

    def _first_change_ns(self) -> int | None:
        """When the next job arrives, or one that has left ends: its next turn may arrive then."""
        arrives_ns = self._next_arrival_ns()
        for step in self._late:
            if step.has_ends:
                return step.end_ns if arrives_ns is None else min(arrives_ns, step.end_ns)
        return arrives_ns

    def _steps_to_change(self) -> int:
        """An estimate of the steps up to the next arrival or end.

        It is 1/32 too high: a step too many is cut, a step too few costs another segment.
        """
        if self._until_ns is None:
            return MOST
        left_ns = self._until_ns - self._seen_ns
        return 1 + left_ns * 33 // (32 * self._decode_step_ns) if left_ns > 0 else 0

    def _limit(self, repeat: RepeatedPlan, device: int) -> int:
        """The number of steps to the first end of a job, or to the return of memory."""
        state, tail, left = self._state, repeat.tail, repeat.decodes.fewest_left(otherwise=MOST)
        if tail:
            tokens_left = self._completions.tokens_left
            left = min(left, tokens_left(tail[-1]) + repeat.silent)
            for job in tail[:-1]:
                left = min(left, tokens_left(job))
        if (oldest := self._oldest(device)) is not None:
            left = min(left, oldest + state.depth - state.in_flight.issued[device])
        return min(repeat.left, MOST, left)

    def _oldest(self, device: int) -> int | None:
        """The oldest plan with which jobs have ended or will, and whose memory is not back."""
        if (oldest := self._frees.oldest(device)) is not None:
            return oldest
        return next((step.number for step in self._late if step.has_ends), None)

    def _is_calm(self) -> bool:
        """Whether no memory is coming back, no wake-up is set, and all ends in flight are late."""
        state = self._state
        if self._completions and not any([step.has_ends for step in self._late]):
            return False
        return not state.wakeup.will_come and state.ledger.is_calm

    def _times(self, now_ns: int, durations: Sequence[int], host_ns: int) -> Moments:
        depth = self._state.depth
        if depth == 1:
            steps = (host_ns + duration_ns for duration_ns in durations) if host_ns else durations
            end = array("q", [*accumulate(steps, initial=now_ns)])
            issue = end[:-1]
            start = array("q", [at + host_ns for at in issue]) if host_ns else issue
            return issue, start, end[1:], end[-1]
        before = [step.end_ns for step in self._late]
        if not before:
            before = sorted(self._executor.end_times_ns(self._state.in_flight.tails))
        ends = [0] * (depth - len(before)) + before
        issues, starts, at_ns = [], [], now_ns
        for duration_ns in durations:
            at_ns = max(at_ns, ends[-depth])
            issues.append(at_ns)
            at_ns += host_ns
            starts.append(max(ends[-1], at_ns))
            ends.append(starts[-1] + duration_ns)
        asks_ns = max(at_ns, ends[-depth])
        return array("q", issues), array("q", starts), array("q", ends[depth:]), asks_ns

    def _made(
        self,
        repeat: RepeatedPlan,
        device: int,
        ahead: Sequence[RunSegment],
        times: Moments,
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
        ended = bisect_right(run.end_ns, run.asks_ns)
        if ended:
            ledger.touch_again(run.op, ended, is_open=False)
        for step in range(min(ended, run.count - 1), run.count):
            op, is_last = run.segment(step).op, step == run.count - 1
            if not is_last:
                op = op.again_as(op.slices)
            if is_open := step >= ended:
                ledger.touch_again(op, 1, is_open=True)
                state.in_flight.last_compute((op,), run.device)
            self._late.append(LateStep(run, step, op, is_open, is_last and has_ends))

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
