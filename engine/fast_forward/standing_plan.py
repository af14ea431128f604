"""The plan that stands: issued again without a question, as long as nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import is_, itemgetter

from engine.contract.job import Job
from engine.contract.plan import COMPUTE_LANE, Compute, Free, Grow, GrowCycle, Plan
from engine.contract.regions import PageSize, Place, Pool, Work
from engine.contract.rules import ContractError, Rule
from engine.contract.view import Decodes
from engine.fast_forward.decode_batch import DecodeBatch
from engine.fast_forward.repeated_plan import RepeatedPlan

_job = itemgetter(0)  # of a slice
WHOLE = (Work.FORWARD, None, 0, 0, False)  # a slice of serving, but for its job and tokens


def _serves(plan: Plan, launch: Compute, cohort: DecodeBatch) -> bool:
    """Whether a single step ends in its only launch, and that serves each job once."""
    slices, writes = launch.slices[len(cohort.jobs) :], launch.writes[len(cohort.jobs) :]
    ids = [piece.job.job_id for piece in slices]
    grown = {op.place for op in plan.ops if isinstance(op, Grow)}
    return (
        grown <= {*launch.writes}
        and (launch.on, launch.again, launch.reads) == (COMPUTE_LANE, False, ())
        and not any([isinstance(op, Compute) for op in plan.ops[:-1]])
        and all([piece[2:] == WHOLE and piece.job.training is None for piece in slices])
        and [place.region.owner for place in writes] == ids
        and len({*cohort.ids, *ids}) == len(launch.slices)
    )


class StandingPlan:
    """The plan that is issued again without a question, as long as nothing happens."""

    def __init__(
        self,
        is_allowed: bool,
        page: PageSize,
        tables: Mapping[Place, list[int]],
        tokens_left: Callable[[Job], int],
    ) -> None:
        self._is_allowed, self._page = is_allowed, page
        self._tables, self._tokens_left = tables, tokens_left
        self._last: RepeatedPlan | None = None  # also when it does not hold any more
        self.cohort: DecodeBatch | None = None  # of the last plan
        self._led: Compute | None = None  # a launch that the cohort leads, as `leads` has seen
        self.shown: GrowCycle | None = None  # of the cohort, as a View has it
        self.repeat: RepeatedPlan | None = None

    def keep(self, plan: Plan) -> None:
        """A plan was decided; it stands for as many steps as it holds."""
        self._last = self.repeat = self._stand(plan) if self._is_allowed and plan.ops else None
        self.cohort = None if self._last is None else self._last.cohort
        self._led = None

    def _stand(self, plan: Plan) -> RepeatedPlan | None:
        launch, cycle = plan.ops[-1], plan.ops[0]
        if not isinstance(launch, Compute):
            return None
        cohort, has_cycle = self.cohort, isinstance(cycle, GrowCycle)
        if cohort is not None and plan.repeats == 1:  # else it takes from nobody
            self._part(cohort, plan)
        is_led = launch is self._led or (cohort is not None and _leads(cohort, launch))
        if cohort is None or not is_led or (has_cycle and cohort.turns is None):
            cohort = DecodeBatch(self._page)
        lead = len(cohort.jobs)
        jobs = list(map(_job, launch.slices[lead:]))
        if self._join(cohort, jobs, launch.writes[lead:]) and not _leads(cohort, launch):
            return None
        is_known = not isinstance(cycle, GrowCycle) or cycle is self.shown
        if not (is_known or _is_same(cycle, cohort.cycle())):
            raise ContractError(Rule.REPEATS, "a cycle grows as decodes fill their pages")
        if plan.repeats == 1 and not _serves(plan, launch, cohort):
            return None
        if not has_cycle and cohort.jobs and not _grows_in_turn(plan, cohort):
            cohort.turns = None
        return RepeatedPlan(plan, cohort)

    def _part(self, cohort: DecodeBatch, plan: Plan) -> None:
        """A job that loses its memory or is refused is in the cohort no more."""
        gone = {job.job_id for job in (*plan.restart, *plan.refuse)}
        gone.update([op.place.region.owner for op in plan.ops if isinstance(op, Free)])
        for owner in gone.intersection(cohort.ids):
            cohort.leave(cohort.ids.index(owner))
            self._led = None

    def _join(self, cohort: DecodeBatch, jobs: Sequence[Job], places: Sequence[Place]) -> bool:
        """Whoever decodes, up to the first who does not, comes into the cohort; if anybody does."""
        if not jobs or jobs[0].is_prefilling:
            return False
        pairs = takewhile(self._is_decode, zip(jobs, places, strict=False))
        cohort.join(pairs, self._tables, self._tokens_left)
        return True

    def _is_decode(self, pair: tuple[Job, Place]) -> bool:
        job, place = pair
        is_own = place.region.owner == job.job_id and place in self._tables  # and here already
        return is_own and not job.is_prefilling

    def leads(self, launch: Compute) -> bool:
        """Whether the decodes of the last plan, in its order, are the first of a launch, which has
        as many slices as writes."""
        cohort = self.cohort
        if cohort is None or not 0 < len(cohort.jobs) <= len(launch.writes):
            return False
        if not all(map(is_, cohort.slices, launch.slices)):
            return False
        if not all(map(is_, cohort.places, launch.writes)):
            return False
        self._led = launch
        return True

    def drop(self) -> None:
        """Something happened: the policy has to be asked."""
        self.repeat = None

    def lose(self, jobs: Sequence[Job], somebody_waits: bool) -> None:
        """Jobs have ended: without them, unless somebody may come in for them, or a prompt would
        take more of the budget now."""
        last = self._last
        if last is None:
            return
        if somebody_waits or last.is_cut:
            self.repeat = None
        last.lose(jobs)
        if not last.jobs:
            self._last = self.repeat = self.cohort = None

    def next(self, room_bytes: Callable[[], dict[Pool, int]]) -> Plan | None:
        """The plan if it still holds; it ends where the growth of its next step finds no room."""
        repeat = self.repeat
        if repeat is not None and repeat.left and repeat.fits(room_bytes):
            return repeat.plan
        self.repeat = None
        return None

    def decodes(self, serving: Sequence[Job]) -> Decodes | None:
        """The decodes of the last plan; None where it did not have all that are in service."""
        last, cohort = self._last, self.cohort
        if last is None or cohort is None or last.jobs != serving:
            return None
        self._last = None  # what it had may come into the cohort now
        self._join(cohort, last.tail, last.places)
        self.shown = cohort.cycle()
        rest = serving[len(cohort.jobs) :]
        if self.shown is None or not all([job.is_prefilling for job in rest]):
            return None
        return Decodes(cohort.slices, cohort.places, self.shown)


def _grows_in_turn(plan: Plan, cohort: DecodeBatch) -> bool:
    """Whether a single step takes what its decodes need now, and no more."""
    if plan.repeats > 1 or cohort.turns is None:
        return False
    taken, ids = [op for op in plan.ops[:-1] if isinstance(op, Grow)], {*cohort.ids}
    own = {op.place: op.nbytes for op in taken if op.place.region.owner in ids}
    return own == {op.place: op.nbytes for op in cohort.due(1)[0]}


def _leads(cohort: DecodeBatch, launch: Compute) -> bool:
    n = len(cohort.jobs)
    return launch.slices[:n] == cohort.slices and launch.writes[:n] == cohort.places


def _is_same(cycle: object, other: GrowCycle | None) -> bool:
    if not isinstance(cycle, GrowCycle) or other is None:
        return False
    places = [[[op.place for op in ops] for ops in c.by_step] for c in (cycle, other)]
    return places[0] == places[1]
