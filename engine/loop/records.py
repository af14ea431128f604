"""The records of a run, and what is known of feedback: how often answers of a tenant get some."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType

from engine.contract.job import Job
from engine.contract.plan import Free, Plan
from engine.contract.records import FeedbackCount, Record, learner_of
from engine.contract.regions import Kind, Place


class RecordBook:
    """What serving has kept of requests. Policies see it, and change it by their plans."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self.records: Mapping[int, Record] = MappingProxyType(self._records)
        self._feedback: dict[str, FeedbackCount] = {}
        self.feedback: Mapping[str, FeedbackCount] = MappingProxyType(self._feedback)
        self._tenants: dict[int, str] = {}  # of requests that are answered

    # ---- records
    def extend(self, job: Job, first: int, training: Iterable[Job], now_ns: int) -> None:
        """A launch has recorded tokens of a request, from `first` on."""
        stop = job.recorded_tokens
        if (record := self._records.get(job.job_id)) is not None:
            firsts = (*record.firsts, first)
            self._records[job.job_id] = record._replace(firsts=firsts, stop=stop)
            return
        learner = learner_of(job, training)
        assert learner is not None and job.adapter is not None, "the check lets no other pass"
        given = (job.job_id, learner.job_id, job.tenant, job.adapter, job.prompt_tokens)
        self._records[job.job_id] = Record(*given, (first,), stop, now_ns)

    def adopt(self, request: int) -> None:
        """A sample uses a record from now on: its places go with the sample's backward."""
        del self._records[request]

    def booked(self, plan: Plan, places_of: Mapping[int, Container[Place]]) -> None:
        """A plan is booked: records go of which it has given everything back."""
        if not self._records:
            return
        kind = Kind.ACTIVATION
        freed = [op.place for op in plan.ops if isinstance(op, Free)]
        for request in {place.region.owner for place in freed if place.region.kind is kind}:
            places: Iterable[Place] = places_of.get(request, ())  # type: ignore[assignment]
            if request in self._records and not any([p.region.kind is kind for p in places]):
                del self._records[request]

    def of_job(self, job_id: int) -> list[int]:
        """Takes all records that a job could have learned from; returns their requests."""
        own = [request for request, record in self._records.items() if record.job_id == job_id]
        for request in own:
            del self._records[request]
        return own

    # ---- feedback
    def answered(self, job: Job) -> None:
        """A request has its answer, on which feedback may come."""
        self._tenants[job.job_id] = job.tenant
        count = self._feedback.get(job.tenant, FeedbackCount(0, 0))
        self._feedback[job.tenant] = count._replace(answers=count.answers + 1)

    def learned(self, request: int) -> None:
        """Feedback on a request has come; on one that was refused it tells nothing."""
        if (tenant := self._tenants.pop(request, None)) is not None:
            count = self._feedback[tenant]
            self._feedback[tenant] = count._replace(samples=count.samples + 1)
