"""Columns out of CSV and Parquet files, with one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_table(path: Path) -> Any:
    """The file as a pyarrow Table (.csv or .parquet)."""
    import pyarrow as pa

    try:
        if path.suffix == ".csv":
            import pyarrow.csv

            return pyarrow.csv.read_csv(path)
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable {path.suffix} file ({reason})") from error
