"""A step of training that begins like the one before is planned like it, without a question."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.job import Job
from engine.ledger import Ledger
from engine.plan import (
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    GrowCycle,
    Kind,
    Op,
    Place,
    Plan,
    Pool,
    Share,
    Slice,
)
from engine.planlog import encode
from engine.profile import EngineProfile
from engine.regions import later
from engine.roster import Roster
from engine.scoreboard import Ranks
from engine.training import Training

AnyOp = Op | Grow | GrowCycle | Share | Free


class Situation(NamedTuple):
    """What a policy that recurs may go by at the beginning of a step, but for what the plan before
    it says: that of the steps before is compared by itself."""

    held_bytes: tuple[tuple[Place, int], ...]  # in the order of booking
    room_bytes: tuple[tuple[Pool, int], ...]
    written: Ranks
    used: Ranks
    other_bytes: tuple[int, ...]  # beside the launches of the step before


class Turn(NamedTuple):
    """A step as it was planned. `is_steady`: as the one before it, behind an equal beginning."""

    training: Training
    step: int
    begins: Situation
    plan: Plan
    is_steady: bool


class Recurrence:
    """Keeps the last step of a training job that is alone on its device and planned whole.

    Where two steps began alike and were planned alike, a third that begins so is planned so, too:
    all that a policy with `recurs` decides by is equal then, or a step later.
    """

    def __init__(self, ledger: Ledger, roster: Roster, profile: EngineProfile) -> None:
        self._ledger, self._roster, self._profile = ledger, roster, profile
        self._last: Turn | None = None

    def plan(self, ask: Callable[[], Plan]) -> Plan:
        """The next plan: that of the step before, a step later, or what the policy says."""
        last, self._last = self._last, None
        job = self._alone()
        training = None if job is None else job.training
        if job is None or training is None:
            return ask()
        begins, each = self._situation(job.job_id), training.spec.microbatches
        if last is None or last[:3] != (training, training.step - 1, begins):
            plan, is_steady = ask(), False
        elif last.is_steady:
            plan, is_steady = a_step_later(last.plan, each), True
            self._ledger.expect(plan)
        else:
            plan = ask()
            is_steady = encode(plan) == encode(a_step_later(last.plan, each))
        if _is_program(plan):
            self._last = Turn(training, training.step, begins, plan, is_steady)
        return plan

    def _alone(self) -> Job | None:
        """The job whose step begins, if there is nobody else."""
        roster = self._roster
        if roster.waiting or roster.serving or len(roster.training) != 1:
            return None
        (job,) = roster.training
        return job if job.training is not None and job.training.begins_step else None

    def _situation(self, job_id: int) -> Situation:
        ledger = self._ledger
        return Situation(
            ledger.held_bytes.rows(),
            tuple(ledger.room_bytes().items()),
            ledger.written.ranks(),
            ledger.used.ranks(),
            tuple([moment.other_bytes for moment in self._profile.moments(job_id)]),
        )


def _is_program(plan: Plan) -> bool:
    return bool(plan.ops) and plan.repeats == 1 and not (plan.restart or plan.refuse or plan.wake_ns)


def a_step_later(plan: Plan, microbatches: int) -> Plan:
    """The same program for the microbatches of the next step. What runs on a lane is new."""
    return Plan(tuple([_later(op, microbatches) for op in plan.ops]))


def _later(op: AnyOp, count: int) -> AnyOp:
    if isinstance(op, Free):
        return Free(later(op.place, count)) if op.place.region.kind is Kind.ACTIVATION else op
    if isinstance(op, Grow):
        if op.place.region.kind is not Kind.ACTIVATION:
            return op
        return Grow(later(op.place, count), op.nbytes)
    if isinstance(op, Copy):
        return Copy(later(op.src, count), later(op.dst, count))
    if isinstance(op, Compute):
        reads, writes = _all_later(op.reads, count), _all_later(op.writes, count)
        slices = tuple([_slice_later(piece, count) for piece in op.slices])
        return Compute(slices, reads, writes, op.device, op.on, op.again)
    assert isinstance(op, Collective), "whoever trains alone shares no pages"
    reads, writes = _all_later(op.reads, count), _all_later(op.writes, count)
    return Collective(op.pattern, reads, writes, op.nbytes, op.device)


def _all_later(places: tuple[Place, ...], count: int) -> tuple[Place, ...]:
    kind = Kind.ACTIVATION  # looked at here: most places are the same at every step
    return tuple([later(p, count) if p.region.kind is kind else p for p in places])


def _slice_later(piece: Slice, count: int) -> Slice:
    return Slice(*piece[:4], piece.microbatch + count, *piece[5:])
