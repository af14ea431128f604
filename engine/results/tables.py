"""Facts of a run as the tables of engine/results/schema.py.

`step_row`, `memory_row` and `training_row` define a row of their tables. Launches that serve, and
steps that were issued as one, are far more than all other facts: their rows are made column by
column in numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.contract.executor import Launch, Pieces, Reading, ServedLaunches, Span
from engine.contract.plan import Collective, Compute, Copy, Op, Plan
from engine.contract.regions import Kind, Pool
from engine.results.plan_log import PlanTexts
from engine.results.schema import SCHEMA_VERSION, TABLES, Figures
from traces.serving.request import Request

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length
Ints: TypeAlias = npt.NDArray[np.int64]

PlanRow = tuple[int, int, int, tuple[int, ...], Plan]
StepRow = tuple[int, int, int, Span, Launch]
TrainedRow = tuple[int, int, int, int, range, int]  # job, step, start, end, microbatches, tokens
MemoryRow = tuple[int, str, int, Sequence[Figures], Mapping[Pool, Reading] | None]

Predict = Callable[[Launch], int | None]
PredictServed = Callable[[ServedLaunches], Ints | None]
Outputs = Callable[[int], Sequence[int]]
LossOf = Callable[[int, int], float]
ROW_ORDER = ("settle", "return", "issue")  # of MEMORY at one moment

_KIND_COLUMNS = [Kind.KV, Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER]
_KIND_COLUMNS += [Kind.ACTIVATION, Kind.BUFFER]
assert list(Kind) == _KIND_COLUMNS, "the columns of MEMORY follow the order of Kind"


class Delivered(Protocol):
    """Tokens that a request got without a gap."""

    @property
    def times(self) -> Times:
        """When each was delivered, in ns."""


class RequestFacts(Protocol):
    """What happened to one request."""

    request: Request
    arrival_ns: int
    device: int | None
    scheduled_ns: int | None
    finish_ns: int | None
    restarts: int
    swaps: int
    cached_tokens: int
    status: str

    @property
    def stretches(self) -> Sequence[Delivered]:
        """Its tokens, in the order of delivery."""


class EqualSteps(Protocol):
    """Steps of a run with equal slices, whose contexts grow by the tokens of each step."""

    first: int  # step of the run
    steps: int
    op: Compute
    pieces: Pieces  # of the first step
    host_ns: int  # of each step


class ManySteps(Protocol):
    """Steps of one launch that were issued as one, and become rows when tables are written.

    The row methods are the definition; the tables are made from the columns.
    """

    device: int
    step: int  # of the first one
    pool: Pool  # that grows
    returned: tuple[int, ...]  # jobs whose memory came back before the first step
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    settled: int  # steps that have no rows of their own; the others settle by themselves
    figures: tuple[Figures, ...]  # before the first step
    grown: Times  # KV pages taken up to and with each step
    page_nbytes: int

    @property
    def segments(self) -> Sequence[EqualSteps]:
        """All steps, in order."""

    def settled_pages(self) -> Times:
        """As `grown`, where each step settles: by then later steps are issued."""

    def tokens(self, until: int) -> list[tuple[tuple[int, ...], Times]]:
        """Requests that got tokens in the steps up to this one that are not told, and when."""

    def launch_at(self, step: int) -> Launch:
        """The launch of a step."""

    def grows(self) -> Iterator[Sequence[Any]]:
        """The growth of each step, in the order of booking: places and bytes."""

    def plan_rows(self) -> Iterator[PlanRow]:
        """Rows of `plans`."""

    def step_rows(self) -> Iterator[StepRow]:
        """Rows of `steps`."""

    def memory_rows(self) -> Iterator[MemoryRow]:
        """Rows of `memory`."""


# ---- rows
def table_of(name: str, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Rows in the order of a schema's columns, as one of the tables of engine/results/schema.py."""
    schema = TABLES[name]
    columns = zip(*rows, strict=True) if rows else ([] for _ in schema)
    return _table(name, [list(column) for column in columns])


