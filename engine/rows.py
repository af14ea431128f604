"""The rows of the tables of engine/record.py, from facts as the recorder keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from engine.executor import Launch, Reading, Span
from engine.figures import Figures
from engine.outcome import Outcome
from engine.plan import Collective, Copy, Kind, Op, Plan, Pool
from engine.record import SCHEMA_VERSION, TABLES

PlanRow = tuple[int, int, int, tuple[int, ...], Plan]
StepRow = tuple[int, int, int, Span, Launch]
TrainedRow = tuple[int, int, int, int, range, int]  # job, step, start, end, microbatches, tokens
MemoryRow = tuple[int, str, int, Sequence[Figures], Mapping[Pool, Reading] | None]


_KIND_COLUMNS = [Kind.KV, Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER]
_KIND_COLUMNS += [Kind.ACTIVATION, Kind.BUFFER]
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
    """Those of the slices, or the owner of what is moved."""
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
    words = {"serve" if s.job.training is None else s.work.value for s in op.slices}
    if len(words) != 1:
        return "mixed"
    return "again" if op.again else words.pop()


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
        loss = sum(loss_of(job_id, k) for k in microbatches) / len(microbatches)
    return job_id, step, start_ns, end_ns, tokens, loss
