"""The jump: on a virtual clock, many steps of a repeated plan are issued and settled at once."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, chain
from typing import Any

import simpy

from engine.contract.executor import Repeater, Span
from engine.contract.plan import Compute
from engine.contract.regions import Tier
from engine.fast_forward.repeated_plan import RepeatedPlan, RepeatedSteps, RunSegment, segments
from engine.loop.completions import Completions, DeferredFrees
from engine.loop.issuing import Issuing
from engine.loop.state import EngineState, IssuedOp, Lifecycle, Turn, passed_to
from engine.results.tables import Times

MOST = 1024  # steps of one jump
Moments = tuple[Times, Times, Times]  # when steps are issued, start and end


class Jump:
    """Issues the steps up to the next end, or to the next arrival that may change the plan.

    At a tie the arrival comes first.

    Results are those of single steps, to the nanosecond and the page. At run-ahead d step i is
    issued when the host has prepared step i-1 and step i-d has ended; it starts when step i-1 has
    ended and the host has prepared it:

        issue[i] = max(issue[i-1] + host, end[i-d])
        start[i] = max(end[i-1], issue[i] + host)

    The last d-1 steps are still in flight when the engine asks next; each settles by itself. At
    run-ahead 1 no step is left, so a plan that still holds jumps again.
    """

    def __init__(
        self,
        state: EngineState,
        completions: Completions,
        frees: DeferredFrees,
        issuing: Issuing,
        lifecycle: Lifecycle,
        next_arrival_ns: Callable[[], int | None],
        serves_only: Callable[[], bool],
        executor: Repeater,
    ) -> None:
        self._state, self._completions, self._frees = state, completions, frees
        self._issuing, self._lifecycle, self._executor = issuing, lifecycle, executor
        self._next_arrival_ns, self._prefix = next_arrival_ns, issuing.prefix
        self._serves_only = serves_only
        self._decode_step_ns = 1  # duration of the last step of decodes alone
        self._seen_ns = 0  # about when the steps planned so far end
        self._until_ns: int | None = None  # the next arrival: no step is issued from then on
        self._still = 0  # but for these steps, which no arrival changes
        self._run: RepeatedSteps | None = None  # the last run
        self._min_steps = 1 if state.depth == 1 else state.depth + 1  # fewest steps of a jump
        self.steps = 0

    def carry_out(
        self, repeat: RepeatedPlan, device: int, stands: Callable[[RepeatedPlan], bool]
    ) -> Generator[simpy.Event, Any, bool]:
        """Issues steps at once; returns False where the next step must be issued by itself.

        `stands` says whether the plan still holds behind a run that has settled, with the memory
        that may be shown by then.
        """
        if not repeat.is_plain or not self._is_calm(device):
            return False
        run = self._plan(repeat, device, self._state.now_ns)
        if run is None:
            return False
        if self._state.depth > 1:
            self._issue(run, repeat)
            yield from self._pass_ahead(run)
            return True
        env, recorder = self._state.env, self._state.recorder
        while run is not None:
            has_end = self._issue(run, repeat)
            end_ns = run.end_ns[-1]
            if not passed_to(env, end_ns):
                yield from self._wait(device, end_ns)
            recorder.run_settled(run)
            if has_end:
                self._lifecycle.finish(run.op, end_ns, device, run.number + run.count - 1)
            if self._next_arrival_ns() == end_ns:  # turns that arrive with the answer
                yield simpy.Timeout(env, 0)
            if has_end:
                self._lifecycle.give_back(device)
            run = self._plan(repeat, device, end_ns) if stands(repeat) else None
        return True

    def _wait(self, device: int, at_ns: int) -> Turn:
        """Waits for a moment; jobs that arrive meanwhile find a plan in flight."""
        state = self._state
        state.in_flight.level[device] += 1
        yield simpy.Timeout(state.env, at_ns - state.now_ns)
        state.in_flight.level[device] -= 1

    def _pass_ahead(self, run: RepeatedSteps) -> Turn:
        """Lets the host's time of a run pass; behind that the policy is asked."""
        state, env, end_ns = self._state, self._state.env, run.end_ns[run.settled - 1]
        span = Span(run.op, run.start_ns[0], end_ns)
        self._executor.hold(run.segments[0].launch, span, lambda span: self._tell(run, span))
        for step in range(run.settled, run.count):
            self._issue_alone(run, step)
        if (host_left_ns := run.issue_ns[-1] + run.host_ns - state.now_ns) > 0:
            yield simpy.Timeout(env, host_left_ns)

    def unissued_bytes(self, now_ns: int) -> int:
        """KV that is booked for steps which are issued only at `now_ns` or later."""
        run = self._run
        return 0 if run is None or now_ns > run.issue_ns[-1] else run.unissued_bytes(now_ns)

    # ---- planning: nothing is changed
    def _plan(self, repeat: RepeatedPlan, device: int, now_ns: int) -> RepeatedSteps | None:
        limit, min_steps, host_ns, lead = (
            self._limit(repeat),
            self._min_steps,
            0,
            len(repeat.decodes.ids),
        )
        if limit < min_steps:
            return None
        self._seen_ns = now_ns
        until_ns = self._until_ns = self._next_arrival_ns()
        still = self._still = 0
        if repeat.budget and self._is_alone():
            still = self._still = repeat.still
        if min_steps > 1 and self._steps_to_arrival() < min_steps:
            return None
        ahead: list[RunSegment] = []
        durations: list[int] = []
        for segment in segments(repeat, limit, self._steps_to_arrival):
            found = self._executor.repeat(segment.launch, segment.steps)
            if found is None:
                return None
            if segment.first and found[1] != host_ns:  # a run has one host time
                break
            ahead.append(segment)
            durations += found[0]
            host_ns = found[1]
            self._still -= segment.steps
            self._seen_ns += sum(found[0]) + segment.steps * host_ns
            behind = segment.pieces.tokens[lead:]
            if not behind or sum(behind) == len(behind):  # decodes alone
                self._decode_step_ns = max(1, durations[-1] + host_ns)
        limit = len(durations)
        if limit < min_steps:
            return None
        issue, start, end = self._times(now_ns, durations, host_ns)
        if until_ns is not None and issue[-1] >= until_ns:
            limit = max(bisect_left(issue, until_ns), min(still, limit))
            if limit < min_steps:
                return None
            issue, start, end = issue[:limit], start[:limit], end[:limit]
            ahead = [segment for segment in ahead if segment.first < limit]
            ahead[-1].cut(limit)
        return self._made(repeat, device, ahead, (issue, start, end), host_ns)

    def _steps_to_arrival(self) -> int:
        """An estimate of the steps up to the next arrival, or to one that matters.

        It is 1/32 too high: a step too many is cut, a step too few costs another segment.
        """
        if self._until_ns is None:
            return MOST
        left_ns = self._until_ns - self._seen_ns
        steps = 1 + left_ns * 33 // (32 * self._decode_step_ns) if left_ns > 0 else 0
        return max(steps, self._still)

    def _limit(self, repeat: RepeatedPlan) -> int:
        """The number of steps to the first end of a job; with run-ahead without the last."""
        tail, left = repeat.tail, repeat.decodes.fewest_left(otherwise=MOST)
        if tail:
            tokens_left = self._completions.tokens_left
            left = min(left, tokens_left(tail[-1]) + repeat.silent)
            for job in tail[:-1]:
                left = min(left, tokens_left(job))
        if self._state.depth > 1:
            left -= 1
        return min(repeat.steps - repeat.done, MOST, left)

    def _is_alone(self) -> bool:
        """Whether an arrival reads and wakes nothing while a run lasts."""
        state = self._state
        return state.depth == 1 and state.fleet is None and self._serves_only()

    def _is_calm(self, device: int) -> bool:
        """Whether no memory is coming back, no job's end is in flight and no wake-up is set."""
        state = self._state
        if self._completions or state.wakeup.will_come or self._frees.oldest(device) is not None:
            return False
        return state.ledger.is_calm

    def _times(self, now_ns: int, durations: Sequence[int], host_ns: int) -> Moments:
        depth = self._state.depth
        if depth == 1:
            steps = (host_ns + duration_ns for duration_ns in durations) if host_ns else durations
            end = array("q", [*accumulate(steps, initial=now_ns)])
            issue = end[:-1]
            return issue, array("q", [at + host_ns for at in issue]) if host_ns else issue, end[1:]
        before = self._executor.end_times_ns(self._state.in_flight.tails)
        ends = [0] * (depth - len(before)) + sorted(before)
        issues, starts, at_ns = [], [], now_ns
        for duration_ns in durations:
            at_ns = max(at_ns, ends[-depth])
            issues.append(at_ns)
            at_ns += host_ns
            starts.append(max(ends[-1], at_ns))
            ends.append(starts[-1] + duration_ns)
        return array("q", issues), array("q", starts), array("q", ends[depth:])

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
            count - state.depth + 1,
            state.ledger.figures(),
            grown,
            state.page.nbytes,
            due,
        )

    # ---- issue and settle
    def _issue(self, run: RepeatedSteps, repeat: RepeatedPlan) -> bool:
        """Books and issues the steps that settle together; returns whether jobs end with them."""
        state, ledger, op = self._state, self._state.ledger, run.op
        self._run = run
        self.steps += run.count
        if repeat.places:
            ledger.hold(repeat.places)
        ledger.grow(run.pool, run.grown[-1], repeat.takers(run.count, ledger.pages))
        state.in_flight.number(run.device, run.count)
        state.recorder.ran(run)
        has_end = self._move_on(run, repeat)
        ledger.touch_again(op, run.settled, is_open=state.depth > 1)
        if state.depth > 1:
            state.in_flight.last_compute((op,), run.device)
        return has_end

    def _issue_alone(self, run: RepeatedSteps, step: int) -> None:
        """Issues a step that is still in flight when the engine asks next."""
        state, launch = self._state, run.launch_at(step)
        op = launch.op
        assert isinstance(op, Compute)
        state.ledger.touch_again(op, 1, is_open=True)
        state.in_flight.last_compute((op,), run.device)
        numbers, issue_ns = (run.step + step, run.device, run.number + step), run.issue_ns[step]
        state.in_flight.start(IssuedOp(*numbers, issue_ns, run.host_ns, launch))
        span = Span(op, run.start_ns[step], run.end_ns[step])
        self._executor.hold(launch, span, self._lifecycle.settle)

    def _move_on(self, run: RepeatedSteps, plan: RepeatedPlan) -> bool:
        """Moves the jobs of a run on by all its steps; returns whether any of them end.

        Newly admitted jobs are in the tail.
        """
        decodes, tail, prefix = plan.decodes, plan.tail, self._prefix
        behind = [] if prefix is None else [(job, job.computed_tokens) for job in tail]
        plan.advance(run.count)
        done = decodes.complete()
        for i, job in enumerate(tail, len(decodes.ids)):
            self._issuing.begin(job)
            computed = new = 0
            for segment in run.segments:
                computed += segment.steps * segment.pieces.tokens[i]
                new += segment.steps * segment.pieces.samples[i]
            job._advance(computed, new)
            if self._completions.tokens_left(job) <= 0:
                done.append(job)
        if prefix is not None:
            prefix.keep(run.device, chain(decodes.filled(run.count), behind))
        if done:
            self._completions.end_with(run.op, done)
        if plan.tail:
            plan.gather(self._state.ledger.pages, self._completions.tokens_left)
        return bool(done)

    def _tell(self, run: RepeatedSteps, span: Span) -> None:
        state = self._state
        state.recorder.run_settled(run)
        self._lifecycle.land(span.op, span.end_ns, run.device, run.number + run.count - 1)
        state.release_idle()
        state.wakeup.tell()
