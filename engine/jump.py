"""Fast-forward on a virtual clock: many steps of a repeated plan are issued and settled at once.

A part of the engine in a file of its own; it works on the engine's state.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from engine.executor import Launch, Pieces, Span
from engine.job import Job
from engine.plan import Compute, Op, Slice, Tier
from engine.repeat import FOREVER, Repeat
from engine.run import Run, Times, growth

if TYPE_CHECKING:
    from engine.engine import Engine

MOST = 1024  # steps of one jump


class Repeater(Protocol):
    """An executor that knows beforehand when its launches will run."""

    def repeat(self, launch: Launch, count: int) -> tuple[Sequence[int], int] | None:
        """Durations of `count` launches, each behind the tokens of the one before, and the host's
        time of each. None where durations may not be asked for before they pass."""

    def peak_bytes(self, launch: Launch) -> int | None:
        """Workspace at the peak of a launch."""

    def ends_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end."""

    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies the launch's lane until the span ends, then calls `done`."""


def offers_jumps(engine: Engine) -> bool:
    """Whether steps may be taken at once: nothing is watched while they pass."""
    is_watched = engine._journal is not None or engine.recorder.is_metered
    return engine.forced and not is_watched and hasattr(engine.executor, "repeat")


class Jump:
    """Steps up to the next arrival (at a tie the arrival comes first) or end.

    In effect the same as issuing them one by one, to the nanosecond and the page: at run-ahead
    d, issue[i] = max(issue[i-1] + host, end[i-d]), start[i] = max(end[i-1], issue[i] + host). The
    last d - 1 steps settle one by one, since they are in flight when the engine asks next.
    """

    def __init__(self, engine: Engine, executor: Repeater) -> None:
        self._engine, self._executor = engine, executor
        self._pace_ns = 1  # of the last jump's steps: how far to look ahead
        self._run: Run | None = None  # the last one
        self.steps = 0

    def carry_out(self, repeat: Repeat, device: int) -> Generator[simpy.Event, Any, bool]:
        """Issues what can be issued at once; False where the next step must go alone."""
        run = self._plan(repeat, device)
        if run is None:
            return False
        self._run = run
        count, host_until = len(run), run.issue_ns[-1] + run.host_ns
        self._pace_ns = max(1, (run.end_ns[-1] - run.issue_ns[0]) // count)
        self.steps += count
        repeat.done += count
        self._issue(run)
        env = self._engine.env
        if self._engine.depth > 1 and host_until > env.now:
            yield env.timeout(host_until - int(env.now))
        return True

    def unissued_bytes(self, now_ns: int) -> int:
        """KV that is booked for steps which are issued only at `now_ns` or later."""
        run = self._run
        if run is None or now_ns > run.issue_ns[-1]:
            return 0
        return run.unissued_bytes(now_ns)

    # ---- planning: nothing is changed
    def _plan(self, repeat: Repeat, device: int) -> Run | None:
        engine, op = self._engine, repeat.plan.ops[-1]
        assert isinstance(op, Compute)
        limit = self._limit(repeat, op.slices, device)
        if limit <= engine.depth:
            return None
        op = op if not repeat.done else replace(op)
        launch = Launch(op, (), _pieces(op.slices))
        found = self._executor.repeat(launch, limit)
        if found is None:
            return None
        issue, start, end = self._times(*found)
        until_ns = engine._arrivals.next_ns
        if until_ns is not None:
            limit = bisect_left(issue, until_ns)
        if limit <= engine.depth:
            return None
        times = (issue[:limit], start[:limit], end[:limit])
        return self._made(repeat, device, launch, times, found[1])

    def _limit(self, repeat: Repeat, slices: Sequence[Slice], device: int) -> int:
        """How many steps to look ahead: to the first end (with run-ahead, exclusive)."""
        engine = self._engine
        if not engine.is_calm(device):
            return 0
        limit = min(repeat.left, MOST, self._steps_to_end(slices) - (engine.depth > 1))
        until_ns = engine._arrivals.next_ns
        if until_ns is not None:
            limit = min(limit, (until_ns - int(engine.env.now)) // self._pace_ns + 2)
        return limit

    def _steps_to_end(self, slices: Sequence[Slice]) -> int:
        target, fewest = self._engine._target, FOREVER
        for piece in slices:
            job = piece.job
            known = job.known_tokens
            if known - job.computed_tokens == 1:
                left = target[job.job_id] - known
                if left < fewest:
                    fewest = left
        return fewest

    def _times(self, durations: Sequence[int], host_ns: int) -> tuple[Times, Times, Times]:
        """When steps are issued, start and end."""
        now_ns, depth = int(self._engine.env.now), self._engine.depth
        if depth == 1:
            steps = (host_ns + duration_ns for duration_ns in durations) if host_ns else durations
            end = array("q", accumulate(steps, initial=now_ns))
            issue = end[:-1]
            return issue, array("q", [at + host_ns for at in issue]) if host_ns else issue, end[1:]
        before = self._executor.ends_ns(tuple(self._engine._tails))
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
        repeat: Repeat,
        device: int,
        launch: Launch,
        times: tuple[Times, Times, Times],
        host_ns: int,
    ) -> Run | None:
        engine, count = self._engine, len(times[0])
        due = growth(repeat.plan, repeat.done, count)
        taken = [0] * count
        for step, op in due:
            taken[step] += op.nbytes
        grown = array("q", accumulate(taken))
        pool = (Tier.GPU, device)
        if grown[-1] > engine.ledger.room_bytes()[pool]:
            return None
        return Run(
            repeat.plan,
            repeat.done,
            engine.steps,
            engine._issued[device],
            device,
            pool,
            engine.recorder.take_returned(device),
            launch,
            *times,
            host_ns,
            count - engine.depth + 1,
            engine.ledger.figures(),
            grown,
            engine.page.nbytes,
            self._executor.peak_bytes,
            [op for _, op in due],
        )

    # ---- issue and settle
    def _issue(self, run: Run) -> None:
        engine, ledger = self._engine, self._engine.ledger
        op = run.launch.op
        assert isinstance(op, Compute)
        ledger.grow(run.pool, run.grows)
        engine.steps += len(run)
        engine._issued[run.device] += len(run)
        engine.recorder.ran(run)
        self._advance(op, len(run))
        if engine.reuse is not None:
            pieces = run.launch.pieces
            assert isinstance(pieces, Pieces)
            engine.reuse.keep(op, pieces.contexts)
        last = run.settled - 1
        ledger.touch_again(op, run.settled)
        self._fly(run, op)
        span = Span(op, run.start_ns[0], run.end_ns[last])
        self._executor.hold(run.launch, span, lambda span: self._settle(run, span))
        for step in range(run.settled, len(run)):
            self._issue_alone(run, step)

    def _issue_alone(self, run: Run, step: int) -> None:
        """A step that is still in flight when the engine asks next."""
        engine, launch = self._engine, run.launch_at(step)
        op = launch.op
        assert isinstance(op, Compute)
        engine.ledger.touch_again(op, 1)
        self._fly(run, op)
        start, end = run.start_ns[step], run.end_ns[step]
        issue = run.issue_ns[step]
        engine.flies(run.step + step, run.device, run.number + step, issue, run.host_ns, launch)
        span = Span(op, start, end, self._executor.peak_bytes(launch))
        self._executor.hold(launch, span, engine._settle)

    def _fly(self, run: Run, op: Compute) -> None:
        self._engine._flight[run.device] += 1
        self._engine._tails.add(op)

    def _advance(self, op: Compute, count: int) -> None:
        """Moves all jobs on; who has its length then leaves when the run settles."""
        engine = self._engine
        done: list[Job] = []
        for piece in op.slices:
            job = piece.job
            if job.known_tokens - job.computed_tokens == 1:
                job.known_tokens += count
                if job.known_tokens >= engine._target[job.job_id]:
                    done.append(job)
            elif job.job_id not in engine._started:
                engine._start(job)
            job.computed_tokens += count * piece.tokens
        if done:
            engine.end_with(op, done)

    def _settle(self, run: Run, span: Span) -> None:
        engine = self._engine
        engine.land(span.op)
        engine.recorder.run_settled(run)
        for job in engine._ends.pop(span.op, ()):
            engine._finish(job, span.end_ns, run.device, run.number + len(run) - 1)
        engine._release_idle()
        engine._tell()


def _pieces(slices: Sequence[Slice]) -> Pieces:
    jobs = [piece.job for piece in slices]
    tokens = [piece.tokens for piece in slices]
    contexts = [job.computed_tokens for job in jobs]
    samples = [
        job.known_tokens - job.computed_tokens == n for n, job in zip(tokens, jobs, strict=True)
    ]
    return Pieces([job.job_id for job in jobs], tokens, contexts, samples, [()] * len(jobs))
