"""Rows of CSV, Parquet and JSON-lines files one by one, and the values in their cells.

A malformed row or cell costs only its row: `Drops` counts it under a reason.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

NOT_JSON = object()  # stands for a line that cannot be read
NS_PER_S = 1_000_000_000
MAX_NS = 2**62  # of a time: the difference of two is an int64
EPOCH = datetime(1970, 1, 1)
# up to nine digits of a second (Azure's files of 2023 have seven), in those of 2024 an offset
DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?")
NAMED_LINES = 5  # of each reason
Record = tuple[Any, ...]  # the requested values of a line, None where it has none
Records = Iterator[tuple[int, Record | None]]  # the line's number, and None where it is malformed
Aliases = tuple[str, ...]  # a column by any of its names


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises JSONDecodeError or RecursionError, and no other error.

    Python reads no integer of more than 4,300 digits. Such an integer is infinite here, so that the
    check of its cell names the row.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_integer)


def json_line(line: str) -> Any:
    """The value of a line; NOT_JSON where it is malformed."""
    try:
        return json_value(line)
    except (json.JSONDecodeError, RecursionError):
        return NOT_JSON


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded; JSON can spell half of a surrogate pair, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _integer(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)


class Unusable(Exception):
    """The reason why a cell, and with it its row, is dropped."""


def number_in(cell: Any) -> float | None:
    """The finite number in a cell, also as text, integers exactly; None where there is none."""
    if type(cell) is int:
        return cell
    if isinstance(cell, str):
        with suppress(ValueError):
            return int(cell)
    try:
        number = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def whole_number(name: str, cell: Any) -> int:
    """The integer in a cell. Raises Unusable with the `name` of the column where it is none."""
    number: float = cell if type(cell) is int else _checked(name, cell, "a whole number")
    if number != number // 1:
        raise Unusable(f"{name} is not a whole number")
    return int(number)


def nanoseconds(cell: Any, unit_ns: int) -> int:
    """Nanoseconds of a time stamp that counts units of `unit_ns`. Raises Unusable."""
    number: float = cell if type(cell) is int else _checked("timestamp", cell, "a number")
    if not abs(number) < MAX_NS / unit_ns:
        raise Unusable("timestamp out of range")
    return round(number * unit_ns)


def at_ns(cell: Any) -> int:
    """Nanoseconds from 1970 on: of a date and time, of integer nanoseconds, or of float seconds."""
    if isinstance(cell, str) and (found := DATE.fullmatch(cell.strip())):
        return _date_ns(*found.groups())
    return nanoseconds(cell, 1 if isinstance(cell, int) else NS_PER_S)


def _date_ns(
    date: str, fraction: str | None, sign: str | None, hours: str | None, minutes: str | None
) -> int:
    try:
        seconds = (datetime.fromisoformat(date) - EPOCH) // timedelta(seconds=1)
    except ValueError as error:
        raise Unusable("timestamp is no date and time") from error
    if sign is not None:
        ahead = int(hours or 0) * 3600 + int(minutes or 0) * 60
        seconds -= ahead if sign == "+" else -ahead
    return seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))


def _checked(name: str, cell: Any, kind: str) -> float:
    if cell is None or cell == "":
        raise Unusable(f"{name} missing")
    number = number_in(cell)
    if number is None:
        raise Unusable(f"{name} is not {kind}")
    return number


@dataclass
class Drops:
    """Rows dropped, counted by reason, with the numbers of the first lines of each reason."""

    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[int]] = field(default_factory=dict)

    def drop(self, reason: str, *lines: int) -> None:
        """Counts lines (or rows, from 1) under a reason."""
        self.dropped[reason] += len(lines)
        first = self.named.setdefault(reason, [])
        first.extend(lines[: NAMED_LINES - len(first)])

    def account(self, num_kept: int) -> dict[str, Any]:
        """The account of rows for the sidecar: rows read = kept + dropped."""
        assert self.rows_read == num_kept + self.dropped.total()
        return {
            "rows_read": self.rows_read,
            "rows_kept": num_kept,
            "rows_dropped": dict(self.dropped),
            "first_lines_dropped": self.named,
        }


def records(path: Path, columns: Sequence[Aliases], optional: Sequence[Aliases] = ()) -> Records:
    """Line number and values of `columns`, then of `optional`, for each line that is not blank.

    Numbers count from 1 and include the header of a CSV file, as an editor counts lines. Raises
    ValueError where a column of `columns` is missing altogether.
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
    """Names of the columns of a CSV file. Raises ValueError where its first line is malformed."""
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
    chosen = [None if at is None else names[at] for at in places]
    number = 0
    for batch in file.iter_batches(columns=[name for name in chosen if name]):
        values = [[None] * len(batch) if n is None else _values(batch.column(n)) for n in chosen]
        for row in zip(*values, strict=True):
            number += 1
            yield number, row


def _values(column: Any) -> list[Any]:
    """Python values of a column; dates as integer nanoseconds."""
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
    """The text lines of a file or of a .gz. Raises ValueError where the .gz is incomplete."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # bytes that are not UTF-8 become no number, and so a dropped line
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error})") from error
