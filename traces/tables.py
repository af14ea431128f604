"""Columns and rows of local files: CSV, Parquet, JSON lines, and the formats of `datasets`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.files import absent
from traces.records import header, records


@contextmanager
def opened_dataset(builder: str, path: Path, **settings: Any) -> Iterator[Any]:
    """The rows of the file as a datasets.Dataset; `builder` is "json", "parquet" or "text".

    Errors of the library pass through: they have many types.
    """
    # `datasets` reads both when it is first imported; a local file needs no network
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    import datasets

    are_disabled = datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # failures are reported here
    # a temporary cache leaves nothing in the user's home
    with tempfile.TemporaryDirectory(prefix="tandem-datasets-") as cache:
        link = Path(cache) / f"source{path.suffix}"  # a name with [ or * would be a pattern
        link.symlink_to(path.resolve())
        try:
            yield datasets.load_dataset(
                builder,
                data_files=str(link),
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
                **settings,
            )
        finally:
            datasets.logging.set_verbosity(verbosity)
            if not are_disabled:
                datasets.enable_progress_bars()


@dataclass(frozen=True, eq=False)
class Columns:
    """The named columns that a file has, over the lines that can be read.

    Cells of a CSV file are text ("" where empty). Cells of other files are as stored, None where
    missing.
    """

    cells: dict[str, list[Any]]
    lines: list[int]  # line number of each row
    malformed: list[int]  # numbers of the lines that cannot be read


def read_columns(path: Path, names: Iterable[str]) -> Columns:
    """The named columns, as far as the file has them. Raises ValueError for an unreadable file."""
    if not path.is_file():
        raise ValueError(f"{path}: {absent(path)}")
    chosen = tuple(dict.fromkeys(names))
    lines, rows, malformed = list[int](), list[tuple[Any, ...]](), list[int]()
    for line, record in records(path, (), [(name,) for name in chosen]):
        if record is None:
            malformed.append(line)
        else:
            lines.append(line)
            rows.append(record)
    known = header(path)  # the first of JSON lines need not have every key
    columns = {name: [row[place] for row in rows] for place, name in enumerate(chosen)}
    found = (
        name
        for name, cells in columns.items()
        if name in known or any(cell is not None for cell in cells)
    )
    return Columns({name: columns[name] for name in found}, lines, malformed)


def read_table(path: Path) -> Any:
    """A Parquet file as a pyarrow Table. The file alone: a data set would import pandas."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable .parquet file ({reason})") from error
