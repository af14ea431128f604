"""Columns and rows out of local files: CSV, Parquet, JSON lines, and what `datasets` reads."""

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

    Whatever the library raises passes through: its errors have many types.
    """
    # both are read when `datasets` is first imported; a local file needs no network
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    import datasets

    shown, said = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is told by us
    # a cache of our own: nothing stays behind in the user's home
    with tempfile.TemporaryDirectory(prefix="tandem-datasets-") as cache:
        link = Path(cache) / f"source{path.suffix}"  # it takes a name with [ or * for a pattern
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
            datasets.logging.set_verbosity(said)
            if not shown:
                datasets.enable_progress_bars()


@dataclass(frozen=True, eq=False)
class Columns:
    """The named columns that a file has, over the lines that can be read.

    Cells of a CSV file are text ("" where empty), others as they are stored, None where missing.
    """

    cells: dict[str, list[Any]]
    lines: list[int]  # the number of each row in the file
    malformed: list[int]  # numbers of the lines that cannot be read


def read_columns(path: Path, names: Iterable[str]) -> Columns:
    """The named columns, as far as the file has them. ValueError where it is none of a table."""
    if not path.is_file():
        raise ValueError(f"{path}: {absent(path)}")
    wanted = tuple(dict.fromkeys(names))
    lines, rows, malformed = list[int](), list[tuple[Any, ...]](), list[int]()
    for line, record in records(path, (), [(name,) for name in wanted]):
        if record is None:
            malformed.append(line)
        else:
            lines.append(line)
            rows.append(record)
    known = header(path)  # of JSON lines the first need not have every key
    columns = {name: [row[place] for row in rows] for place, name in enumerate(wanted)}
    found = (
        name
        for name, cells in columns.items()
        if name in known or any(cell is not None for cell in cells)
    )
    return Columns({name: columns[name] for name in found}, lines, malformed)


def read_table(path: Path) -> Any:
    """A Parquet file as a pyarrow Table."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable .parquet file ({reason})") from error
