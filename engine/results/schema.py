"""The schema of all results, one for every backend; how its tables are written and read back.

Tables are written in groups of rows, while a run goes on or at its end: the file is equal to the
byte either way. Columns are made from numpy and read as numpy here without pandas, which pyarrow
imports for its own conversions and which takes longer to load than a small run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.contract.regions import Pool
from traces.files import checked_bytes, checked_text, naming, replacing, seal

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


class Figures(NamedTuple):
    """What the ledger predicts of a pool, in the order of the columns of MEMORY.

    Coming bytes are freed and still used by an operation; free bytes are neither held nor used. A
    View may show fewer free bytes, because bytes come back in the order of issue.
    """

    pool: Pool
    capacity_bytes: int
    free_bytes: int
    coming_bytes: int
    kind_bytes: tuple[int, ...]  # in the order of Kind, KV first
    kv_pages: int

    def less(self, nbytes: int, pages: int) -> Figures:
        """The figures before these bytes of KV were taken."""
        kv, *others = self.kind_bytes
        return self._replace(
            free_bytes=self.free_bytes + nbytes,
            kind_bytes=(kv - nbytes, *others),
            kv_pages=self.kv_pages - pages,
        )


SCHEMA_VERSION = 5  # 5: plans name their growth beside their body

I64, I32, TEXT, F64 = pa.int64(), pa.int32(), pa.string(), pa.float64()
NUMPY = {I64: np.int64, I32: np.int32, F64: np.float64}
TEXTS = pa.dictionary(I32, TEXT)  # each text is written once for all rows of a group that hold it

# One row per request. Times are on the run's clock; null where it did not happen.
REQUESTS = pa.schema(
    [
        ("request_id", I64),
        ("session", I64),
        ("turn", I32),
        ("slo", TEXT),
        ("device", I32),  # the replica it was routed to; null where there is no router
        ("prompt_tokens", I32),
        ("output_tokens", I32),  # delivered
        ("arrival_ns", I64),
        ("scheduled_ns", I64),  # first issue of a slice
        ("first_token_ns", I64),
        ("finish_ns", I64),
        ("restarts", I32),
        ("swaps", I32),  # times its KV was copied out
        ("cached_tokens", I32),  # found computed at its starts (prefix caching), restarts included
        ("status", TEXT),  # finished, refused, unfinished
        ("token_ns", pa.list_(I64)),  # when each output token was delivered
        ("output_ids", pa.list_(I32)),  # null in a simulation
    ]
)

# One row per operation, by end and step. A step is a plan.
STEPS = pa.schema(
    [
        ("step", I64),  # number of the plan
        ("device", I32),
        ("lane", TEXT),  # compute, compute_2, cpu, net, gpu->host, ...
        ("issue_ns", I64),
        ("start_ns", I64),
        ("end_ns", I64),
        ("host_ns", I64),  # host time of the whole plan, on its first operation; else 0
        ("work", TEXT),  # serve, forward, again, backward, update, mixed; or the collective
        ("part", I32),  # of training: the first unit, or the chunk that is updated or exchanged
        ("prefill_tokens", I32),
        ("decode_tokens", I32),
        ("samples", I32),  # rows of the head
        ("nbytes", I64),  # of a copy or a collective
        ("peak_bytes", I64),  # workspace; null where neither measured nor predicted
        ("jobs", pa.list_(I64)),  # of the slices (or the owner of what is copied or exchanged)
        ("tokens", pa.list_(I32)),  # per slice
        ("contexts", pa.list_(I32)),  # per slice: tokens in KV before it
    ]
)

# One row per pool and settle, one after each booking ("issue"), and one where finished jobs' memory
# comes back and no plan follows ("return"); by time, in the order settle, return, issue, then step.
# With replicas only the pools of the plan's own; all of them after the first booking.
MEMORY = pa.schema(
    [
        ("at_ns", I64),
        ("cause", TEXT),  # settle, return or issue
        ("step", I64),  # for a return the newest plan
        ("tier", TEXT),
        ("device", I32),
        ("capacity_bytes", I64),
        ("free_bytes", I64),
        ("coming_bytes", I64),
        ("kv_bytes", I64),
        ("weight_bytes", I64),
        ("gradient_bytes", I64),
        ("optimizer_bytes", I64),
        ("activation_bytes", I64),
        ("buffer_bytes", I64),
        ("kv_pages", I64),
        ("measured_bytes", I64),  # persistent, by the meter; null in a simulation
        ("process_bytes", I64),  # by the operating system; null where unknown
    ]
)

# One row per plan, in issue order: enough to play it back. Plans that follow each other are often
# alike but for what grows before their first other operation; they share a body.
PLANS = pa.schema(
    [
        ("step", I64),
        ("device", I32),
        ("at_ns", I64),
        ("returned", pa.list_(I64)),  # jobs whose memory came back since its device's plan before
        ("grows", TEXT),  # JSON list: the growth that a plan begins with
        ("body", TEXTS),  # JSON: all behind it, see engine/results/plan_log.py
    ]
)

# One row per complete step of a training job, by its end.
TRAINING = pa.schema(
    [
        ("job_id", I64),
        ("step", I64),  # of the job
        ("start_ns", I64),  # first issue of a launch of it
        ("end_ns", I64),
        ("tokens", I64),  # of all devices of its group
        ("loss", F64),  # mean over its microbatches; null in a simulation
    ]
)

# One row per sample that a finetuning job has begun, by job and sample. Kept where jobs finetune.
SAMPLES = pa.schema(
    [
        ("job_id", I64),
        ("sample", I64),  # its microbatch, counted through the job
        ("tokens", I32),
        ("forward_tokens", I32),  # that have gone forward through all units
        ("start_ns", I64),  # of its first launch
        ("last_ns", I64),  # end of its last launch
        ("status", TEXT),  # finished, unfinished
        ("restarts", I32),  # times it gave its memory back and began anew
        ("loss", F64),  # null in a simulation, and of an unfinished one
    ]
)

# One row per tenant and device: what its jobs were charged. Kept where a scheduling goes by it.
SERVICE = pa.schema(
    [
        ("device", I32),
        ("tenant", TEXT),
        ("prefill_tokens", I64),  # computed, restarts included
        ("decode_tokens", I64),
        ("forward_tokens", F64),  # of training, through all units
        ("backward_tokens", F64),  # of training, through all units that gradients pass
        ("charged", F64),  # the weighted sum of these
        ("lifted", F64),  # added where the tenant came back to a queue
    ]
)
# One row per record that serving has kept of a prompt, by its begin. Kept where jobs learn from
# feedback on requests with adapters.
RECORDS = pa.schema(
    [
        ("request_id", I64),
        ("job_id", I64),  # that might learn from it
        ("adapter_version", I32),  # that its tokens ran through
        ("tokens", I32),
        ("kept_bytes", I64),  # of what its units keep, without keys and values
        ("made_ns", I64),  # issue of its first launch
        ("end_ns", I64),  # issue of the plan that gave it back whole; null to the run's end
        ("status", TEXT),  # used, dropped, lost with a sample that gave way, left to the run's end
        ("used_ns", I64),  # issue of the sample's first launch; null where none used it
        ("sample", I64),  # of the job, that used it
        ("used_tokens", I32),  # whose forward that sample was spared
        ("updates_behind", I32),  # of the job's weights, when it was used
    ]
)
OPTIONAL = ("samples", "service", "records")  # tables that a run may lack
TENANT = pa.field("tenant", TEXT)  # last column of requests, where requests or jobs name tenants
# Last columns of requests, and of memory, where requests run through adapters.
ADAPTER = pa.field("adapter", TEXT)
VERSION = pa.field("adapter_version", I32)  # with which it was admitted; null without an adapter
ADAPTER_BYTES = pa.field("adapter_bytes", I64)  # of adapters that are resident, all versions
# Last columns of samples, where jobs learn from feedback; null in rows of other jobs.
REQUEST_ID = pa.field("request_id", I64)  # that the sample is feedback on
RELEASED = pa.field("released_ns", I64)  # when the feedback came
RECORDED = pa.field("recorded_tokens", I32)  # of the sample, whose forward it was spared
OPTIONAL_COLUMNS = {
    "requests": (TENANT, ADAPTER, VERSION),
    "memory": (ADAPTER_BYTES,),
    "samples": (REQUEST_ID, RELEASED, RECORDED),
}

TABLES = {
    "requests": REQUESTS,
    "steps": STEPS,
    "memory": MEMORY,
    "plans": PLANS,
    "training": TRAINING,
    "samples": SAMPLES,
    "service": SERVICE,
    "records": RECORDS,
}


# ---- columns from numpy
def numbers(values: npt.ArrayLike, kind: pa.DataType, known: Mask | None = None) -> pa.Array:
    """Numbers of a type; null where `known` is false."""
    array = np.ascontiguousarray(values, NUMPY[kind])
    bits = None if known is None or known.all() else np.packbits(known, bitorder="little")
    parts = [None if bits is None else pa.py_buffer(bits), pa.py_buffer(array)]
    return pa.Array.from_buffers(kind, len(array), parts)


def texts(values: Sequence[str]) -> pa.Array:
    """Texts. ArrowInvalid beyond 2 GiB in all."""
    joined = "".join(values)
    data = joined.encode()
    is_ascii = len(data) == len(joined)
    sizes = [len(value if is_ascii else value.encode()) for value in values]
    offsets = starts_of(np.array(sizes, np.int64))
    parts = [None, pa.py_buffer(_offsets(offsets)), pa.py_buffer(data)]
    return pa.Array.from_buffers(TEXT, len(values), parts)


def shared_texts(values: Sequence[str], chosen: npt.ArrayLike, known: Mask | None = None) -> Any:
    """The text of each row, by its place among the texts: a column of type TEXTS."""
    return pa.DictionaryArray.from_arrays(numbers(chosen, I32, known), texts(values))


def lists(starts: Ints, values: npt.ArrayLike, kind: pa.DataType) -> pa.Array:
    """Lists of numbers: where each begins among all numbers, and the end of the last."""
    offsets = numbers(_offsets(starts), I32)
    return pa.ListArray.from_arrays(offsets, numbers(values, kind.value_type))


def _offsets(starts: Ints) -> npt.NDArray[np.int32]:
    """As Arrow has them. ArrowInvalid where they do not fit, which numpy would not tell."""
    if starts[-1] > np.iinfo(np.int32).max:
        raise pa.ArrowInvalid("lists or texts of one table hold more than 2**31 numbers or bytes")
    return starts.astype(np.int32)


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values of any kind of column of TABLES; null where None."""
    known = np.fromiter((value is not None for value in values), bool, len(values))
    if kind in (TEXT, TEXTS):
        names = {name: i for i, name in enumerate(dict.fromkeys(values)) if name is not None}
        places = {name: i for i, name in enumerate(names)}
        found = shared_texts([*names], [places.get(value, 0) for value in values], known)
        return found if kind == TEXTS else found.dictionary_decode()
    if not pa.types.is_list(kind):
        return numbers([0 if value is None else value for value in values], kind, known)
    sizes = np.fromiter((len(value or ()) for value in values), np.int64, len(values))
    flat = numbers(list(chain.from_iterable(filter(None, values))), kind.value_type)
    mask = None if known.all() else numbers(~known, I32).cast(pa.bool_())
    offsets = numbers(_offsets(starts_of(sizes)), I32)
    return pa.ListArray.from_arrays(offsets, flat, mask=mask)


