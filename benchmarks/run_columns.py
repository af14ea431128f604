"""The columns of two run folders, decoded and hashed, and where they differ."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.results.schema import whole_body

SHOWN = 60  # characters of a value that differs
JSON = "json"  # the type of a column that is a key of a JSON file
ALL = "*"


@dataclass(frozen=True)
class LeftOut:
    """Columns that are not compared, and why; `is_timed`: only where a clock decides when.

    `column` and `run` are names, or patterns as a shell has them.
    """

    file: str
    column: str
    reason: str
    is_timed: bool = False
    run: str = "*"


@dataclass(frozen=True, eq=False)
class DecodedColumn:
    """A decoded column."""

    type: str
    values: list[Any]

    @cached_property
    def cells(self) -> list[bytes]:
        return [encoded(value) for value in self.values]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its type and of all its values."""
        found = hashlib.sha256(encoded(self.type))
        for cell in self.cells:
            found.update(cell)
        return found.hexdigest()


Columns = dict[str, DecodedColumn]
Folder = dict[str, Columns]  # by name of the file


@dataclass(frozen=True)
class ColumnDifference:
    """Where two run folders differ; `row` is None where a whole column does."""

    file: str
    column: str
    row: int | None
    before: str
    after: str

    def __str__(self) -> str:
        where = " ".join((self.file, self.column, *(() if self.row is None else (f"{self.row}",))))
        return f"{where}: {self.before} != {self.after}"


def encoded(value: Any) -> bytes:
    """A value with its type as bytes, two of which are equal where type and value are.

    A float is its bits (any NaN is one NaN), a list its items in order, a dictionary its items by
    key.
    """
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"d" + (b"nan" if isnan(value) else struct.pack(">d", value))
    if isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return b"%s%d:%s" % (b"s" if isinstance(value, str) else b"b", len(text), text)
    if isinstance(value, list | tuple):
        return b"[%s]" % b"".join(map(encoded, value))
    if isinstance(value, Mapping):
        items = sorted((encoded(key), encoded(held)) for key, held in value.items())
        return b"{%s}" % b"".join(key + held for key, held in items)
    return b"o" + encoded(type(value).__name__) + encoded(str(value))  # a date, a decimal


def read_folder(folder: Path) -> Folder:
    """Every table and JSON file of a run folder, decoded."""
    found: Folder = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            columns = {name: _decoded(table.column(name)) for name in table.column_names}
            if "grows" in columns:  # beside the body since version 5 of the schema
                grows, bodies = columns.pop("grows").values, columns["body"].values
                whole = [whole_body(g, b) for g, b in zip(grows, bodies, strict=True)]
                columns["body"] = DecodedColumn(columns["body"].type, whole)
            found[path.name] = columns
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            found[path.name] = {key: DecodedColumn(JSON, [held]) for key, held in content.items()}
    return found


def _decoded(column: pa.ChunkedArray) -> DecodedColumn:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return DecodedColumn(str(kind).removeprefix("large_"), column.to_pylist())


def differences(
    before: Folder,
    after: Folder,
    renamed: Mapping[tuple[str, str], str],
    left_out: Sequence[LeftOut],
    is_timed: bool = False,
) -> tuple[int, list[ColumnDifference]]:
    """How many columns were compared, and those that differ.

    With `is_timed` rows are put into the order of their cells first: a clock orders them.
    """
    aside = [(out.file, out.column) for out in left_out if is_timed or not out.is_timed]
    compared, found = 0, list[ColumnDifference]()

    def is_left_out(file: str, column: str) -> bool:
        return any(file == name and fnmatchcase(column, pattern) for name, pattern in aside)

    for file in sorted({*before, *after}, key=lambda name: (name.endswith(".json"), name)):
        if (file, ALL) in aside:
            continue
        if file not in before or file not in after:
            found.append(
                ColumnDifference(file, ALL, None, _there(file in before), _there(file in after))
            )
            continue
        names = {name: renamed.get((file, name), name) for name in before[file]}
        kept = [name for name in names if not is_left_out(file, name)]
        old = {name: before[file][name] for name in kept}
        new = {name: after[file][names[name]] for name in kept if names[name] in after[file]}
        if is_timed:
            old, new = _sorted(old, list(new)), _sorted(new, list(new))
        for name in kept:
            compared += 1
            if name not in new:
                found.append(ColumnDifference(file, name, None, _there(True), _there(False)))
            elif old[name].digest != new[name].digest:
                found.append(_first(file, name, old[name], new[name]))
        for name in after[file]:
            if name not in names.values() and not is_left_out(file, name):
                found.append(ColumnDifference(file, name, None, _there(False), _there(True)))
    return compared, found


def _there(is_there: bool) -> str:
    return "there" if is_there else "missing"


def _sorted(columns: Columns, names: Sequence[str]) -> Columns:
    """Columns with their rows in the order of the cells of some of them."""
    rows = zip(*(columns[name].cells for name in names), strict=True)
    order = [place for _, place in sorted((row, place) for place, row in enumerate(rows))]
    return {
        name: DecodedColumn(column.type, [column.values[place] for place in order])
        for name, column in columns.items()
    }


def _first(file: str, name: str, old: DecodedColumn, new: DecodedColumn) -> ColumnDifference:
    """The first row in which two columns differ."""
    if old.type != new.type:
        return ColumnDifference(file, name, None, old.type, new.type)
    common = min(len(old.cells), len(new.cells))
    row = next((i for i in range(common) if old.cells[i] != new.cells[i]), common)
    texts = [repr(c.values[row]) if row < len(c.values) else "no row" for c in (old, new)]
    return ColumnDifference(file, name, row, *_cut(*texts))


def _cut(one: str, other: str) -> tuple[str, str]:
    """Two texts from a little before the place where they part."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, same - SHOWN // 3)

    def part(text: str) -> str:
        behind = text[begin : begin + SHOWN]
        return f"{'...' * (begin > 0)}{behind}{'...' * (len(text) > begin + SHOWN)}"

    return part(one), part(other)
