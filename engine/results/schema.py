"""The schema of all results, one for every backend, and how a table of it is read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from engine.contract.regions import Pool
from traces.files import atomically, checked_bytes, checked_text, seal


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


SCHEMA_VERSION = 4

I64, I32, TEXT, F64 = pa.int64(), pa.int32(), pa.string(), pa.float64()

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
        ("lane", TEXT),  # compute, cpu, net, gpu->host, host->gpu, ...
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

# One row per plan, in issue order: enough to play it back.
PLANS = pa.schema(
    [
        ("step", I64),
        ("device", I32),
        ("at_ns", I64),
        ("returned", pa.list_(I64)),  # jobs whose memory came back since its device's plan before
        ("body", TEXT),  # JSON, see engine/results/plan_log.py
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

TABLES = {
    "requests": REQUESTS,
    "steps": STEPS,
    "memory": MEMORY,
    "plans": PLANS,
    "training": TRAINING,
}


def write_tables(folder: Path, tables: Mapping[str, pa.Table]) -> None:
    """Writes NAME.parquet for each table, whole or not at all, and keeps their hashes.

    OSError names the file, also where the disk is full.
    """
    for name, table in tables.items():
        with atomically(folder / f"{name}.parquet") as aside:
            pq.write_table(table, aside, compression="zstd")
    seal(folder, *(f"{name}.parquet" for name in tables))


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