def _table(name: str, columns: Iterable[Any]) -> pa.Table:
    """Columns in the order of a schema, as arrays of Arrow or what they are made of."""
    schema = TABLES[name].with_metadata({"schema_version": str(SCHEMA_VERSION)})
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def memory_row(row: MemoryRow, figures: Figures) -> tuple[Any, ...]:
    """A row of MEMORY."""
    at_ns, cause, step, _, readings = row
    (tier, device), *counts = figures[:4]
    reading = readings.get(figures.pool) if readings else None
    measured = (reading.persistent_bytes, reading.process_bytes) if reading else (None, None)
    kinds = (*figures.kind_bytes, figures.kv_pages)
    return (at_ns, cause, step, tier.value, device, *counts, *kinds, *measured)


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


SERVE = "serve"


def _work_of(op: Op) -> str | None:
    """What a launch does, in one word; nothing for a copy."""
    if isinstance(op, Copy):
        return None
    if isinstance(op, Collective):
        return op.pattern.value
    kinds = {SERVE if s.job.training is None else s.work.value for s in op.slices}
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


def training_row(row: TrainedRow, loss_of: LossOf | None) -> tuple[Any, ...]:
    """A row of TRAINING; `loss_of` gives that of a job's microbatch."""
    job_id, step, start_ns, end_ns, microbatches, tokens = row
    loss = None
    if loss_of is not None:
        loss = sum([loss_of(job_id, k) for k in microbatches]) / len(microbatches)
    return job_id, step, start_ns, end_ns, tokens, loss


# ---- columns
def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _joined(parts: Iterable[Times]) -> Ints:
    """Times of all parts, one behind the other."""
    found = array("q")
    for part in parts:
        found.extend(part)
    return np.frombuffer(found, np.int64) if found else np.empty(0, np.int64)


