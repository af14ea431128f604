"""The jump: on a virtual clock, many steps of a repeated plan are issued and settled at once."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, chain
from operator import add, sub
from typing import Any, NamedTuple

import simpy

from engine.contract.executor import Launch, Repeater, Span, end_event
from engine.contract.job import Job
from engine.contract.plan import Compute, Op
from engine.contract.regions import Tier
from engine.fast_forward.repeated_plan import (
    RepeatedPlan,
    RepeatedSteps,
    RunSegment,
    StepsAhead,
    segments,
)
from engine.loop.asking import LoopParts
from engine.loop.state import EngineState, IssuedOp, Turn, has_event_by, passed_to
from engine.results.tables import Times

MOST = 1024  # steps of one part of a run; a run of more gets no other part
Moments = tuple[Times, Times, Times]  # when steps are issued, start and end


class OpenStep(NamedTuple):
    """A step of a run that has not ended when the engine asks next: its launch is in the books."""

    end_ns: int
    run: RepeatedSteps
    step: int  # of the run
    op: Compute


class JobsEnd(NamedTuple):
    """Jobs end with a step of a run."""

    end_ns: int
    number: int  # of the step, over the plans of the device
    op: Compute
    is_barrier: bool  # a turn of a session may arrive with it: no later step is issued ahead


class Jump:
    """Issues the steps up to the next arrival that may change the plan, or to where the plan ends.

    At a tie the arrival comes first.

    Results are those of single steps, to the nanosecond and the page. At run-ahead d step i is
    issued when the host has prepared step i-1 and step i-d has ended; it starts when step i-1 has
    ended and the host has prepared it:

        issue[i] = max(issue[i-1] + host, end[i-d])
        start[i] = max(end[i-1], issue[i] + host)

    A run passes up to the issue of the step behind it, where the engine asks next. By then its last
    d-1 steps are open: they end while the next run passes. Only where no run follows does each of
    them settle by an event of its own. The memory of jobs that end with step i is back for step
    i+d. A run goes on behind an end and behind that return, each time by a part of its own (see
    `_go_on` for where it does not).
    """

    def __init__(
        self,
        state: EngineState,
        parts: LoopParts,
        returned: Callable[[], None],
        executor: Repeater,
    ) -> None:
        """`returned` is called where memory of finished jobs has come back."""
        self._state, self._completions, self._frees = state, parts.completions, parts.frees
        self._issuing, self._lifecycle, self._executor = parts.issuing, parts.lifecycle, executor
        self._next_arrival_ns, self._prefix = parts.next_arrival_ns, parts.issuing.prefix
        self._serves_only, self._awaits_answer = parts.serves_only, parts.awaits_answer
        self._returned, self._trains = returned, bool(state.layout.training)
        # Kept pages (prefix caching) come back otherwise than pages of one job.
        self._gives_ahead = parts.returns_memory and self._prefix is None
        self._decode_step_ns = 1  # duration of the last step of decodes alone
        self._seen_ns = 0  # about when the steps planned so far end
        self._until_ns: int | None = None  # no step is issued from then on
        self._still = 0  # but for these steps, which no arrival changes
        self._run: RepeatedSteps | None = None  # the last run
        self._open: deque[OpenStep] = deque()
        self._ends: deque[JobsEnd] = deque()  # that have not come
        self._barrier_ns: int | None = None  # the first of them that is a barrier
        self.steps = self.runs = 0

    def carry_out(
        self, repeat: RepeatedPlan, device: int, stands: Callable[[RepeatedPlan], bool]
    ) -> Generator[simpy.Event, Any, bool]:
        """Issues steps at once; returns False where the next step must be issued by itself.

        `stands` says whether the plan still holds behind the end of a job or behind a run, with the
        memory that may be shown by then.
        """
        run = self._issue(repeat, device, stands) if repeat.is_plain else None
        if run is None:
            return False
        state, level = self._state, self._state.in_flight.level
        while run is not None:
            self.steps, self.runs = self.steps + run.count, self.runs + 1
            level[device] += state.depth  # jobs that arrive meanwhile wake nothing
            yield from self._pass(run)
            if run.back_pages:  # what came back behind its last step can be seen now
                run.back_pages = 0
                state.recorder.came_back(device)
            level[device] -= state.depth
            if self._open and not (state.jobs and level[device] == len(self._open) < state.depth):
                self.settle_alone()
            self._lifecycle.give_back(device)
            run = self._issue(repeat, device, stands) if stands(repeat) else None
        return True

    def _pass(self, run: RepeatedSteps) -> Turn:
        """Lets time pass up to the next question. Jobs finish at the moment of their end."""
        state, ends, steps, asks_ns = self._state, self._ends, self._open, run.asks_ns
        env, now_ns, due, is_told = state.env, run.issue_ns[0], None, run.ended == run.count
        is_quiet = True  # no event comes before the next question
        while ends and ends[0].end_ns <= asks_ns:
            end_ns, number, op, is_barrier = ends.popleft()
            if is_barrier:
                self._barrier_ns = next((end.end_ns for end in ends if end.is_barrier), None)
            is_quiet = is_quiet and not (is_barrier or has_event_by(env, asks_ns))
            if due is None and not is_quiet and (end_ns < asks_ns or not self._is_woken(run)):
                due = simpy.Timeout(env, asks_ns - now_ns)
            if end_ns > now_ns and not passed_to(env, end_ns):
                yield end_event(env, end_ns - now_ns)
            now_ns, is_told = end_ns, True
            self._lifecycle.finish(op, end_ns, run.device, number)
        if due is not None:
            yield due
        elif asks_ns > now_ns and not passed_to(env, asks_ns):
            yield simpy.Timeout(env, asks_ns - now_ns)
        while steps and steps[0].end_ns <= asks_ns:
            self._land(steps.popleft(), run)
        if is_told:
            state.recorder.run_settled(run, run.ended)
        if self._next_arrival_ns() == asks_ns and self._is_woken(run):  # turns behind an answer
            yield simpy.Timeout(env, 0)

    def _is_woken(self, run: RepeatedSteps) -> bool:
        """Whether the engine asks because a step ends, not because the host is ready."""
        return self._state.depth == 1 or run.asks_ns > run.issue_ns[-1] + run.segments[-1].host_ns

    def _land(self, step: OpenStep, now: RepeatedSteps) -> None:
        """An open step of an earlier run has ended, while the run `now` passes."""
        state, end_ns, run, i, op = self._state, *step
        state.ledger.settle(op)
        state.in_flight.land(op)
        pages = state.ledger.held_pages(run.pool) - now.unissued_pages(end_ns)
        run.last_pages.append(pages - run.held_pages)
        state.recorder.run_settled(run, i + 1)

    def settle_alone(self) -> None:
        """No run follows now: each open step settles by an event of its own."""
        state = self._state
        for step in self._open:
            step.run.settled -= 1
        for run in dict.fromkeys([step.run for step in self._open]):
            state.recorder.run_settled(run, run.settled)
        for end_ns, run, i, op in self._open:
            launch = Launch(op, (), run.launch_at(i).pieces)
            times = run.issue_ns[i], run.segment(i).host_ns
            issued = IssuedOp(run.step + i, run.device, run.number + i, *times, launch)
            state.in_flight.start(issued)
            self._executor.hold(launch, Span(op, run.start_ns[i], end_ns), self._lifecycle.settle)
        self._open.clear()
        self._ends.clear()
        self._barrier_ns = None

    def launch_of(self, op: Op) -> Launch | None:
        """The launch of an open step, with its jobs as they were at issue; None of another one."""
        for _, run, i, own in self._open:
            if own is op:
                return Launch(op, (), run.launch_at(i).pieces)
        return None

    def unissued_bytes(self, now_ns: int) -> int:
        """KV that is booked for steps which are issued only at `now_ns` or later.

        Less than 0 where the books hold memory as given back that comes back only then.
        """
        run = self._run
        if run is None or now_ns > run.asks_ns:
            return 0
        return run.unissued_pages(now_ns) * run.page_nbytes

    # ---- planning: nothing is changed
    def _look_ahead(
        self,
        repeat: RepeatedPlan,
        device: int,
        now_ns: int,
        before: Sequence[int],
        until_ns: int | None,
    ) -> StepsAhead | None:
        """The next steps, behind plans that end at `before`; None where one is issued by itself.

        From `until_ns` on none is issued, but for those that no arrival changes.
        """
        limit, lead, depth = self._limit(repeat, device), len(repeat.decodes.ids), self._state.depth
        if limit < 1 or not self._is_calm():
            return None
        self._until_ns, self._seen_ns = until_ns, now_ns
        still = repeat.still
        if still and not self._is_alone():
            still = 0
        self._still = still
        ahead: list[RunSegment] = []
        durations: list[int] = []
        hosts: list[int] = []
        for segment in segments(repeat, limit, self._steps_to_change):
            found = self._executor.repeat(segment.launch, segment.steps)
            if found is None:
                return None
            steps_ns, host_ns = found
            segment.host_ns, count = host_ns, segment.steps
            ahead.append(segment)
            durations += steps_ns
            hosts += [host_ns] * count
            self._still -= count
            beside_ns = host_ns if depth == 1 else 0  # else the host works meanwhile
            self._seen_ns += sum(steps_ns) + count * beside_ns
            if not repeat.tail or sum(segment.pieces.tokens[lead:]) == len(repeat.tail):  # decodes
                self._decode_step_ns = max(1, steps_ns[-1] + beside_ns, host_ns)
        if not durations:
            return None
        issue, start, end = _times(now_ns, before, durations, hosts)
        if until_ns is not None and issue[-1] >= until_ns:
            limit = max(bisect_left(issue, until_ns), min(still, len(issue)))
            if not limit:
                return None
            issue, start, end = issue[:limit], start[:limit], end[:limit]
            ahead = [segment for segment in ahead if segment.first < limit]
            ahead[-1].cut(limit)
        count = len(issue)
        due, pages = repeat.due(count)
        grown = array("q", [*accumulate(pages)])
        if grown[-1] * self._state.page.nbytes > self._state.ledger.room_of((Tier.GPU, device)):
            return None
        asks_ns = end[-len(before)] if count >= len(before) else before[count]
        asks_ns = max(asks_ns, issue[-1] + ahead[-1].host_ns)
        return StepsAhead(ahead, issue, start, end, asks_ns, due, grown)

    def _next_change_ns(self) -> int | None:
        """When a request arrives, or a turn that the end of another releases may."""
        arrival_ns, barrier_ns = self._next_arrival_ns(), self._barrier_ns
        if arrival_ns is None or barrier_ns is None:
            return barrier_ns if arrival_ns is None else arrival_ns
        return min(arrival_ns, barrier_ns)

    def _before(self) -> Sequence[int]:
        """When as many plans as may be in flight end, before the first step; 0 for none."""
        depth = self._state.depth
        if depth == 1:
            return (0,)
        found = [step.end_ns for step in self._open]
        if not found and (tails := self._state.in_flight.tails):
            found = sorted(self._executor.end_times_ns(tails))
        return found if len(found) == depth else [0] * (depth - len(found)) + found

    def _steps_to_change(self) -> int:
        """An estimate of the steps up to the next arrival that matters, or end.

        It is 1/32 too high: a step too many is cut, a step too few costs another segment.
        """
        if self._until_ns is None:
            return MOST
        left_ns = self._until_ns - self._seen_ns
        steps = 1 + left_ns * 33 // (32 * self._decode_step_ns) if left_ns > 0 else 0
        return max(steps, self._still)

    def _limit(self, repeat: RepeatedPlan, device: int) -> int:
        """The number of steps to the first end of a job, or to the return of memory."""
        state, tail, left = self._state, repeat.tail, repeat.decodes.fewest_left(otherwise=MOST)
        if tail:
            tokens_left = self._completions.tokens_left
            left = min(left, tokens_left(tail[-1]) + repeat.silent)
            for job in tail[:-1]:
                left = min(left, tokens_left(job))
        if self._trains and self._longest(repeat) <= left:
            left -= 1  # jobs may end with the last request: figures of a run tell of no states
        if state.depth > 1 and (last := self._frees.oldest_or_expected(device)) is not None:
            left = min(left, last + state.depth - state.in_flight.issued[device])
        return min(repeat.left, MOST, left)

    def _longest(self, repeat: RepeatedPlan) -> int:
        """The number of steps to the last end of a job of the plan."""
        tail, most = repeat.tail, repeat.decodes.most_left()
        if tail:
            tokens_left = self._completions.tokens_left
            most = max(most, tokens_left(tail[-1]) + repeat.silent, *map(tokens_left, tail[:-1]))
        return most

    def _is_alone(self) -> bool:
        """Whether an arrival reads and wakes nothing while a run lasts."""
        state = self._state
        if state.depth > 1 or state.jobs.service is not None:  # an arrival may lift its tenant
            return False
        return state.fleet is None and self._serves_only()

    def _is_calm(self) -> bool:
        """Whether no memory is coming back, no wake-up is set, and all ends are those of runs."""
        state = self._state
        if (self._completions and not self._ends) or state.wakeup.will_come:
            return False
        return state.ledger.is_calm

    # ---- issue
    def _issue(
        self, repeat: RepeatedPlan, device: int, stands: Callable[[RepeatedPlan], bool]
    ) -> RepeatedSteps | None:
        """Books and issues the steps of the next run; None where there is none."""
        state, before = self._state, self._before()
        now_ns = state.now_ns
        steps = self._look_ahead(repeat, device, now_ns, before, self._next_change_ns())
        if steps is None:
            return None
        count, pool = len(steps.issue_ns), (Tier.GPU, device)
        returned = state.recorder.take_returned(device)
        run = self._run = RepeatedSteps(
            state.in_flight.steps,
            state.in_flight.issued[device],
            device,
            pool,
            {0: returned} if returned else {},
            state.ledger.figures(),
            state.ledger.held_pages(pool),
            state.page.nbytes,
            *steps,
            count,
            count,
            count,
            0,
            [],
        )
        depth = state.depth
        has_end = self._book(run, steps, repeat)
        if has_end or (depth > 1 and self._frees.oldest_or_expected(device) is not None):
            self._go_on(run, repeat, before, stands)
        if depth == 1:
            self._enter_ended(run, run.count)
        else:
            self._enter(run)
        state.recorder.ran(run, now_ns)
        return run

    def _book(self, run: RepeatedSteps, steps: StepsAhead, repeat: RepeatedPlan) -> bool:
        """Books steps ahead, and moves their jobs on; whether jobs end with the last one."""
        state, ledger, count = self._state, self._state.ledger, len(steps.issue_ns)
        if repeat.places:
            ledger.hold(repeat.places)
        ledger.grow(run.pool, steps.grown[-1], repeat.takers(count, ledger.pages))
        state.in_flight.number(run.device, count)
        done = self._move_on(steps, repeat, run.device)
        if done:
            op, number = steps.segments[-1].op, run.number + run.count - 1
            self._completions.end_with(op, done)
            is_barrier, end_ns = not self._gives_ahead, steps.end_ns[-1]
            for job in done if self._gives_ahead else ():
                self._frees.expect(run.device, number, job)
                is_barrier = is_barrier or self._awaits_answer(job)
            self._ends.append(JobsEnd(end_ns, number, op, is_barrier))
            if is_barrier and self._barrier_ns is None:
                self._barrier_ns = end_ns
        if repeat.tail:
            repeat.gather(ledger.pages, self._completions.tokens_left)
        return bool(done)

    def _go_on(
        self,
        run: RepeatedSteps,
        repeat: RepeatedPlan,
        before: Sequence[int],
        stands: Callable[[RepeatedPlan], bool],
    ) -> None:
        """Goes on behind ends of jobs and returns of memory, while the plan stands.

        It stops where a request arrives or a turn may, where memory comes back otherwise than by
        pages alone, and where the run is long.
        """
        state, device = self._state, run.device
        depth, jobs = state.depth, state.jobs
        if depth == 1 and not self._gives_ahead:
            return
        while jobs and run.count < MOST:
            change_ns = self._next_change_ns()
            if change_ns is not None and change_ns <= run.asks_ns:
                break
            number = state.in_flight.issued[device] - depth
            last = self._frees.oldest_or_expected(device)
            if last is not None and last <= number and not self._give_ahead(run, number):
                break
            if not stands(repeat):
                break
            ends = before if depth == 1 else [*before, *run.end_ns[-depth:]][-depth:]
            steps = self._look_ahead(repeat, device, run.asks_ns, ends, change_ns)
            if steps is None:
                break
            run.add(steps, state.recorder.take_returned(device))
            has_end = self._book(run, steps, repeat)
            if not has_end and (depth == 1 or self._frees.oldest_or_expected(device) is None):
                break
        if not jobs and depth > 1:  # then nothing is asked
            run.asks_ns = run.issue_ns[-1] + run.segments[-1].host_ns

    def _give_ahead(self, run: RepeatedSteps, number: int) -> bool:
        """Memory of the jobs up to this plan comes back behind the last step of a run.

        Returns False, and gives nothing, where it is not KV pages of the device alone: figures of a
        run tell of no other memory.
        """
        state, ledger, device = self._state, self._state.ledger, run.device
        if not self._gives_ahead:
            return False
        pages, tables = 0, ledger.pages
        for job in self._frees.due(device, number):
            places = ledger.places_of.get(job.job_id, ())
            if len(places) != 1 or job.adapter is not None:  # whose version may be over
                return False
            (place,) = places
            if place not in tables or place.pool != run.pool:
                return False
            pages += len(tables[place])
        self._enter_ended(run, run.count - state.depth + 1)
        self._frees.give_ahead(device, number)
        run.back_pages += pages
        self._returned()
        state.release_idle()
        return True

    def _enter(self, run: RepeatedSteps) -> None:
        """Enters the launches of a run into the books; those of open steps settle later."""
        ledger, in_flight, ends = self._state.ledger, self._state.in_flight, run.end_ns
        run.ended = ended = bisect_right(ends, run.asks_ns)
        self._enter_ended(run, ended)
        for segment in run.segments[run.entered :]:
            first, behind = segment.first, segment.first + segment.steps
            for i in range(max(first, ended), behind):
                op = segment.op if i + 1 == behind else segment.again()
                ledger.touch_again(op, i + 1 - first, is_open=True)  # with the steps before it
                in_flight.add_tails((op,), run.device)
                self._open.append(OpenStep(ends[i], run, i, op))
                first = i + 1

    def _enter_ended(self, run: RepeatedSteps, until: int) -> None:
        """Enters the segments up to a step; they end before the next question."""
        touch_again, segments = self._state.ledger.touch_again, run.segments
        if self._state.depth == 1:  # the segments of a part have equal places: one stands for all
            if run.entered < len(segments):
                segment, run.entered = segments[run.entered], len(segments)
                touch_again(segment.op, until - segment.first, is_open=False)
            return
        for segment in segments[run.entered :]:
            if segment.first + segment.steps > until:
                break
            touch_again(segment.op, segment.steps, is_open=False)
            run.entered += 1

    def _move_on(self, steps: StepsAhead, plan: RepeatedPlan, device: int) -> list[Job]:
        """Moves jobs on by all these steps; returns those that end with the last one.

        Newly admitted jobs are in the tail.
        """
        decodes, tail, lead, prefix = plan.decodes, plan.tail, len(plan.decodes.ids), self._prefix
        behind = [] if prefix is None else [(job, job.computed_tokens) for job in tail]
        count = len(steps.issue_ns)
        plan.advance(count)
        done = decodes.complete()
        for i, job in enumerate(tail, lead):
            self._issuing.begin(job)
            computed = new = 0
            for segment in steps.segments:
                computed += segment.steps * segment.pieces.tokens[i]
                new += segment.steps * segment.pieces.samples[i]
            job._advance(computed, new)
            if self._completions.tokens_left(job) <= 0:
                done.append(job)
        if prefix is not None:
            prefix.keep(device, chain(decodes.filled(count), behind))
        return done


def _times(
    now_ns: int, before: Sequence[int], durations: Sequence[int], hosts: Sequence[int]
) -> Moments:
    """The moments of steps behind those that end at `before`; these may be in flight at once."""
    depth, count = len(before), len(durations)
    if depth == 1:
        has_host = any(hosts)
        steps = map(add, hosts, durations) if has_host else durations
        line = array("q", [*accumulate(steps, initial=now_ns)])
        issue = line[:-1]
        return issue, array("q", map(add, issue, hosts)) if has_host else issue[:], line[1:]
    ends = [now_ns, *before[1:]]
    gaps = [*map(sub, ends[1:], ends), *durations]
    if min(gaps) >= max(hosts):  # a step is issued when one ends, and starts when another does
        line = array("q", [*accumulate(gaps, initial=now_ns)])
        return line[:count], line[depth - 1 : -1], line[depth:]
    issues, starts, ends, at_ns = list[int](), list[int](), [*before], now_ns
    for duration_ns, host_ns in zip(durations, hosts, strict=True):
        at_ns = max(at_ns, ends[-depth])
        issues.append(at_ns)
        at_ns += host_ns
        starts.append(max(ends[-1], at_ns))
        ends.append(starts[-1] + duration_ns)
    return array("q", issues), array("q", starts), array("q", ends[depth:])
