"""Facts of a run as the tables of engine/results/schema.py.

`step_row`, `memory_row` and `training_row` define a row. Launches that serve, and steps that were
issued as one, are far more than all other facts: their rows are made in numpy, by columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.contract.executor import Launch, Pieces, Reading, ServedLaunches, Span
from engine.contract.plan import Collective, Compute, Copy, Op, Plan
from engine.contract.regions import Kind, Pool
from engine.results.plan_log import PlanTexts
from engine.results.schema import (
    ADAPTER_BYTES,
    TABLES,
    Figures,
    Ints,
    column,
    compact,
    lists,
    marked,
    numbers,
    rows_at,
    shared_texts,
    starts_of,
    texts,
    values_of,
)

Times: TypeAlias = "array[int]"  # of int64: one object, whatever its length

PlanRow = tuple[int, int, int, tuple[int, ...], Plan]
StepRow = tuple[int, int, int, Span, Launch]
TrainedRow = tuple[int, int, int, int, range, int]  # job, step, start, end, microbatches, tokens
MemoryRow = tuple[int, str, int, Sequence[Figures], Mapping[Pool, Reading] | None]

Predict = Callable[[Launch], int | None]
PredictServed = Callable[[ServedLaunches], Ints | None]
Outputs = Callable[[int], Sequence[int]]
LossOf = Callable[[int, int], float]
ROW_ORDER = ("settle", "return", "issue")  # of MEMORY at one moment

_KIND_COLUMNS = [kind for kind in Kind if kind is not Kind.ADAPTER]  # in the order of MEMORY
ADAPTERS = [*Kind].index(Kind.ADAPTER)
assert len(_KIND_COLUMNS) == ADAPTERS, "adapters are the last kind: a column by itself"


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
    returned: dict[int, tuple[int, ...]]  # by step, the jobs whose memory came back before it
    issue_ns: Times
    start_ns: Times
    end_ns: Times
    settled: int  # steps that have no rows of their own; the others settle by themselves
    figures: tuple[Figures, ...]  # before the first step
    grown: Times  # KV pages taken up to and with each step, less those that came back
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
    return table_of_columns(name, [list(column) for column in columns])


def table_of_columns(name: str, columns: Iterable[Any]) -> pa.Table:
    """Columns in the order of a schema: arrays of Arrow or of numpy, or values, None where null."""
    arrays = [
        found
        if isinstance(found, pa.Array)
        else numbers(found, field.type)
        if isinstance(found, np.ndarray)
        else column(found, field.type)
        for found, field in zip(columns, TABLES[name], strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=marked(TABLES[name]))


def memory_row(row: MemoryRow, figures: Figures) -> tuple[Any, ...]:
    """A row of MEMORY."""
    at_ns, cause, step, _, readings = row
    (tier, device), *counts = figures[:4]
    reading = readings.get(figures.pool) if readings else None
    measured = (reading.persistent_bytes, reading.process_bytes) if reading else (None, None)
    kinds = (*figures.kind_bytes[: len(_KIND_COLUMNS)], figures.kv_pages)
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


def _within(counts: Ints) -> Ints:
    """0, 1, 2, ... within each of consecutive groups."""
    return np.arange(counts.sum()) - np.repeat(starts_of(counts)[:-1], counts)


def _named(names: Sequence[str], chosen: Ints) -> pa.Array:
    """Names by their numbers."""
    return shared_texts(names, chosen).dictionary_decode()


# A table's rows are ordered by these columns; where they are equal, as the facts were told.
ORDER = {"steps": ("end_ns", "step"), "memory": ("at_ns", "cause", "step"), "plans": ("step",)}


def in_order(name: str, table: pa.Table) -> pa.Table:
    """The rows of a table by ORDER."""
    order = np.lexsort([_key(table[column]) for column in reversed(ORDER[name])])
    return table if (order[1:] > order[:-1]).all() else rows_at(table, order)


def _key(column: pa.ChunkedArray) -> Ints:
    """Numbers by which a column orders rows; causes by their order at one moment."""
    if column.type != pa.string():
        return values_of(column)[0]
    parts = pc.dictionary_encode(column).chunks
    ranks = [_ints([CAUSES[name] for name in part.dictionary.to_pylist()]) for part in parts]
    chosen = [values_of(pa.chunked_array([part.indices]))[0] for part in parts]
    return np.concatenate([_ints(()), *(r[c] for r, c in zip(ranks, chosen, strict=True))])


class Facts(NamedTuple):
    """Facts of plans and operations, in the order in which they were told."""

    plans: list[PlanRow]
    steps: list[StepRow]
    memory: list[MemoryRow]
    runs: list[ManySteps]

    def tables(
        self, predict: Predict | None, served: PredictServed | None, has_adapters: bool = False
    ) -> dict[str, pa.Table]:
        """Their tables, see `steps_table`; `has_adapters`: memory tells bytes of adapters."""
        return {
            "steps": steps_table(self.steps, self.runs, predict, served),
            "memory": memory_table(self.memory, self.runs, has_adapters),
            "plans": plans_table(self.plans, self.runs),
        }


JOBS, TOKENS = (TABLES["steps"].field(name).type for name in ("jobs", "tokens"))
RETURNED = TABLES["plans"].field("returned").type


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
    told = np.argsort(np.concatenate([_ints(others), found.place]))
    return in_order("steps", rows_at(table, told) if others else table)


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
    starts = starts_of(row_sizes)
    at = np.repeat(starts_of(sizes)[:-1][rows], row_sizes) + _within(row_sizes)
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
        _named([SERVE], np.zeros(num_rows, np.int64)),
        pa.nulls(num_rows, pa.int32()),
        total - decodes,
        decodes,
        samples,
        np.zeros(num_rows, np.int64),
        _peaks(found, ServedLaunches(tokens, contexts, starts, samples), predict, predict_served),
        lists(starts, _ints(chain.from_iterable([p.job_ids for p in pieces]))[at], JOBS),
        lists(starts, tokens, TOKENS),
        lists(starts, contexts, TOKENS),
    ]
    return table_of_columns("steps", columns)


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
        return numbers(guesses, pa.int64())
    if predict is not None:
        for i in [i for i, nbytes in enumerate(measured) if nbytes is None]:
            measured[i] = predict(found.launches(i))
    return column(measured, pa.int64())


CAUSES = {cause: number for number, cause in enumerate(ROW_ORDER)}


def memory_table(rows: Sequence[MemoryRow], runs: Sequence[ManySteps], adapted: bool) -> pa.Table:
    """MEMORY by time; at one moment settle, return and issue rows in this order, then by step."""
    alone = table_of("memory", [memory_row(row, figures) for row in rows for figures in row[3]])
    if adapted:
        nbytes = _ints([figures.kind_bytes[ADAPTERS] for row in rows for figures in row[3]])
        alone = _with_adapters(alone, nbytes)
    if not runs:
        return in_order("memory", alone)
    return in_order("memory", pa.concat_tables([alone, _grown(runs, adapted)]))


def _with_adapters(table: pa.Table, nbytes: Ints) -> pa.Table:
    return table.append_column(ADAPTER_BYTES, numbers(nbytes, ADAPTER_BYTES.type))


def _grown(runs: Sequence[ManySteps], adapted: bool) -> pa.Table:
    """Rows of runs; `adapted`: they end with the bytes of adapters, which no run changes.

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
    at = np.repeat(np.repeat(starts_of(pools)[:-1], events), row_pools) + _within(row_pools)
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
    found = table_of_columns("memory", columns)
    if not adapted:
        return found
    return _with_adapters(found, column([f.kind_bytes[ADAPTERS] for f in figures]))


