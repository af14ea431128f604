"""The records of a run, and what is known of feedback: how often answers of a tenant get some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.contract.job import Job
from engine.contract.plan import Free, Plan
from engine.contract.records import FeedbackCount, learner_of, record_sizes
from engine.contract.regions import Kind, Place
from engine.contract.training_progress import Record
from engine.results.outcomes import RecordOutcome


class RecordBook:
    """What serving has kept of requests. Policies see it, and change it by their plans."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._adopted: dict[int, int] = {}  # by request whose record a sample uses: the job
        self.records: Mapping[int, Record] = MappingProxyType(self._records)
        self._feedback: dict[str, FeedbackCount] = {}
        self._shown: Mapping[str, FeedbackCount] = MappingProxyType(self._feedback)
        self._answers: dict[int, _Answer] = {}  # by request, those without feedback
        self._young = deque[_Answer]()  # that do not count yet, in their order
        self._longest_ns: int | None = None  # wait for feedback so far
        self._outcomes: dict[int, RecordOutcome] = {}  # by request, of records that are held
        self._over: list[RecordOutcome] = []

    # ---- records
    def extend(self, job: Job, tokens: int, training: Iterable[Job], now_ns: int) -> None:
        """A launch has recorded so many more tokens of a request."""
        learner, stop = learner_of(job, training), job.recorded_tokens
        if learner is None or learner.training is None:
            return  # it has left with its last update, earlier in the plan
        assert job.adapter is not None, "a recorded request runs through an adapter"
        sizes = record_sizes(job.job_id, learner.training, stop - tokens, tokens, 0)
        if (record := self._records.get(job.job_id)) is not None:
            firsts = (*record.firsts, stop - tokens)
            self._records[job.job_id] = record._replace(firsts=firsts, stop=stop)
        else:
            units = tuple([place.region.part for place, _ in sizes])
            given = (job.job_id, learner.job_id, job.tenant, job.adapter, units)
            self._records[job.job_id] = Record(*given, (stop - tokens,), stop, now_ns)
            version = job.adapter.version
            made = RecordOutcome(job.job_id, learner.job_id, version, now_ns)
            self._outcomes[job.job_id] = made
        self._outcomes[job.job_id].extend(tokens, sum([nbytes for _, nbytes in sizes]))

    def holds(self, request: int) -> bool:
        """Whether a record of a request is held, or a sample uses it."""
        return request in self._records or request in self._adopted

    def adopt(self, used: Record, sample: int, updates_behind: int, now_ns: int) -> None:
        """A sample uses this of a record from now on: its places go with the sample's backward."""
        self._adopted[used.request] = self._records.pop(used.request).job_id
        self._outcomes[used.request].use(sample, used.tokens, updates_behind, now_ns)

    def booked(
        self, plan: Plan, places_of: Mapping[int, Iterable[Place]], now_ns: int
    ) -> list[int]:
        """A plan is booked: records go of which it has given everything back.

        Args:
            plan: the plan.
            places_of: by owner, the places that are held behind it.
            now_ns: when it is issued.

        Returns:
            The requests of these records.
        """
        if not self._records and not self._adopted:
            return []
        kind, over = Kind.ACTIVATION, list[int]()
        freed = [op.place for op in plan.ops if isinstance(op, Free)]
        restarted = {job.job_id for job in plan.restart}
        for request in dict.fromkeys([p.region.owner for p in freed if p.region.kind is kind]):
            if any([place.region.kind is kind for place in places_of.get(request, ())]):
                continue
            if request in self._records or request in self._adopted:
                over.append(request)
                self._records.pop(request, None)
                self._end(request, self._adopted.pop(request, None) in restarted, now_ns)
        return over

    def _end(self, request: int, is_lost: bool, now_ns: int) -> None:
        self._outcomes[request].end(is_lost, now_ns)
        self._over.append(self._outcomes.pop(request))

    def of_job(self, job_id: int) -> list[int]:
        """Takes all records that a job could have learned from, or does; returns their requests."""
        own = [request for request, record in self._records.items() if record.job_id == job_id]
        own += [request for request, user in self._adopted.items() if user == job_id]
        for request in own:
            self._records.pop(request, None)
            self._adopted.pop(request, None)
            self._over.append(self._outcomes.pop(request))
        return own

    def rows(self) -> list[tuple[object, ...]]:
        """The rows of RECORDS, by their begin."""
        found = [*self._over, *self._outcomes.values()]
        found.sort(key=lambda outcome: (outcome.made_ns, outcome.request_id))
        return [outcome.row() for outcome in found]

    # ---- feedback
    def answered(self, job: Job, now_ns: int) -> None:
        """A request has its answer, on which feedback may come."""
        answer = self._answers[job.job_id] = _Answer(job.tenant, now_ns)
        self._young.append(answer)

    def learned(self, request: int, at_ns: int) -> None:
        """Feedback on a request came at a moment; on one that was refused it tells nothing."""
        self.feedback(at_ns)  # by the longest wait before
        if (answer := self._answers.pop(request, None)) is None:
            return
        answer.is_learned = True
        if answer.counts:
            self._count(answer.tenant, 0, 1)
        self._longest_ns = max(self._longest_ns or 0, at_ns - answer.at_ns)

    def feedback(self, now_ns: int) -> Mapping[str, FeedbackCount]:
        """How much feedback answers have got by now, by tenant: see FeedbackCount."""
        young, longest_ns = self._young, self._longest_ns
        while young and longest_ns is not None and young[0].at_ns + longest_ns <= now_ns:
            answer = young.popleft()
            answer.counts = True
            self._count(answer.tenant, 1, int(answer.is_learned))
        return self._shown

    def _count(self, tenant: str, answers: int, samples: int) -> None:
        before = self._feedback.get(tenant, FeedbackCount(0, 0))
        self._feedback[tenant] = FeedbackCount(before.answers + answers, before.samples + samples)


@dataclass(slots=True)
class _Answer:
    """An answer: when it was given, whether feedback on it has come, and whether it counts."""

    tenant: str
    at_ns: int
    is_learned: bool = False
    counts: bool = False