def _starts(counts: Ints) -> Ints:
    """Where each of consecutive groups begins, and behind them the end of all."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _within(counts: Ints) -> Ints:
    """0, 1, 2, ... within each of consecutive groups."""
    return np.arange(counts.sum()) - np.repeat(_starts(counts)[:-1], counts)


def _lists(starts: Ints, values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values, kind.value_type))


def _named(names: Sequence[str], numbers: Ints) -> pa.Array:
    """Names by their numbers."""
    return pa.array(names, pa.string()).take(pa.array(numbers))


def _sorted(table: pa.Table, *keys: Ints) -> pa.Table:
    """Rows by the last key, then by those before it; rows of equal keys keep their order."""
    order = np.lexsort(keys)
    return table if (order[1:] > order[:-1]).all() else table.take(pa.array(order))


def requests_table(outcomes: Sequence[RequestFacts], outputs: Outputs | None) -> pa.Table:
    """REQUESTS; `outputs` gives the generated ids of a request."""
    times = [_joined([s.times for s in outcome.stretches]) for outcome in outcomes]
    counts = _ints(map(len, times))
    requests = [outcome.request for outcome in outcomes]
    ids = [None if outputs is None else list(outputs(r.request_id)) for r in requests]
    columns: list[Any] = [
        [request.request_id for request in requests],
        [request.session for request in requests],
        [request.turn for request in requests],
        [request.slo for request in requests],
        [outcome.device for outcome in outcomes],
        [request.prompt_tokens for request in requests],
        counts,
        [outcome.arrival_ns for outcome in outcomes],
        [outcome.scheduled_ns for outcome in outcomes],
        [int(own[0]) if len(own) else None for own in times],
        [outcome.finish_ns for outcome in outcomes],
        [outcome.restarts for outcome in outcomes],
        [outcome.swaps for outcome in outcomes],
        [outcome.cached_tokens for outcome in outcomes],
        [outcome.status for outcome in outcomes],
        _lists(_starts(counts), np.concatenate([*times, np.empty(0, np.int64)]), TOKEN_TIMES),
        ids,
    ]
    return _table("requests", columns)


TOKEN_TIMES = TABLES["requests"].field("token_ns").type
JOBS, TOKENS = (TABLES["steps"].field(name).type for name in ("jobs", "tokens"))


class _Launches(NamedTuple):
    """Launches that serve, in groups of equal slices: a column each, of rows and of groups."""

    step: Ints
    issue_ns: Ints
    start_ns: Ints
    end_ns: Ints
    host_ns: Ints
    place: Ints  # of the row among all rows in the order of the facts
    peak_bytes: list[int | None]  # of the first rows, as measured; the others have none
    launches: Callable[[int], Launch]  # of a row
    pieces: Sequence[Pieces]  # of each group, at its first step
    lanes: Sequence[tuple[int, str]]  # of each group
    counts: Ints  # steps of each group


def steps_table(
    rows: Sequence[StepRow],
    runs: Sequence[ManySteps],
    predict: Predict | None = None,
    predict_served: PredictServed | None = None,
) -> pa.Table:
    """STEPS, by end and step.

    Args:
        rows: operations that were issued alone.
        runs: steps that were issued as one.
        predict: workspace of a launch in bytes, where its span has none.
        predict_served: the same of many launches that serve.
    """
    served = [i for i, row in enumerate(rows) if _serves(row[-1])]
    alone = {*served}
    others = [i for i in range(len(rows)) if i not in alone]
    found = _launches(rows, served, runs)
    table = pa.concat_tables(
        [
            table_of("steps", [step_row(*predicted(rows[i], predict)) for i in others]),
            _served(found, predict, predict_served),
        ]
    )
    place = np.concatenate([_ints(others), found.place])
    step, end_ns = (table[name].to_numpy() for name in ("step", "end_ns"))
    return _sorted(table, place, step, end_ns)


def predicted(row: StepRow, predict: Predict | None) -> StepRow:
    """The row, with the predicted workspace where its span has none."""
    step, issue_ns, host_ns, span, launch = row
    if span.peak_bytes is not None or predict is None:
        return row
    return step, issue_ns, host_ns, span._replace(peak_bytes=predict(launch)), launch


def _serves(launch: Launch) -> bool:
    op = launch.op
    return (
        isinstance(op, Compute)
        and isinstance(launch.pieces, Pieces)
        and not op.again
        and all([piece.job.training is None for piece in op.slices])
    )


def _launches(
    rows: Sequence[StepRow], served: Sequence[int], runs: Sequence[ManySteps]
) -> _Launches:
    own = [rows[i] for i in served]
    pieces = [row[-1].pieces for row in own]
    lanes, counts = [row[3].op.lane for row in own], [1] * len(own)
    hosts = [row[2] for row in own]
    for run in runs:
        for part in run.segments:
            if (count := min(part.steps, run.settled - part.first)) > 0:
                pieces.append(part.pieces)
                lanes.append(part.op.lane)
                counts.append(count)
                hosts.append(part.host_ns)
    settled = _ints([run.settled for run in runs])
    spans = [row[3] for row in own]
    each = np.repeat(np.arange(len(runs)), settled)
    within = _within(settled)

    def launch(row: int) -> Launch:
        if row < len(own):
            return own[row][-1]
        row -= len(own)
        found: Launch = runs[each[row]].launch_at(int(within[row]))
        return found

    def column(alone: Iterable[int], of_runs: Ints) -> Ints:
        return np.concatenate([_ints(alone), of_runs])

    return _Launches(
        column([row[0] for row in own], np.repeat(_ints([r.step for r in runs]), settled) + within),
        column([row[1] for row in own], _joined([r.issue_ns[: r.settled] for r in runs])),
        column([span.start_ns for span in spans], _joined([r.start_ns[: r.settled] for r in runs])),
        column([span.end_ns for span in spans], _joined([r.end_ns[: r.settled] for r in runs])),
        np.repeat(_ints(hosts), counts),
        column(served, len(rows) + np.arange(settled.sum())),
        [span.peak_bytes for span in spans],
        launch,
        pieces,  # type: ignore[arg-type]  # _serves has looked
        lanes,
        _ints(counts),
    )


def _served(
    found: _Launches, predict: Predict | None, predict_served: PredictServed | None
) -> pa.Table:
    """Rows of launches that serve."""
    counts, pieces = found.counts, found.pieces
    if not len(counts):
        return table_of("steps", [])
    sizes = _ints(map(len, pieces))  # slices of each group
    rows = np.repeat(np.arange(len(counts)), counts)  # the group of each row
    row_sizes, behind = sizes[rows], _within(counts)
    starts = _starts(row_sizes)
    at = np.repeat(_starts(sizes)[:-1][rows], row_sizes) + _within(row_sizes)
    tokens = _ints(chain.from_iterable([p.tokens for p in pieces]))[at]
    contexts = _ints(chain.from_iterable([p.contexts for p in pieces]))[at]
    contexts += tokens * np.repeat(behind, row_sizes)
    samples = _ints([sum(p.samples) for p in pieces])[rows]
    begins = starts[:-1]
    decodes = np.add.reduceat((tokens == 1) & (contexts > 0), begins, dtype=np.int64)
    total = np.add.reduceat(tokens, begins)
    lanes = [*dict.fromkeys(found.lanes)]
    number = {lane: i for i, lane in enumerate(lanes)}
    lane_of = _ints([number[lane] for lane in found.lanes])[rows]
    num_rows = len(rows)
    columns: list[Any] = [
        found.step,
        _ints([device for device, _ in lanes])[lane_of],
        _named([name for _, name in lanes], lane_of),
        found.issue_ns,
        found.start_ns,
        found.end_ns,
        found.host_ns,
        pa.repeat(SERVE, num_rows),
        pa.nulls(num_rows, pa.int32()),
        total - decodes,
        decodes,
        samples,
        np.zeros(num_rows, np.int64),
        _peaks(found, ServedLaunches(tokens, contexts, starts, samples), predict, predict_served),
        _lists(starts, _ints(chain.from_iterable([p.job_ids for p in pieces]))[at], JOBS),
        _lists(starts, tokens, TOKENS),
        _lists(starts, contexts, TOKENS),
    ]
    return _table("steps", columns)


def _peaks(
    found: _Launches,
    shapes: ServedLaunches,
    predict: Predict | None,
    predict_served: PredictServed | None,
) -> pa.Array:
    """Workspace of each row: measured, else predicted; null where neither."""
    alone, count = found.peak_bytes, len(found.step)
    measured = [*alone, *([None] * (count - len(alone)))]
    guesses = predict_served(shapes) if predict_served and None in measured else None
    if guesses is not None:
        known = [(i, nbytes) for i, nbytes in enumerate(alone) if nbytes is not None]
        if known:
            rows, values = zip(*known, strict=True)
            guesses[list(rows)] = values
        return pa.array(guesses, pa.int64())
    if predict is not None:
        for i in [i for i, nbytes in enumerate(measured) if nbytes is None]:
            measured[i] = predict(found.launches(i))
    return pa.array(measured, pa.int64())


CAUSES = {cause: number for number, cause in enumerate(ROW_ORDER)}


def memory_table(rows: Sequence[MemoryRow], runs: Sequence[ManySteps]) -> pa.Table:
    """MEMORY by time; at one moment settle, return and issue rows in this order, then by step."""
    alone = table_of("memory", [memory_row(row, figures) for row in rows for figures in row[3]])
    pools = _ints([len(row[3]) for row in rows])
    cause = np.repeat(_ints([CAUSES[row[1]] for row in rows]), pools)
    table = alone
    if runs:
        grown, of_runs = _grown(runs)
        table, cause = pa.concat_tables([alone, grown]), np.concatenate([cause, of_runs])
    at_ns, step = (table[name].to_numpy() for name in ("at_ns", "step"))
    return _sorted(table, step, cause, at_ns)


def _grown(runs: Sequence[ManySteps]) -> tuple[pa.Table, Ints]:
    """Rows of runs, and the number of the cause of each.

    There is a row at each issue, and at each settle after all that was issued before it.
    """
    issues, settles = _ints([len(r.issue_ns) for r in runs]), _ints([r.settled for r in runs])
    events = issues + settles
    is_issue = _within(events) < np.repeat(issues, events)
    at_ns = _joined(chain.from_iterable([(r.issue_ns, r.end_ns[: r.settled]) for r in runs]))
    pages = _joined(chain.from_iterable([(r.grown, r.settled_pages()) for r in runs]))
    step = np.repeat(_ints([r.step for r in runs]), events) + _within(events)
    step -= np.where(is_issue, 0, np.repeat(issues, events))

    figures = [f for r in runs for f in r.figures]
    pools = _ints([len(r.figures) for r in runs])
    row_pools = np.repeat(pools, events)  # of each event
    event = np.repeat(np.arange(len(at_ns)), row_pools)
    at = np.repeat(np.repeat(_starts(pools)[:-1], events), row_pools) + _within(row_pools)
    is_grown = _ints([f.pool == r.pool for r in runs for f in r.figures])
    page_nbytes = np.repeat(_ints([r.page_nbytes for r in runs]), pools)
    taken = pages[event] * is_grown[at]
    nbytes = taken * page_nbytes[at]
    cause = np.where(is_issue, CAUSES["issue"], CAUSES["settle"])[event]

    def column(values: Iterable[int]) -> Ints:
        found: Ints = _ints(values)[at]
        return found

    tiers = [*dict.fromkeys(f.pool[0].value for f in figures)]
    kinds = [column([f.kind_bytes[i] for f in figures]) for i in range(len(_KIND_COLUMNS))]
    unknown = pa.nulls(len(at), pa.int64())
    columns: list[Any] = [
        at_ns[event],
        _named(ROW_ORDER, cause),
        step[event],
        _named(tiers, column([tiers.index(f.pool[0].value) for f in figures])),
        column([f.pool[1] for f in figures]),
        column([f.capacity_bytes for f in figures]),
        column([f.free_bytes for f in figures]) - nbytes,
        column([f.coming_bytes for f in figures]),
        kinds[0] + nbytes,
        *kinds[1:],
        column([f.kv_pages for f in figures]) + taken,
        unknown,
        unknown,
    ]
    return _table("memory", columns), cause


def plans_table(rows: Sequence[PlanRow], runs: Sequence[ManySteps]) -> pa.Table:
    """PLANS in the order of their steps."""
    texts = PlanTexts()
    step, device, at_ns, returned, body = (list[Any]() for _ in range(5))
    for number, own_device, own_ns, back, plan in rows:
        step.append(number)
        device.append(own_device)
        at_ns.append(own_ns)
        returned.append(list(back))
        body.append(texts.plan(plan))
    for run in runs:
        count = len(run.issue_ns)
        step += range(run.step, run.step + count)
        device += [run.device] * count
        at_ns += run.issue_ns
        returned += [list(run.returned), *([[]] * (count - 1))]
    grows = chain.from_iterable([run.grows() for run in runs])
    parts = chain.from_iterable([run.segments for run in runs])
    body += texts.steps(grows, chain.from_iterable([[part.op] * part.steps for part in parts]))
    columns = [step, device, at_ns, returned, body]
    order = sorted(range(len(step)), key=step.__getitem__)  # Arrow takes no texts beyond 2 GiB
    return _table("plans", [[column[i] for i in order] for column in columns])
