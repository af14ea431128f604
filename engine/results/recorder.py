"""Collects the facts of a run and writes them as the tables of engine/results/schema.py."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from engine.contract.executor import Launch, Meter, Piece, Pieces, Reading, Span
from engine.contract.job import Job
from engine.contract.plan import Collective, Copy, Op, Plan
from engine.contract.regions import Kind, Pool, Tier
from engine.results.plan_log import encode
from engine.results.schema import SCHEMA_VERSION, TABLES, Figures, write_tables
from traces.serving.request import Request

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length


class Stretch:
    """Tokens that a request got without a gap: a part of the delivery times of a device."""

    __slots__ = ("_times", "end", "first")

    def __init__(self, times: Times) -> None:
        self._times, self.first = times, len(times)
        self.end: int | None = None  # None while it goes on

    def __len__(self) -> int:
        return (len(self._times) if self.end is None else self.end) - self.first

    @property
    def first_ns(self) -> int:
        return self._times[self.first]

    @property
    def last_ns(self) -> int:
        return self._times[self.first + len(self) - 1]

    @property
    def times_ns(self) -> list[int]:
        return self._times[self.first : self.first + len(self)].tolist()


class Deliveries:
    """Times at which a device delivered tokens; requests are looked at only when they change."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self._outcomes = outcomes
        self._times: Times = array("q")
        self._ids: Sequence[int] = ()
        self._now: set[int] = set()  # of these ids
        self._open: dict[int, Stretch] = {}  # by request

    def add(self, ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        """Each of these requests got a token at each of these times."""
        if ids != self._ids:
            self._change(ids)
        self._times.extend(times_ns)

    def _change(self, ids: tuple[int, ...]) -> None:
        before, now, going_on = self._now, set(ids), self._open
        for i in before - now:
            going_on.pop(i).end = len(self._times)
        for i in now - before:
            going_on[i] = stretch = Stretch(self._times)
            self._outcomes[i].stretches.append(stretch)
        self._ids, self._now = ids, now


@dataclass(slots=True)
class Outcome:
    """What happened to one request."""

    request: Request
    arrival_ns: int
    device: int | None = None  # the replica it was routed to
    scheduled_ns: int | None = None
    finish_ns: int | None = None
    restarts: int = 0
    swaps: int = 0
    cached_tokens: int = 0
    status: str = "unfinished"
    stretches: list[Stretch] = field(default_factory=list)  # never empty ones

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        return sum([len(s) if s.end is None else s.end - s.first for s in self.stretches])

    @property
    def first_token_ns(self) -> int | None:
        """When the first output token was delivered."""
        return self.stretches[0].first_ns if self.stretches else None

    @property
    def last_token_ns(self) -> int | None:
        """When the newest output token was delivered."""
        return self.stretches[-1].last_ns if self.stretches else None

    @property
    def token_ns(self) -> list[int]:
        """When each output token was delivered."""
        return list(chain.from_iterable([stretch.times_ns for stretch in self.stretches]))


PlanRow = tuple[int, int, int, tuple[int, ...], Plan]
StepRow = tuple[int, int, int, Span, Launch]
TrainedRow = tuple[int, int, int, int, range, int]  # job, step, start, end, microbatches, tokens
MemoryRow = tuple[int, str, int, Sequence[Figures], Mapping[Pool, Reading] | None]


_KIND_COLUMNS = [Kind.KV, Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER]
_KIND_COLUMNS += [Kind.ACTIVATION, Kind.BUFFER]
assert list(Kind) == _KIND_COLUMNS, "the columns of MEMORY follow the order of Kind"


def table_of(name: str, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows in the order of a schema's columns, as one of the tables of engine/results/schema.py."""
    schema = TABLES[name]
    columns = zip(*rows, strict=True) if rows else ([] for _ in schema)
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)]
    table = pa.Table.from_arrays(arrays, schema=schema)
    return table.replace_schema_metadata({"schema_version": str(SCHEMA_VERSION)})


