"""Columns out of CSV, Parquet and JSON-lines files, with one-line errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from traces.records import opened

TABLE_SUFFIXES = (".csv", ".parquet", ".jsonl", ".jsonl.gz")


def read_columns(path: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """The named columns that the file has, as Python values; missing values are None."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = list(_json_rows(path))
        present = [name for name in names if any(name in row for row in rows)]
        return {name: [row.get(name) for row in rows] for name in present}
    table = read_table(path)
    present = [name for name in names if name in table.column_names]
    return {name: table.column(name).to_pylist() for name in present}


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


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: line {number} is not JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} is not an object")
            yield row