def starts_of(counts: Ints) -> Ints:
    """Where each of consecutive groups begins, and behind them the end of all."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def rows_at(table: pa.Table, rows: Ints) -> pa.Table:
    """Some rows of a table, in this order."""
    return pc.take(table, numbers(rows, I64))


def values_of(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], Mask]:
    """Numbers of a column, any number where it is null; and where it is known."""
    parts = [_values_of(chunk) for chunk in column.chunks if len(chunk)]
    if len(parts) == 1:
        return parts[0]
    values = [np.empty(0, NUMPY[column.type]), *(values for values, _ in parts)]
    return np.concatenate(values), np.concatenate([np.empty(0, bool), *(k for _, k in parts)])


def _values_of(array: pa.Array) -> tuple[npt.NDArray[Any], Mask]:
    bits, data = array.buffers()
    begin, end = array.offset, array.offset + len(array)
    found = np.frombuffer(data, NUMPY[array.type])[begin:end]
    if bits is None:
        return found, np.ones(len(found), bool)
    known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[begin:end]
    return found, known.astype(bool)


# ---- written
GROUP = {"requests": 1 << 13, "memory": 1 << 16}  # rows of a group
OTHER_GROUP = 1 << 14
DIFFERENCES = "DELTA_BINARY_PACKED"
DICTIONARY_BYTES = 1 << 30  # of a column of texts; by Parquet's default 1 MiB each is written anew


class TableFile:
    """A table on its way to disk, in groups of rows.

    The file is equal to the byte, in whichever parts its rows come. OSError names the path.
    """

    def __init__(self, path: Path, aside: Path, schema: pa.Schema) -> None:
        """Opens the file.

        Args:
            path: what is named in errors.
            aside: where it is written.
            schema: of the table.
        """
        self._path, self._rest = path, pa.Table.from_batches([], schema)
        self._rows = GROUP.get(path.stem, OTHER_GROUP)
        with naming(path):
            self._writer = pq.ParquetWriter(
                aside, schema, compression="zstd", **_encoded(path.stem, schema)
            )

    def add(self, rows: pa.Table) -> None:
        """The next rows."""
        table = pa.concat_tables([self._rest, rows]) if self._rest.num_rows else rows
        begin = 0
        while table.num_rows - begin >= self._rows:
            self._write(table.slice(begin, self._rows))
            begin += self._rows
        self._rest = table.slice(begin)

    def close(self) -> None:
        """Writes the rows that are left."""
        if self._rest.num_rows:
            self._write(self._rest)
        with naming(self._path):
            self._writer.close()

    def drop(self) -> None:
        """Gives up a file that will not be whole."""
        with suppress(OSError):  # the first error is told
            if self._writer.is_open:
                self._writer.close()

    def _write(self, group: pa.Table) -> None:
        with naming(self._path):
            self._writer.write_table(compact(group), row_group_size=group.num_rows)


def _encoded(name: str, schema: pa.Schema) -> dict[str, Any]:
    """How columns lie in a file: texts in a dictionary; numbers of steps, which grow by little, as
    their differences, which is as fast and half as large."""
    texts = [field.name for field in schema if field.type in (TEXT, TEXTS)]
    found = {"use_dictionary": texts, "dictionary_pagesize_limit": DICTIONARY_BYTES}
    if name != "steps":
        return found
    numbers = {
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name: DIFFERENCES
        for field in schema
        if field.name not in texts
    }
    return found | {"column_encoding": numbers}


def compact(table: pa.Table) -> pa.Table:
    """The rows as one chunk; a column of TEXTS holds each text once, in order of appearance."""
    for i, field in enumerate(table.schema):
        if field.type == TEXTS:
            names: dict[str, int] = {}
            chosen = [_renumbered(part, names) for part in table.column(i).chunks]
            own = shared_texts([*names], np.concatenate([*chosen, np.empty(0, np.int32)]))
            table = table.set_column(i, field, own)
    return table.combine_chunks()


def _renumbered(part: pa.DictionaryArray, names: dict[str, int]) -> npt.NDArray[Any]:
    """The places of a part's texts among all names, to which it adds its own."""
    chosen, _ = values_of(pa.chunked_array([part.indices]))
    used, first = np.unique(chosen, return_index=True)
    kept = used[np.argsort(first)]
    found = np.zeros(len(part.dictionary), np.int32)
    own = rows_at(part.dictionary, kept).to_pylist()
    found[kept] = [names.setdefault(name, len(names)) for name in own]
    places: npt.NDArray[Any] = found[chosen]
    return places


