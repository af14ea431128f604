"""Notes what a scheduling reads of a view: where no step changes that, its answer stays.

A scheduling is a pure function of its view. A standing plan moves the jobs of its launch, memory
and time, and nothing else. A batch that is made without reading any of these would be made again,
until a job arrives, ends or is admitted. A scheduling whose own state changes is asked again. That
state is compared only where all that was read lets the plan stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pickle import Pickler
from types import FunctionType, ModuleType
from typing import Any

from engine.contract.executor import Launch
from engine.contract.job import ALONE, Job
from engine.contract.plan import Compute, Op, Plan, Slice
from engine.contract.records import FeedbackCount
from engine.contract.regions import Place, Pool
from engine.contract.rules import ReadOnlyList
from engine.contract.training_progress import Record
from engine.contract.view import Cost, KeptPages, Profile, View

STEADY_IN_DECODE = frozenset(("remaining_tokens", "is_prefilling"))
MOST_STATE_BYTES = 1 << 16  # to compare more takes longer than the questions that it spares


def can_be_seen() -> bool:
    """Whether reads can be noted: compiled classes are read past the properties that note them."""
    return isinstance(View.room, FunctionType)


class SeenReads:
    """The reads of all batches of one question. Jobs are shown as one object for their life."""

    def __init__(self) -> None:
        self._is_shown = False  # a policy that reads the engine's own view is asked at each step
        self._of_view = False  # something was read that moves with any step
        self._of_jobs: set[tuple[int, str]] = set()
        self._jobs: dict[int, SeenJob] = {}
        self._ops: dict[Op, Op] = {}  # operations in flight, as they are shown
        self._asked: dict[int, object] = {}  # schedulings of this question, by identity
        self._states: dict[int, bytes | None] = {}  # theirs behind the whole answer, where taken
        self._before: dict[int, bytes | None] = {}  # those behind the answer before

    def begin(self, jobs: Iterable[int], in_flight: Iterable[Op]) -> None:
        """A question begins, while these jobs have not left and these operations have not ended."""
        self._is_shown = self._of_view = False
        self._of_jobs.clear()
        self._asked.clear()
        self._states, self._before = {}, self._states
        if gone := self._jobs.keys() - set(jobs):
            launches = [op for op in in_flight if isinstance(op, Compute)]
            for job_id in gone - {piece.job.job_id for op in launches for piece in op.slices}:
                del self._jobs[job_id]

    def shown(self, view: View) -> View:
        """See Reads."""
        self._is_shown = True
        return SeenView.of(view, self)

    def slices(self, batch: Sequence[Any], scheduling: object) -> tuple[Slice, ...]:
        """See Reads. What is no slice stays what it is, for the checks."""
        self._asked[id(scheduling)] = scheduling
        return tuple([self._real(piece) for piece in batch])

    def hold(self, plan: Plan, waiting: Sequence[Job]) -> bool:
        """Whether steps of the plan leave all facts that were read as they are, and no state moves.

        A plan that admits a waiting job changes the lists of the view. A state is taken also where
        it is prompts or an admission alone that move, so that the next answer can be compared.
        """
        if self._of_view or not self._is_shown:
            return False
        launches = [op for op in plan.ops if isinstance(op, Compute)]
        moved = {piece.job.job_id: piece.job for op in launches for piece in op.slices}
        stand_still = moved.keys().isdisjoint([job.job_id for job in waiting])
        for job_id, name in self._of_jobs:
            if (job := moved.get(job_id)) is None:
                continue
            if name not in STEADY_IN_DECODE:
                return False
            stand_still = stand_still and not job.is_prefilling
        return self._keep_their_states() and stand_still

    def _keep_their_states(self) -> bool:
        """Whether each scheduling holds what it held behind the answer before.

        A state that could not be compared then is not tried again.
        """
        keep = True
        for number, scheduling in self._asked.items():
            before = self._before.get(number, b"")  # no state is empty
            now = self._states[number] = None if before is None else state_of(scheduling)
            keep = keep and now is not None and now == before
        return keep

    def read(self) -> None:
        """A fact was read that moves with any step."""
        self._of_view = True

    def read_job(self, job: Job, name: str) -> None:
        """A fact of a job was read that moves with it."""
        self._of_jobs.add((job.job_id, name))

    def job(self, job: Job) -> SeenJob:
        """The job as a scheduling is shown it: one object for its life."""
        seen = self._jobs.get(job.job_id)
        if seen is None or seen.real is not job:
            seen = self._jobs[job.job_id] = SeenJob(job, self)
        return seen

    def jobs(self, jobs: Sequence[Job]) -> Sequence[SeenJob]:
        """A list of the view as a scheduling is shown it."""
        return ReadOnlyList(map(self.job, jobs))

    def ops(self, in_flight: Sequence[Op]) -> tuple[Op, ...]:
        """Operations in flight with SeenJobs in their slices: one object each while in flight."""
        before = self._ops
        self._ops = {op: before.get(op) or self._op(op) for op in in_flight}
        return tuple(self._ops.values())

    def _op(self, op: Op) -> Op:
        if not isinstance(op, Compute):
            return op
        return op.again_as(tuple([s._replace(job=self.job(s.job)) for s in op.slices]))

    def _real(self, piece: Any) -> Any:
        if isinstance(piece, Slice) and isinstance(piece.job, SeenJob):
            return piece._replace(job=piece.job.real)
        return piece.real if isinstance(piece, SeenJob) else piece


class TooMuchState(Exception):
    """An object holds more than MOST_STATE_BYTES."""


class StateBytes(bytearray):
    """A file of MOST_STATE_BYTES at most."""

    def write(self, data: bytes) -> None:
        """See Pickler.

        Raises:
            TooMuchState: the file would become too long.
        """
        if len(self) + len(data) > MOST_STATE_BYTES:
            raise TooMuchState
        self += data


class StatePickler(Pickler):
    """Writes what an object holds.

    Classes, modules and functions without a closure are written by identity, and a SeenJob by its
    number: its reads are noted, and it is one object for its life.
    """

    def persistent_id(self, value: Any) -> int | str | None:
        """See Pickler."""
        if isinstance(value, SeenJob):
            return f"job {value.job_id}"
        is_plain = isinstance(value, FunctionType) and value.__closure__ is None
        return id(value) if is_plain or isinstance(value, type | ModuleType) else None


def state_of(scheduling: object) -> bytes | None:
    """What a scheduling holds, for comparison; None where it is too much or cannot be compared."""
    written = StateBytes()
    try:
        StatePickler(written).dump(scheduling)
    except Exception:  # what a user's object raises
        return None
    return bytes(written)


class SeenJob(Job):
    """A job whose moving facts are noted when they are read."""

    __slots__ = ("_reads", "real")
    _reads: SeenReads
    real: Job

    def __init__(self, job: Job, reads: SeenReads) -> None:
        super().__init__(
            job.job_id,
            job.arrival_ns,
            job.prompt_tokens,
            slo=job.slo,
            adapter=job.adapter,
            tenant=job.tenant,
            session=job.session,
            turn=job.turn,
            gets_feedback=job.gets_feedback,
            prefix_ids=job.prefix_ids,
            training=job.training,
        )
        object.__setattr__(self, "device", job.device)
        object.__setattr__(self, "real", job)
        object.__setattr__(self, "_reads", reads)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a Job with the facts of now: the engine refuses it like any copy of a job."""
        self._reads.read()
        real: Any = self.real
        _, _, (_, facts), *rest = real.__reduce_ex__(protocol)
        now = {"_known": real.known_tokens, "_computed": real.computed_tokens, "_clock": ALONE}
        return Job.__new__, (Job,), (None, facts | now), *rest

    @property
    def known_tokens(self) -> int:
        self._reads.read_job(self.real, "known_tokens")
        return self.real.known_tokens

    @property
    def generated_tokens(self) -> int:
        self._reads.read_job(self.real, "generated_tokens")
        return self.real.generated_tokens

    @property
    def computed_tokens(self) -> int:
        self._reads.read_job(self.real, "computed_tokens")
        return self.real.computed_tokens

    @property
    def remaining_tokens(self) -> int:
        self._reads.read_job(self.real, "remaining_tokens")
        return self.real.remaining_tokens

    @property
    def is_prefilling(self) -> bool:
        self._reads.read_job(self.real, "is_prefilling")
        return self.real.is_prefilling

    @property
    def recorded_tokens(self) -> int:
        self._reads.read_job(self.real, "recorded_tokens")
        return self.real.recorded_tokens

    @recorded_tokens.setter
    def recorded_tokens(self, tokens: int) -> None:
        """The job's own is read: none is kept here."""


