"""Collects the facts of a run and writes them as the four tables of engine/record.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.executor import Launch, Meter, Piece, Pieces, Reading, Span
from engine.plan import Copy, Kind, Plan, Pool, Tier
from engine.planlog import LoggedPlan, encode
from engine.record import SCHEMA_VERSION, TABLES
from engine.run import Figures, Run, Times
from traces.request import Request

PlanRow = tuple[int, int, int, tuple[int, ...], Plan]
StepRow = tuple[int, int, int, Span, Launch]
MemoryRow = tuple[int, str, int, Sequence[Figures], Mapping[Pool, Reading] | None]


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
    token_runs: list[int | Times] = field(default_factory=list)  # one token, or all of a run

    @property
    def tokens(self) -> int:
        """Output tokens delivered."""
        return sum(1 if isinstance(run, int) else len(run) for run in self.token_runs)

    @property
    def first_token_ns(self) -> int | None:
        """When the first output token was delivered."""
        return next(map(_first, self.token_runs), None)

    @property
    def last_token_ns(self) -> int | None:
        """When the newest output token was delivered."""
        return next(map(_last, reversed(self.token_runs)), None)

    @property
    def token_ns(self) -> list[int]:
        """When each output token was delivered."""
        runs = ([run] if isinstance(run, int) else run.tolist() for run in self.token_runs)
        return list(chain.from_iterable(runs))


def _first(run: int | Times) -> int:
    return run if isinstance(run, int) else int(run[0])


def _last(run: int | Times) -> int:
    return run if isinstance(run, int) else int(run[-1])


class Recorder:
    """Facts only; every figure is derived later, in analysis/."""

    def __init__(self, meter: Meter | None = None) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._plans: list[PlanRow] = []
        self._steps: list[StepRow] = []
        self._memory: list[MemoryRow] = []
        self._runs: list[Run] = []
        self._returned: dict[int, list[int]] = defaultdict(list)  # by device
        self._meter = meter

    @property
    def is_metered(self) -> bool:
        """Whether a machine is read at every settle."""
        return self._meter is not None

    @property
    def plans(self) -> list[PlanRow]:
        """All plans in issue order: step, device, time, jobs whose memory came back, plan."""
        rows = chain(self._plans, *(run.plan_rows() for run in self._runs))
        return sorted(rows, key=lambda row: row[0])

    @property
    def steps(self) -> list[StepRow]:
        """All operations by end and step: step, issue, host time, span, launch."""
        rows = chain(self._steps, *(run.step_rows() for run in self._runs))
        return sorted(rows, key=lambda row: (row[3].end_ns, row[0]))

    @property
    def spans(self) -> list[Span]:
        """All spans by end and step."""
        return [row[3] for row in self.steps]

    # ---- requests
    def arrived(self, request: Request, now_ns: int, device: int | None = 0) -> None:
        self.outcomes[request.request_id] = Outcome(request, now_ns, device)

    def returned(self, job_id: int, device: int) -> None:
        """What a finished job held on a device has come back."""
        self._returned[device].append(job_id)

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
        self._memory.append((now_ns, "issue", step, figures, None))

    def take_returned(self, device: int) -> tuple[int, ...]:
        """Whose memory has come back since the last plan of a device."""
        return tuple(self._returned.pop(device, ()))

    def ran(self, run: Run) -> None:
        """Steps were issued at once."""
        self._runs.append(run)

    def run_settled(self, run: Run) -> None:
        """The steps of a run that settle together have ended: their tokens share one list."""
        self.delivered(run.launch.pieces, run.end_ns[: run.settled])

    def scheduled(self, job_id: int, now_ns: int) -> None:
        """The first slice of a request was issued."""
        outcome = self.outcomes[job_id]
        if outcome.scheduled_ns is None:
            outcome.scheduled_ns = now_ns

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
        readings = self._meter.read() if self._meter else None
        self._memory.append((span.end_ns, "settle", step, figures, readings))

    def delivered(self, pieces: Sequence[Piece], at: int | Times) -> None:
        """Output tokens of a launch reached their clients; of a run, all in one list."""
        outcomes = self.outcomes
        assert isinstance(pieces, Pieces) or not pieces, "the engine launches pieces by column"
        if isinstance(pieces, Pieces):
            for job_id in compress(pieces.job_ids, pieces.samples):
                outcomes[job_id].token_runs.append(at)

    def ended(self, job_id: int, now_ns: int, status: str) -> None:
        """A request left, `finished` or `refused`."""
        outcome = self.outcomes[job_id]
        outcome.finish_ns, outcome.status = now_ns, status

    def _count_swap(self, op: Copy) -> None:
        if op.src.region.kind is Kind.KV and op.src.region.owner in self.outcomes:
            self.outcomes[op.src.region.owner].swaps += 1

    def _memory_rows(self) -> list[tuple[Any, ...]]:
        """By time; at one moment what settles comes before what is issued, then by step."""
        rows = list(chain(self._memory, *(run.memory_rows() for run in self._runs)))
        rows.sort(key=lambda row: (row[0], row[1] == "issue", row[2]))
        return [memory_row(row, figures) for row in rows for figures in row[3]]

    # ---- tables
    def tables(self, outputs: Callable[[int], Sequence[int]] | None = None) -> dict[str, pa.Table]:
        """All rows, in a fixed order. `outputs` gives the generated ids of a request."""
        rows = {
            "requests": [_request_row(o, outputs) for _, o in sorted(self.outcomes.items())],
            "steps": [step_row(*row) for row in self.steps],
            "memory": self._memory_rows(),
            "plans": [(s, d, at, list(back), encode(p)) for s, d, at, back, p in self.plans],
        }
        return {name: table_of(name, rows[name]) for name in TABLES}

    def write(self, folder: Path, outputs: Callable[[int], Sequence[int]] | None = None) -> None:
        """Writes the tables into a folder, each aside and renamed."""
        for name, table in self.tables(outputs).items():
            aside = folder / f".{name}.parquet.tmp"
            pq.write_table(table, aside, compression="zstd")
            aside.rename(folder / f"{name}.parquet")


def read_plans(path: Path) -> tuple[LoggedPlan, ...]:
    """The plan log of a run folder's plans.parquet."""
    rows = pq.read_table(path, columns=["device", "returned", "body"]).to_pylist()
    return tuple(LoggedPlan(row["device"], tuple(row["returned"]), row["body"]) for row in rows)


_KIND_COLUMNS = [Kind.KV, Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER, Kind.ACTIVATION]
assert list(Kind) == _KIND_COLUMNS, "the columns of MEMORY follow the order of Kind"


def table_of(name: str, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows in the order of a schema's columns, as one of the tables of engine/record.py."""
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


def _request_row(
    outcome: Outcome, outputs: Callable[[int], Sequence[int]] | None
) -> tuple[Any, ...]:
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
    decodes = sum(1 for p in pieces if p.tokens == 1 and p.context_tokens)
    jobs = [p.job_id for p in pieces]
    if isinstance(span.op, Copy):
        jobs = [span.op.src.region.owner]
    return (
        step,
        device,
        lane,
        issue_ns,
        span.start_ns,
        span.end_ns,
        host_ns,
        sum(p.tokens for p in pieces) - decodes,
        decodes,
        sum(1 for p in pieces if p.samples),
        launch.nbytes,
        span.peak_bytes,
        jobs,
        [p.tokens for p in pieces],
        [p.context_tokens for p in pieces],
    )