def memory_row(row: MemoryRow, figures: Figures) -> tuple[Any, ...]:
    """A row of MEMORY."""
    at_ns, cause, step, _, readings = row
    (tier, device), *counts = figures[:4]
    reading = readings.get(figures.pool) if readings else None
    measured = (reading.persistent_bytes, reading.process_bytes) if reading else (None, None)
    kinds = (*figures.kind_bytes, figures.kv_pages)
    return (at_ns, cause, step, tier.value, device, *counts, *kinds, *measured)


def request_row(
    outcome: Outcome, outputs: Callable[[int], Sequence[int]] | None
) -> tuple[Any, ...]:
    """A row of REQUESTS."""
    request, tokens = outcome.request, outcome.token_ns
    ids = None if outputs is None else list(outputs(request.request_id))
    return (
        request.request_id,
        request.session,
        request.turn,
        request.slo,
        outcome.device,
        request.prompt_tokens,
        len(tokens),
        outcome.arrival_ns,
        outcome.scheduled_ns,
        tokens[0] if tokens else None,
        outcome.finish_ns,
        outcome.restarts,
        outcome.swaps,
        outcome.cached_tokens,
        outcome.status,
        tokens,
        ids,
    )


def step_row(step: int, issue_ns: int, host_ns: int, span: Span, launch: Launch) -> tuple[Any, ...]:
    """A row of STEPS."""
    pieces, (device, lane) = launch.pieces, span.op.lane
    part = _part_of(span.op)
    served = pieces if part is None else ()
    decodes = sum(1 for p in served if p.tokens == 1 and p.context_tokens)
    return (
        step,
        device,
        lane,
        issue_ns,
        span.start_ns,
        span.end_ns,
        host_ns,
        _work_of(span.op),
        part,
        sum(p.tokens for p in served) - decodes,
        decodes,
        sum(1 for p in served if p.samples),
        launch.nbytes,
        span.peak_bytes,
        _jobs_of(launch),
        [p.tokens for p in pieces],
        [p.context_tokens for p in pieces],
    )


def _jobs_of(launch: Launch) -> list[int]:
    """The jobs of a launch's slices, or the owner of a region that is copied or exchanged."""
    op = launch.op
    if isinstance(op, Copy):
        return [op.src.region.owner]
    if isinstance(op, Collective):
        return [op.writes[0].region.owner]
    return [piece.job_id for piece in launch.pieces]


def _work_of(op: Op) -> str | None:
    """What a launch does, in one word; nothing for a copy."""
    if isinstance(op, Copy):
        return None
    if isinstance(op, Collective):
        return op.pattern.value
    kinds = {"serve" if s.job.training is None else s.work.value for s in op.slices}
    if len(kinds) != 1:
        return "mixed"
    return "again" if op.again else kinds.pop()


def _part_of(op: Op) -> int | None:
    """The first unit of a training launch, or the chunk that it updates or exchanges."""
    if isinstance(op, Collective):
        return op.writes[0].region.part
    if isinstance(op, Copy) or op.slices[0].job.training is None:
        return None
    layers = op.slices[0].layers
    return layers.start if layers else 0


def training_row(row: TrainedRow, loss_of: Callable[[int, int], float] | None) -> tuple[Any, ...]:
    """A row of TRAINING; `loss_of` gives that of a job's microbatch."""
    job_id, step, start_ns, end_ns, microbatches, tokens = row
    loss = None
    if loss_of is not None:
        loss = sum([loss_of(job_id, k) for k in microbatches]) / len(microbatches)
    return job_id, step, start_ns, end_ns, tokens, loss


Predict = Callable[[Launch], int | None]
Outputs = Callable[[int], Sequence[int]]
LossOf = Callable[[int, int], float]
ROW_ORDER = ("settle", "return", "issue")  # of MEMORY at one moment


class ManySteps(Protocol):
    """Steps that were issued as one, and become rows when tables are written."""

    device: int

    def tokens(self) -> list[tuple[tuple[int, ...], Times]]:
        """Requests that got tokens, and when."""

    def plan_rows(self) -> Iterator[tuple[int, int, int, tuple[int, ...], Plan]]:
        """Rows of `plans`."""

    def step_rows(self) -> Iterator[tuple[int, int, int, Span, Launch]]:
        """Rows of `steps`."""

    def memory_rows(self) -> Iterator[tuple[int, str, int, Sequence[Figures], Any]]:
        """Rows of `memory`."""


