"""Lines of CSV, Parquet and JSON-lines files one by one; a spoilt line stops nothing."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from traces.json_value import json_line

Record = tuple[Any, ...]  # the wanted values of a line, None where it has none
Records = Iterator[tuple[int, Record | None]]  # the line's number, and None where it is spoilt
Aliases = tuple[str, ...]  # a column by any of its names


def records(path: Path, columns: Sequence[Aliases], optional: Sequence[Aliases] = ()) -> Records:
    """Line number and values of `columns`, then of `optional`, for each line that is not blank.

    Numbers count from 1 with the header of a CSV file, so that an editor finds the line; rows of
    Parquet count from 1. ValueError where a column of `columns` is missing altogether.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return _json_records(path, (*columns, *optional))
    if name.endswith(".csv"):
        return _csv_records(path, columns, optional)
    if path.suffix == ".parquet":
        return _parquet_records(path, columns, optional)
    raise ValueError(f"{path}: a trace is read from .csv, .parquet or .jsonl")


def header(path: Path) -> tuple[str, ...]:
    """Names of the columns of a CSV or Parquet file, or keys of the first JSON line."""
    if path.suffix == ".parquet":
        return tuple(_parquet(path).schema_arrow.names)
    with opened(path) as file:
        if path.name.removesuffix(".gz").endswith(".csv"):
            return tuple(_names(path, csv.reader(file)))
        row = _object(file.readline())
    return tuple(row) if row is not None else ()


def _json_records(path: Path, columns: Sequence[Aliases]) -> Records:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _object(line)
            yield number, None if row is None else tuple(_first(row, names) for names in columns)


def _csv_records(path: Path, columns: Sequence[Aliases], optional: Sequence[Aliases]) -> Records:
    with opened(path) as file:
        lines = csv.reader(file)
        names = _names(path, lines)
        places = _places(path, names, columns, optional)
        while True:
            try:
                cells = next(lines, None)
            except csv.Error:  # a NUL byte, or a cell of more than 131,072 characters
                yield lines.line_num, None
                continue
            if cells is None:
                return
            if not cells:
                continue
            is_whole = len(cells) == len(names)
            yield lines.line_num, _picked(cells, places) if is_whole else None


def _names(path: Path, lines: Iterator[list[str]]) -> list[str]:
    """Of the columns of a CSV file. ValueError where its first line cannot be read."""
    try:
        return [name.strip() for name in next(lines, [])]
    except csv.Error as error:
        raise ValueError(f"{path}: line 1 holds no names of columns ({error})") from error


def _parquet_records(
    path: Path, columns: Sequence[Aliases], optional: Sequence[Aliases]
) -> Records:
    file = _parquet(path)
    names = file.schema_arrow.names
    places = _places(path, names, columns, optional)
    wanted = [None if at is None else names[at] for at in places]
    number = 0
    for batch in file.iter_batches(columns=[name for name in wanted if name]):
        values = [[None] * len(batch) if n is None else _values(batch.column(n)) for n in wanted]
        for row in zip(*values, strict=True):
            number += 1
            yield number, row


def _values(column: Any) -> list[Any]:
    """Python values; dates as whole nanoseconds."""
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ns", tz=column.type.tz)).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable .parquet file ({reason})") from error


def _places(
    path: Path, names: Sequence[str], columns: Sequence[Aliases], optional: Sequence[Aliases]
) -> list[int | None]:
    places = [
        next((names.index(name) for name in aliases if name in names), None)
        for aliases in (*columns, *optional)
    ]
    for aliases, at in zip(columns, places, strict=False):
        if at is None:
            raise ValueError(f"{path}: no column {' or '.join(aliases)}; it has {', '.join(names)}")
    return places


def _picked(cells: Sequence[str], places: Sequence[int | None]) -> Record:
    return tuple(None if at is None else cells[at] for at in places)


def _first(row: dict[str, Any], names: Aliases) -> Any:
    return next((row[name] for name in names if name in row), None)


def _object(line: str) -> dict[str, Any] | None:
    row = json_line(line)
    return row if isinstance(row, dict) else None


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """The lines of a file, or of one that is compressed. ValueError where a .gz is torn."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # what is not UTF-8 becomes no number, and so a dropped line
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error})") from error
