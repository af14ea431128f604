"""The normalised trace on disk: one Parquet file, and a sidecar that names its source."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from traces.files import absent, naming
from traces.serving.request import Request
from traces.tables import read_table

SCHEMA_VERSION = 3  # 2: prefix_ids, prefix_block_tokens; 3: tenant, adapter
READ_VERSIONS = (2, 3)
COLUMNS = {
    "request_id": "int64",
    "session": "int64",
    "turn": "int32",
    "arrival_ns": "int64",
    "think_ns": "int64",
    "prompt_tokens": "int32",
    "output_tokens": "int32",
    "slo": "string",
    "prompt_ids": "list<int32>",
    "prefix_ids": "list<int64>",
    "prefix_block_tokens": "int32",
    "tenant": "string",
    "adapter": "string",
}
OF_VERSION_3 = ("tenant", "adapter")  # empty in a file of version 2
NULLABLE = ("session", "prompt_ids", "prefix_ids")
LISTS = ("prompt_ids", "prefix_ids")


def sidecar_path(path: str | Path) -> Path:
    """The path of a trace's sidecar: the name of the trace with .json behind it."""
    path = Path(path)
    return path.with_name(path.name + ".json")


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_hash(path: Path) -> str:
    """The hash of a file, or of the files of a folder; "missing" where there is neither.

    A file is read again only where its time or size has changed: a sweep asks at every point.
    """
    if path.is_dir():
        listed = [[str(p.relative_to(path)), content_hash(p)] for p in sorted(path.rglob("*"))]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    if not path.is_file():
        return "missing"
    found = path.stat()
    return _of_file(path, found.st_mtime_ns, found.st_size)


@cache
def _of_file(path: Path, mtime_ns: int, size_bytes: int) -> str:
    """The hash of a file; time and size are part of the key of the cache."""
    return sha256_of(path)


def write_trace(
    path: str | Path, requests: Sequence[Request], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes requests as a normalised trace with its sidecar.

    Args:
        path: The .parquet file to write.
        requests: The requests, in the order of the file.
        origin: Facts of the importer: source, tokenizer, rule, rows read and dropped.

    Returns:
        The sidecar.
    """
    return write_table(path, _table(requests), {"requests": len(requests), **origin})


def write_table(path: str | Path, table: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a pyarrow Table and its sidecar to temporary files, then renames both.

    A run that is killed between the two renames leaves a pair whose hashes differ, and
    `read_sidecar` refuses it. Returns the sidecar.
    """
    import pyarrow.parquet

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary_sidecar = sidecar_path(temporary)
    try:
        with naming(path):
            pyarrow.parquet.write_table(table, temporary, compression="zstd")
        sidecar = {
            "schema_version": SCHEMA_VERSION,
            "trace": path.name,
            "trace_sha256": sha256_of(temporary),
            **facts,
        }
        temporary_sidecar.write_text(json.dumps(sidecar, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
        temporary_sidecar.replace(sidecar_path(path))
    finally:
        temporary.unlink(missing_ok=True)
        temporary_sidecar.unlink(missing_ok=True)
    return sidecar


def read_sidecar(path: str | Path) -> dict[str, Any]:
    """The sidecar of a trace, checked against the schema version and the trace's bytes.

    Raises a ValueError of one line where trace or sidecar is missing, or where they do not match.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {absent(path, 'trace')}; make one with `tandem trace import`")
    beside = sidecar_path(path)
    if not beside.is_file():
        raise ValueError(f"{path}: its sidecar {beside.name} is missing; import the source again")
    try:
        sidecar = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{beside}: not JSON ({error}); import the source again") from error
    version = sidecar.get("schema_version") if isinstance(sidecar, dict) else None
    if version not in READ_VERSIONS:
        raise ValueError(
            f"{beside}: schema version {version}, this Tandem reads {SCHEMA_VERSION}; import again"
        )
    if sidecar.get("trace_sha256") != sha256_of(path):
        raise ValueError(f"{path}: its bytes are not those {beside.name} was written for")
    return dict(sidecar)


def read_trace(path: str | Path) -> list[Request]:
    """The requests of a normalised trace, checked, in the order of the file.

    Imports no tokenizer, datasets or torch. Raises a ValueError of one line where the file is no
    trace of requests as it was written.
    """
    path = Path(path)
    if "documents" in (sidecar := read_sidecar(path)):
        raise ValueError(f"{path}: it holds text to train on, no requests; see training=text")
    lacks = OF_VERSION_3 if sidecar["schema_version"] == 2 else ()
    table = checked_table(path, _schema(lacks))
    requests = [_request(path, row) for row in table.to_pylist()]
    _check_ids(path, requests)
    return requests


def checked_table(path: Path, schema: Any) -> Any:
    """The columns of a schema from a Parquet file. Raises ValueError where they do not match it."""
    table = read_table(path)
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; import the source again")
    for field in schema:
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            raise ValueError(f"{path}: column {field.name} has empty cells; import it again")
        if column.type != field.type:
            raise ValueError(f"{path}: column {field.name} holds {column.type}, not {field.type}")
    return table.select(schema.names)


def _request(path: Path, row: dict[str, Any]) -> Request:
    for name in LISTS:
        row[name] = None if row[name] is None else tuple(row[name])
    try:
        return Request(**row)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_ids(path: Path, requests: Sequence[Request]) -> None:
    first: dict[int, int] = {}
    for row, request in enumerate(requests, 1):
        if before := first.get(request.request_id):
            raise ValueError(
                f"{path}: request_id {request.request_id} occurs twice, in rows {before} and "
                f"{row}; number the requests anew, or import the source again"
            )
        first[request.request_id] = row


def _schema(lacks: Collection[str] = ()) -> Any:
    """The columns of a trace, but for those that a file of an earlier version lacks."""
    import pyarrow as pa

    types = {"list<int32>": pa.list_(pa.int32()), "list<int64>": pa.list_(pa.int64())}
    return pa.schema(
        pa.field(name, types.get(kind) or pa.type_for_alias(kind), nullable=name in NULLABLE)
        for name, kind in COLUMNS.items()
        if name not in lacks
    )


def _table(requests: Sequence[Request]) -> Any:
    import pyarrow as pa

    columns = {name: [getattr(request, name) for request in requests] for name in COLUMNS}
    return pa.table(columns, schema=_schema())
