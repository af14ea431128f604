"""Columns out of CSV, Parquet and JSON-lines files, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from traces.json_value import json_line
from traces.records import opened

TABLE_SUFFIXES = (".csv", ".parquet", ".jsonl", ".jsonl.gz")


def read_columns(path: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """The named columns that the file has, as Python values; missing values are None."""
    columns, malformed = readable_columns(path, names)
    if malformed:
        raise ValueError(f"{path}: line {malformed[0]} is no JSON object")
    return columns


def readable_columns(path: Path, names: Iterable[str]) -> tuple[dict[str, list[Any]], list[int]]:
    """The same of all lines that can be read, and the numbers of JSON lines that cannot."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        rows, malformed = _json_rows(path)
        present = [name for name in names if any(name in row for row in rows)]
        return {name: [row.get(name) for row in rows] for name in present}, malformed
    table = read_table(path)
    present = [name for name in names if name in table.column_names]
    return {name: table.column(name).to_pylist() for name in present}, []


def read_table(path: Path) -> Any:
    """The file as a pyarrow Table (.csv or .parquet)."""
    import pyarrow as pa

    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"{path}: a table is read from {', '.join(TABLE_SUFFIXES)}")
    try:
        if path.suffix == ".csv":
            import pyarrow.csv

            return pyarrow.csv.read_csv(path)
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable {path.suffix} file ({reason})") from error


def _json_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    with opened(path) as file:
        found = [(n, json_line(line)) for n, line in enumerate(file, start=1) if line.strip()]
    rows = [row for _, row in found if isinstance(row, dict)]
    return rows, [number for number, row in found if not isinstance(row, dict)]