def plans_table(rows: Sequence[PlanRow], runs: Sequence[ManySteps]) -> pa.Table:
    """PLANS in the order of their steps."""
    plans, bodies = PlanTexts(), dict[str, int]()
    alone = [plans.plan(row[-1]) for row in rows]
    counts = _ints([len(run.issue_ns) for run in runs])
    step = np.repeat(_ints([run.step for run in runs]), counts) + _within(counts)
    step = np.concatenate([_ints([row[0] for row in rows]), step])
    device = np.repeat(_ints([run.device for run in runs]), counts)
    device = np.concatenate([_ints([row[1] for row in rows]), device])
    at_ns = np.concatenate([_ints([row[2] for row in rows]), _joined([r.issue_ns for r in runs])])
    back = np.zeros(len(step), np.int64)  # jobs in each list
    back[: len(rows)] = _ints([len(row[3]) for row in rows])
    firsts = (len(rows) + starts_of(counts)[:-1]).tolist()
    of_runs = [
        (at + i, ids)
        for at, run in zip(firsts, runs, strict=True)
        for i, ids in run.returned.items()
    ]
    back[[at for at, _ in of_runs]] = [len(ids) for _, ids in of_runs]
    returned = _ints(chain(*[row[3] for row in rows], *[ids for _, ids in of_runs]))
    grows = [plans.grows(taken) for run in runs for taken in run.grows()]
    launches = [plans.launch(part.op) for run in runs for part in run.segments]
    chosen = [bodies.setdefault(text, len(bodies)) for text in launches]
    steps = _ints([part.steps for run in runs for part in run.segments])
    own = [bodies.setdefault(body, len(bodies)) for _, body in alone]
    columns = [
        step,
        device,
        at_ns,
        lists(starts_of(back), returned, RETURNED),
        texts([*(text for text, _ in alone), *grows]),
        shared_texts([*bodies], np.concatenate([_ints(own), np.repeat(_ints(chosen), steps)])),
    ]
    return compact(in_order("plans", table_of_columns("plans", columns)))