@contextmanager
def files_of(folder: Path, schemas: Mapping[str, pa.Schema]) -> Iterator[dict[str, TableFile]]:
    """Opens NAME.parquet for each schema: written whole or not at all, with their hashes.

    The block adds rows. OSError names the file, also where the disk is full.
    """
    with ExitStack() as stack:
        files = {}
        for name, schema in schemas.items():
            path = folder / f"{name}.parquet"
            file = TableFile(path, stack.enter_context(replacing(path)), schema)
            files[name] = file
            stack.callback(file.drop)
        yield files
        for file in files.values():
            file.close()
    seal(folder, *(f"{name}.parquet" for name in schemas))


def marked(schema: pa.Schema) -> pa.Schema:
    """A schema that tells its version."""
    return schema.with_metadata({"schema_version": str(SCHEMA_VERSION)})


def write_tables(folder: Path, tables: Mapping[str, pa.Table]) -> None:
    """Writes NAME.parquet for each table, whole or not at all, and keeps their hashes.

    OSError names the file, also where the disk is full.
    """
    with files_of(folder, {name: table.schema for name, table in tables.items()}) as files:
        for name, table in tables.items():
            files[name].add(table)


# ---- read
OPS = '{"ops":['  # a body of a plan begins so


def whole_body(grows: str, body: str) -> str:
    """The text of a plan, as `encode` has it, of its two parts in PLANS."""
    if grows == "[]":
        return body
    rest = body[len(OPS) :]
    return f"{OPS}{grows[1:-1]}{'' if rest.startswith(']') else ','}{rest}"


def of_version_4(name: str, table: pa.Table) -> pa.Table:
    """A table of version 4, which had all growth of a plan in its body, as one of today."""
    if name != "plans":
        return table
    grows, bodies = list[str](), list[str]()
    for text in table["body"].to_pylist():
        body = json.loads(text)
        first = [*takewhile(lambda op: op[0] == "grow", body["ops"])]
        grows.append(json.dumps(first, separators=(",", ":")))
        rest = body | {"ops": body["ops"][len(first) :]}
        bodies.append(json.dumps(rest, separators=(",", ":")))
    place = table.column_names.index("body")
    table = table.set_column(place, PLANS.field("body"), column(bodies, TEXTS))
    return table.add_column(place, PLANS.field("grows"), column(grows, TEXT))


def read_text(path: Path) -> str:
    """A text file of a run. ValueError where it is not UTF-8, or not as it was written."""
    return checked_text(path)


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A table of a run, or some of its columns.

    ValueError where bytes are missing or damaged, or not those that were written.
    """
    try:
        return pq.read_table(pa.BufferReader(checked_bytes(path)), columns=columns)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged ({reason}): run it again") from error