def _as_it_is(reads: SeenReads, value: Any) -> Any:
    return value


def _noted(name: str, shown: Callable[[SeenReads, Any], Any] = _as_it_is) -> Any:
    """A property for a field of View that notes that it is read; `shown` is what it answers."""
    stored = vars(View)[name]

    def read(view: SeenView) -> Any:
        reads = view.reads
        assert isinstance(reads, SeenReads)
        reads.read()
        return shown(reads, stored.__get__(view))

    return property(read)


class SeenView(View):
    """A view whose moving facts are noted when they are read; its jobs are SeenJobs."""

    __slots__ = ()
    if can_be_seen():
        now_ns: int = _noted("now_ns")
        issued: int = _noted("issued")
        training: Sequence[Job] = _noted("training", SeenReads.jobs)
        free_bytes: Mapping[Pool, int] = _noted("free_bytes")
        coming_bytes: Mapping[Pool, int] = _noted("coming_bytes")
        held_bytes: Mapping[Place, int] = _noted("held_bytes")
        written: Mapping[Place, int] = _noted("written")
        used: Mapping[Place, int] = _noted("used")
        in_flight: Sequence[Op] = _noted("in_flight", SeenReads.ops)
        profile: Profile = _noted("profile")
        cost: Cost | None = _noted("cost")
        kept_pages: Callable[[], KeptPages] | None = _noted("kept_pages")
        service: Mapping[str, float] | None = _noted("service")
        first_token_ns: Callable[[Job], int | None] = _noted("first_token_ns")
        records: Mapping[int, Record] | None = _noted("records")
        feedback: Mapping[str, FeedbackCount] | None = _noted("feedback")
        launch_of: Callable[[Op], Launch] = _noted("launch_of")

    @classmethod
    def of(cls, view: View, reads: SeenReads) -> SeenView:
        """What a view shows, with jobs that note their reads and no decodes known beforehand."""
        values = {field.name: getattr(view, field.name) for field in fields(View)}
        values["serving"], values["waiting"] = reads.jobs(view.serving), reads.jobs(view.waiting)
        values["running"] = None
        return cls(**values)
