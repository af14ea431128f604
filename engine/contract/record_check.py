"""The check of a plan's records: what serving keeps of prompts is kept whole, and goes whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NoReturn

from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.records import Record, learner_of, record_sizes
from engine.contract.regions import Kind, Place, Region, Tier, told
from engine.contract.rules import ContractError, Rule


class RecordCheck:
    """Checks what a plan does with records; it changes nothing.

    Args:
        records: those that are kept, by request.
        jobs: the jobs that wait or are in service.
        held_bytes: bytes of each place that is held.
        places_of: by owner, the places that are held.
    """

    def __init__(
        self,
        records: Mapping[int, Record],
        jobs: Mapping[int, Job],
        held_bytes: Mapping[Place, int],
        places_of: Mapping[int, Iterable[Place]],
    ) -> None:
        self._records, self._jobs = records, jobs
        self._held_bytes, self._places_of = held_bytes, places_of

    def check(self, plan: Plan, device: int) -> None:
        """Checks a plan whose operations have the form of the contract.

        Args:
            plan: the plan of a policy.
            device: the device that it is for.

        Raises:
            ContractError: the plan breaks a rule; nothing is changed.
        """
        grown, computed = Counter[Place](), dict[int, int]()
        made = dict[int, set[Region]]()  # by request, what the plan records of it
        touched = {job.job_id for job in plan.restart}
        adopted = set[int]()
        for op in plan.ops:
            if isinstance(op, Grow):
                grown[op.place] += op.nbytes
            elif isinstance(op, Free | Copy):
                place = op.place if isinstance(op, Free) else op.src
                if place.region.kind in (Kind.ACTIVATION, Kind.KV):
                    touched.add(place.region.owner)
            elif isinstance(op, Compute):
                self._compute(op, grown, computed, made, device)
                adopted |= self._adopted_by(op)
        restarted = {job.job_id for job in plan.restart}
        for request in (touched & self._records.keys()) - adopted:
            self._check_whole(request, plan, made.get(request, set()), request in restarted)
        freed = {op.place for op in plan.ops if isinstance(op, Free)}
        for request in adopted:
            stay = [p for p in self._places_of.get(request, ()) if p.region.kind is Kind.KV]
            if {*stay} - freed:
                _refuse("a sample got its keys and values, and they stay as well", request)

    def _adopted_by(self, op: Compute) -> set[int]:
        """The requests behind whose records samples start with a launch."""
        found = set[int]()
        for piece in op.slices:
            training = piece.job.training
            if not piece.record or training is None:
                continue
            if (record := training.adoptable(piece.microbatch)) is not None:
                found.add(record.request)
        return found

    def _compute(
        self,
        op: Compute,
        grown: Mapping[Place, int],
        computed: dict[int, int],
        made: dict[int, set[Region]],
        device: int,
    ) -> None:
        expected, served = set[Place](), set[int]()
        for piece in op.slices:
            job = piece.job
            if job.training is not None:
                continue
            served.add(job.job_id)
            first = computed.get(job.job_id, job.computed_tokens)
            computed[job.job_id] = first + piece.tokens
            if piece.record:
                places = self._window(piece, first, grown, op, device)
                made.setdefault(job.job_id, set()).update([place.region for place in places])
                expected.update(places)
        for place in op.writes:
            owner, kind, _, _ = place.region
            if kind is Kind.ACTIVATION and owner in served and place not in expected:
                _refuse(f"a launch writes {told(place)}, and no slice records it", owner)

    def _window(
        self, piece: Slice, first: int, grown: Mapping[Place, int], op: Compute, device: int
    ) -> list[Place]:
        """The places of a window that a launch records: new ones, of exactly its bytes."""
        job = piece.job
        learner = learner_of(job, self._jobs.values())
        if learner is None or learner.training is None:
            _refuse("a slice is recorded, and no job learns from the request", job.job_id)
        writes, found = {*op.writes}, list[Place]()
        for place, nbytes in record_sizes(
            job.job_id, learner.training, first, piece.tokens, device
        ):
            if place not in writes:
                _refuse(f"a recorded slice in a launch that does not write {told(place)}")
            if grown.get(place, 0) != nbytes or place in self._held_bytes:
                what = f"{grown.get(place, 0)} new bytes of {nbytes} at {told(place)}"
                _refuse(f"a recorded slice finds {what}", job.job_id)
            found.append(place)
        return found

    def _check_whole(self, request: int, plan: Plan, made: set[Region], is_restarted: bool) -> None:
        """A plan that touches a record leaves all of it, or none."""
        there = {place for place in self._places_of.get(request, ())}
        for op in plan.ops:
            if isinstance(op, Free) and op.place.region.owner == request:
                there.discard(op.place)
            elif isinstance(op, Copy) and op.dst.region.owner == request:
                there.add(op.dst)
            elif isinstance(op, Grow) and op.place.region.owner == request:
                there.add(op.place)
        own = {place.region for place in there if place.region.kind is Kind.ACTIVATION}
        before = {
            place.region
            for place in self._places_of.get(request, ())
            if place.region.kind is Kind.ACTIVATION
        }
        if is_restarted and own:
            _refuse("a restart: what is recorded of it is to be freed", request)
        if own and own != before | made:
            lost = next(iter((before | made) - own))
            _refuse(
                f"{told(Place(lost, Tier.GPU))} is freed, and the rest of its record stays", request
            )
        has_kv = any([place.region.kind is Kind.KV for place in there])
        if request not in self._jobs and bool(own) is not has_kv:
            what = "keys and values" if own else "the record"
            _refuse(f"{what} of request {request} are freed alone: both go, or both stay", request)


def _refuse(what: str, job_id: int | None = None) -> NoReturn:
    raise ContractError(Rule.RECORD, what, job_id)