class Recorder:
    """Facts only; every figure is derived later, in analysis/."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._plans: list[PlanRow] = []
        self._steps: list[StepRow] = []
        self._memory: list[MemoryRow] = []
        self._trained: list[TrainedRow] = []
        self._begun: dict[tuple[int, int], int] = {}  # training job and step -> first issue
        self._runs: list[ManySteps] = []
        self._deliveries: dict[int, Deliveries] = {}  # by device
        self._returned: dict[int, list[int]] = defaultdict(list)  # by device
        self._unseen: set[int] = set()  # devices whose memory has come back; no row says so yet
        self._meter = meter
        self.predicted_bytes: Predict | None = None  # workspace, where a span says none

    @property
    def is_metered(self) -> bool:
        """Whether a machine is read at every settle."""
        return self._meter is not None

    @property
    def trained_steps(self) -> int:
        """Training steps that have ended."""
        return len(self._trained)

    def steps_of(self, job_id: int) -> int:
        """Steps of a training job that have ended."""
        return sum([row[0] == job_id for row in self._trained])

    @property
    def plans(self) -> list[PlanRow]:
        """All plans in issue order: step, device, time, jobs whose memory came back, plan."""
        rows = chain(self._plans, *(run.plan_rows() for run in self._runs))
        return sorted(rows, key=lambda row: row[0])

    @property
    def steps(self) -> list[StepRow]:
        """All operations by end and step: step, issue, host time, span, launch."""
        rows = map(self._predicted, chain(self._steps, *(run.step_rows() for run in self._runs)))
        return sorted(rows, key=lambda row: (row[3].end_ns, row[0]))

    def _predicted(self, row: StepRow) -> StepRow:
        step, issue_ns, host_ns, span, launch = row
        if span.peak_bytes is not None or self.predicted_bytes is None:
            return row
        span = span._replace(peak_bytes=self.predicted_bytes(launch))
        return step, issue_ns, host_ns, span, launch

    @property
    def spans(self) -> list[Span]:
        """All spans by end and step."""
        return [row[3] for row in self.steps]

    # ---- requests
    def arrived(self, request: Request, now_ns: int, device: int | None = 0) -> None:
        self.outcomes[request.request_id] = Outcome(request, now_ns, device)

    def returned(self, job_id: int, device: int) -> None:
        """The memory that a finished job held on a device has come back."""
        self._returned[device].append(job_id)
        self._unseen.add(device)

    @property
    def lacks_return(self) -> bool:
        """Whether memory has come back and no row says so."""
        return bool(self._unseen)

    def rested(self, now_ns: int, step: int, figures: Sequence[Figures]) -> None:
        """Memory came back and no plan follows: adds a row behind the newest plan."""
        self._note(now_ns, "return", step, figures)

    # ---- plans and operations
    def issued(
        self, step: int, device: int, now_ns: int, plan: Plan, figures: Sequence[Figures]
    ) -> None:
        self._plans.append((step, device, now_ns, self.take_returned(device), plan))
        for job in plan.restart:
            if job.job_id in self.outcomes:
                self.outcomes[job.job_id].restarts += 1
        for op in plan.ops:
            if isinstance(op, Copy) and op.src.tier is Tier.GPU and op.dst.tier is Tier.HOST:
                self._count_swap(op)
        self._note(now_ns, "issue", step, figures)

    def take_returned(self, device: int) -> tuple[int, ...]:
        """The jobs whose memory has come back after the last plan of a device."""
        return tuple(self._returned.pop(device, ()))

    def ran(self, run: ManySteps) -> None:
        """Steps were issued at once."""
        self._runs.append(run)
        self._unseen.discard(run.device)

    def run_settled(self, run: ManySteps) -> None:
        """The steps of a run that settle together have ended."""
        for job_ids, times in run.tokens():
            self._delivered(run.device, job_ids, times)

    def scheduled(self, job_id: int, now_ns: int) -> None:
        """The first slice of a request was issued."""
        outcome = self.outcomes[job_id]
        if outcome.scheduled_ns is None:
            outcome.scheduled_ns = now_ns

    def begun(self, job_id: int, step: int, now_ns: int) -> None:
        """A launch of a training job's step was issued."""
        self._begun.setdefault((job_id, step), now_ns)

    def trained(self, job: Job, step: int, now_ns: int) -> None:
        """A step of a training job has ended."""
        assert job.training is not None
        spec, start_ns = job.training.spec, self._begun.pop((job.job_id, step))
        microbatches = range(step * spec.microbatches, (step + 1) * spec.microbatches)
        tokens = spec.microbatch_tokens * spec.microbatches * spec.ranks
        self._trained.append((job.job_id, step, start_ns, now_ns, microbatches, tokens))

    def cached(self, job_id: int, tokens: int) -> None:
        """A request starts, or starts again, behind tokens that were found computed."""
        self.outcomes[job_id].cached_tokens += tokens

    def settled(
        self,
        step: int,
        issue_ns: int,
        host_ns: int,
        span: Span,
        launch: Launch,
        figures: Sequence[Figures],
    ) -> None:
        self._steps.append((step, issue_ns, host_ns, span, launch))
        self._note(span.end_ns, "settle", step, figures)

    def delivered(self, device: int, pieces: Sequence[Piece], at_ns: int) -> None:
        """Output tokens of a launch reached their clients."""
        assert isinstance(pieces, Pieces) or not pieces, "the engine launches pieces by column"
        if isinstance(pieces, Pieces):
            self._delivered(device, pieces.sampled_ids, (at_ns,))

    def _delivered(self, device: int, job_ids: tuple[int, ...], times_ns: Iterable[int]) -> None:
        if not job_ids:
            return
        if device not in self._deliveries:
            self._deliveries[device] = Deliveries(self.outcomes)
        self._deliveries[device].add(job_ids, times_ns)

    def ended(self, job_id: int, now_ns: int, status: str) -> None:
        """A request left, `finished` or `refused`."""
        outcome = self.outcomes[job_id]
        outcome.finish_ns, outcome.status = now_ns, status

    def _note(self, at_ns: int, cause: str, step: int, figures: Sequence[Figures]) -> None:
        readings = self._meter.read() if self._meter and cause != "issue" else None
        self._memory.append((at_ns, cause, step, figures, readings))
        if self._unseen:
            self._unseen.difference_update([device for (_, device), *_ in figures])

    def _count_swap(self, op: Copy) -> None:
        if op.src.region.kind is Kind.KV and op.src.region.owner in self.outcomes:
            self.outcomes[op.src.region.owner].swaps += 1

    def _memory_rows(self) -> list[tuple[Any, ...]]:
        """Rows by time; at one moment settle, return and issue rows in this order, then by step."""
        rows = list(chain(self._memory, *(run.memory_rows() for run in self._runs)))
        rows.sort(key=lambda row: (row[0], ROW_ORDER.index(row[1]), row[2]))
        return [memory_row(row, figures) for row in rows for figures in row[3]]

    # ---- tables
    def tables(
        self, outputs: Outputs | None = None, loss_of: LossOf | None = None
    ) -> dict[str, pa.Table]:
        """All tables by name, their rows in a fixed order.

        Args:
            outputs: the generated ids of a request, by its number.
            loss_of: the loss of a training job's microbatch, by both numbers.
        """
        rows = {
            "requests": [request_row(o, outputs) for _, o in sorted(self.outcomes.items())],
            "steps": [step_row(*row) for row in self.steps],
            "memory": self._memory_rows(),
            "plans": [(s, d, at, list(back), encode(p)) for s, d, at, back, p in self.plans],
            "training": [training_row(row, loss_of) for row in self._trained],
        }
        return {name: table_of(name, rows[name]) for name in TABLES}

    def write(
        self, folder: Path, outputs: Outputs | None = None, loss_of: LossOf | None = None
    ) -> None:
        """Writes the tables into a folder, see `write_tables`."""
        write_tables(folder, self.tables(outputs, loss_of))
