"""Recurring steps: a training step that begins like the step before is planned like it, unasked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.plan import (
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Op,
    Plan,
    Share,
    Slice,
)
from engine.contract.regions import Kind, Place, Pool, later
from engine.contract.training_progress import TrainingProgress
from engine.loop.profile import EngineProfile
from engine.loop.state import JobLists
from engine.memory.ledger import Ledger
from engine.memory.scoreboard import Ranks
from engine.results.plan_log import encode

AnyOp = Op | Grow | Share | Free


class Situation(NamedTuple):
    """All that a policy that recurs may decide by at the beginning of a training step.

    The plans of the step before count, too; they are compared apart from this.
    """

    held_bytes: tuple[tuple[Place, int], ...]  # in the order of booking
    room_bytes: tuple[tuple[Pool, int], ...]
    written: Ranks
    used: Ranks
    other_bytes: tuple[int, ...]  # held beside each launch of the step before


@dataclass(eq=False, slots=True)
class RecurringStep:
    """A training step and its plans so far. `is_again`: they are those of the step before it."""

    training: TrainingProgress
    number: int
    begins: Situation
    is_again: bool = False
    plans: list[Plan] = field(default_factory=list)
    moving: Sequence[Sequence[int]] = ()  # by plan: which operations differ a step later

    def follows(self, other: RecurringStep) -> bool:
        """Whether this is the next step of the job of `other`, and begins like it."""
        is_next = self.training is other.training and self.number == other.number + 1
        return is_next and self.begins == other.begins


class Recurrence:
    """Remembers the last steps of a training job that is alone on its device.

    Where two steps begin alike and are planned alike, a third step that begins alike gets the plans
    of the second, a step later. A policy with `recurs` would answer so: all that it decides by is
    equal, or a step later. That holds as long as the job is alone.
    """

    def __init__(self, ledger: Ledger, jobs: JobLists, profile: EngineProfile) -> None:
        self._ledger, self._jobs, self._profile = ledger, jobs, profile
        self._before: RecurringStep | None = None  # the step before
        self._now: RecurringStep | None = None  # the step under way

    def next(self) -> Plan | None:
        """The next plan of the step before, a step later; None where the policy must be asked."""
        if (job := self._alone()) is not None and job.training is not None:
            if job.training.begins_step:
                self._begin(job.job_id, job.training)
            if self._now is not None:
                return self._again(self._now)
        self.forget()
        return None

    def answered(self, plan: Plan) -> None:
        """The policy has answered."""
        if self._now is not None:
            self._now.plans.append(plan)
            if not _is_program(plan):
                self.forget()

    def forget(self) -> None:
        """Forgets both steps: an event sets this step apart."""
        self._before = self._now = None

    def _again(self, now: RecurringStep) -> Plan | None:
        if not now.is_again:
            return None
        assert self._before is not None, "a recurring step has a step before it"
        number, each = len(now.plans), now.training.spec.microbatches
        plan = a_step_later(self._before.plans[number], each, now.moving[number])
        self._ledger.expect(plan)
        now.plans.append(plan)
        return plan

    def _begin(self, job_id: int, training: TrainingProgress) -> None:
        before, self._before = self._before, self._now
        self._now = RecurringStep(training, training.step, self._situation(job_id))
        last = self._before
        if last is not None and self._now.follows(last):
            self._now.is_again = last.is_again or (before is not None and _is_like(last, before))
            if self._now.is_again:
                self._now.moving = last.moving or [_moving(plan) for plan in last.plans]

    def _alone(self) -> Job | None:
        """The training job that is the only job; None where there is none."""
        jobs = self._jobs
        if jobs.waiting or jobs.serving or len(jobs.training) != 1:
            return None
        return jobs.training[0]

    def _situation(self, job_id: int) -> Situation:
        ledger = self._ledger
        return Situation(
            ledger.held_bytes.rows(),
            tuple(ledger.room_bytes().items()),
            ledger.written.ranks(),
            ledger.used.ranks(),
            tuple([moment.other_bytes for moment in self._profile.moments(job_id)]),
        )


def _is_like(step: RecurringStep, before: RecurringStep) -> bool:
    """Whether a step began and was planned like the step before it."""
    each = step.training.spec.microbatches
    return step.follows(before) and [encode(plan) for plan in step.plans] == [
        encode(a_step_later(plan, each)) for plan in before.plans
    ]


def _is_program(plan: Plan) -> bool:
    return bool(plan.ops) and not (plan.restart or plan.refuse or plan.wake_ns or plan.relaid)


def a_step_later(plan: Plan, microbatches: int, moving: Sequence[int] | None = None) -> Plan:
    """A plan's program for the microbatches of the next step.

    `moving`: the operations that differ then, by index; found here where it is None.
    """
    ops = [*plan.ops]
    for i in _moving(plan) if moving is None else moving:
        ops[i] = _later(ops[i], microbatches)
    return Plan(tuple(ops))


def _moving(plan: Plan) -> list[int]:
    """The indices of operations that differ a step later, in any step.

    An operation that runs on a lane is a new object each time, and activations of another
    microbatch have other places.
    """
    return [
        i
        for i, op in enumerate(plan.ops)
        if not isinstance(op, Free | Grow) or op.place.region.kind is Kind.ACTIVATION
    ]


def _later(op: AnyOp, count: int) -> AnyOp:
    if isinstance(op, Compute):
        reads, writes = _all_later(op.reads, count), _all_later(op.writes, count)
        slices = tuple([_slice_later(piece, count) for piece in op.slices])
        after = _all_later(op.after, count)
        return Compute(slices, reads, writes, op.device, op.on, op.again, after)
    if isinstance(op, Free):
        return Free(later(op.place, count))
    if isinstance(op, Grow):
        return Grow(later(op.place, count), op.nbytes)
    if isinstance(op, Copy):
        return Copy(later(op.src, count), later(op.dst, count))
    assert isinstance(op, Collective), "a job that trains alone shares no pages"
    reads, writes = _all_later(op.reads, count), _all_later(op.writes, count)
    return Collective(op.pattern, reads, writes, op.nbytes, op.device)


def _all_later(places: tuple[Place, ...], count: int) -> tuple[Place, ...]:
    kind = Kind.ACTIVATION  # tested here: most places are equal at every step
    return places and tuple([later(p, count) if p.region.kind is kind else p for p in places])


def _slice_later(piece: Slice, count: int) -> Slice:
    job, tokens, work, layers, microbatch, version, record = piece
    return Slice(job, tokens, work, layers, microbatch + count, version, record)
