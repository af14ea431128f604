"""A run as read from its folder, checked against the schema of results."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from analysis.columns import (
    Block,
    block_of,
    block_of_frame,
    blocks_of_file,
    count_of,
    joined,
    names_of,
)
from analysis.yaml_text import yaml_value
from engine.results.schema import (
    OPTIONAL,
    OPTIONAL_COLUMNS,
    SCHEMA_VERSION,
    TABLES,
    of_version_4,
    read_table,
    read_text,
)

if TYPE_CHECKING:  # it takes longer to load than the metrics of a small run
    import pandas as pd

STATUS = "status.json"  # has no hash: it changes until the run ends


@dataclass(frozen=True, eq=False)
class RunFacts(ABC):
    """The columns of a run, its provenance and its configuration: what metrics are made of."""

    folder: Path
    provenance: Mapping[str, Any]
    config: Mapping[str, Any]

    @abstractmethod
    def has(self, table: str) -> bool:
        """Whether the run has kept a table."""

    @abstractmethod
    def keeps(self, table: str, column: str) -> bool:
        """Whether the run has kept a column that a table may lack, and rows of it."""

    @abstractmethod
    def rows(self, table: str) -> int:
        """Rows of a table."""

    @abstractmethod
    def blocks(self, table: str, columns: Sequence[str]) -> Iterator[Block]:
        """Columns of a table by blocks of its rows, in order; at least one block."""

    def columns(self, table: str, columns: Sequence[str]) -> Block:
        """Columns of numbers and texts of a whole table."""
        return joined(self.blocks(table, columns))

    @property
    def name(self) -> str:
        """Name of the folder, for tables."""
        return self.folder.name

    @property
    def backend(self) -> str:
        """The backend: sim, lockstep, cpu or cuda."""
        return str(self.provenance.get("backend", "unknown backend"))

    @property
    def is_measured(self) -> bool:
        """Whether durations were measured rather than predicted."""
        return self.backend not in ("sim", "lockstep")

    @property
    def cost_form(self) -> str:
        """Source of durations: "measured", or the form of the cost model."""
        return "measured" if self.is_measured else str(self.provenance.get("cost_form") or "-")


@dataclass(frozen=True, eq=False)
class Run(RunFacts):
    """A run whose tables are frames.

    Integer columns with nulls are float64, which is exact below 2**53 ns (104 days of run).
    """

    requests: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    plans: pd.DataFrame
    training: pd.DataFrame
    samples: pd.DataFrame | None = None  # of finetuning jobs
    service: pd.DataFrame | None = None  # of tenants, where a scheduling goes by it
    records: pd.DataFrame | None = None  # of served prompts, where jobs learn from requests

    def has(self, table: str) -> bool:
        """Whether the run has kept a table: all of them but those that a run may lack."""
        return getattr(self, table) is not None if table in OPTIONAL else table in TABLES

    def keeps(self, table: str, column: str) -> bool:
        """Whether a table has a column and rows."""
        return self.rows(table) > 0 and column in getattr(self, table)

    def rows(self, table: str) -> int:
        """Rows of a table; of one that it lacks, none."""
        return len(getattr(self, table)) if self.has(table) else 0

    def blocks(self, table: str, columns: Sequence[str]) -> Iterator[Block]:
        """A whole table at once, see RunFacts."""
        frame = getattr(self, table)
        if frame.empty:  # its lists and texts look alike
            yield block_of(pa.Table.from_batches([], TABLES[table]).select([*columns]))
        else:
            yield block_of_frame(frame[[*columns]])


@dataclass(frozen=True, eq=False)
class RunFiles(RunFacts):
    """A run whose tables stay in their files, unchecked: the run has just been written."""

    def has(self, table: str) -> bool:
        """Whether the run has kept a table."""
        return self._path(table).is_file()

    def keeps(self, table: str, column: str) -> bool:
        """Whether a table has a column and rows."""
        return self.rows(table) > 0 and column in names_of(self._path(table))

    def rows(self, table: str) -> int:
        """Rows of a table; of one that was not kept, none."""
        return count_of(self._path(table)) if self.has(table) else 0

    def blocks(self, table: str, columns: Sequence[str]) -> Iterator[Block]:
        """A group of rows of the file at a time, see RunFacts."""
        return blocks_of_file(self._path(table), columns)

    def _path(self, table: str) -> Path:
        return self.folder / f"{table}.parquet"


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a configuration by their dotted keys."""
    if not isinstance(config, Mapping):
        return {prefix.removesuffix("."): config}
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.")
    return out


def whole(facts: RunFacts) -> Run:
    """A run with its tables as frames."""
    if isinstance(facts, Run):
        return facts
    return read_run(facts.folder)


def load(folder: Path | str) -> Run:
    """Reads the folder of a finished run.

    Args:
        folder: the folder.

    Returns:
        The run.

    Raises:
        ValueError: in one line: no run, a failed run, a damaged table, or one of another version.
    """
    folder = Path(folder).resolve()
    _check_finished(folder)
    return read_run(folder)


def load_files(folder: Path | str) -> RunFiles:
    """A finished run of which the requests alone are read and checked; see `load`."""
    folder = Path(folder).resolve()
    _check_finished(folder)
    _table(folder, "requests", TABLES["requests"])
    return run_files(folder)


def load_checked(folder: Path | str) -> RunFiles:
    """A finished run whose tables are all checked and then stay in their files; see `load`.

    Of a run that has kept requests alone, these.
    """
    folder = Path(folder).resolve()
    if (folder / "steps.parquet").is_file():
        load(folder)
        return run_files(folder)
    return load_files(folder)


def read_run(folder: Path) -> Run:
    """Reads the folder of a run of any status, also of one that is still being written.

    Args:
        folder: the folder.

    Raises:
        ValueError: in one line, see `load`.
    """
    facts = run_files(folder)
    return Run(folder, facts.provenance, facts.config, **read_tables(folder))


def run_files(folder: Path) -> RunFiles:
    """The run of a folder, whose tables are read when they are asked for."""
    return RunFiles(folder, _json(folder / "provenance.json"), _config(folder / "config.yaml"))


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a folder, checked against the schema, whatever the run's status."""
    config = folder / "config.yaml"
    if not (folder / "steps.parquet").is_file() and _config(config).get("record") == "requests":
        raise ValueError(
            f"{folder} has kept requests alone (record=requests): run it again with record=all"
        )
    lacks = [name for name in OPTIONAL if not (folder / f"{name}.parquet").is_file()]
    return {n: _table(folder, n, schema) for n, schema in TABLES.items() if n not in lacks}


def _check_finished(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a run, as `tandem run` prints")
    if not (folder / "status.json").is_file():
        raise ValueError(f"{folder} is not a run folder (no status.json): give one of `tandem run`")
    status = _json(folder / "status.json")
    state = status.get("status")
    if state != "ok":
        error = " ".join(str(status.get("error") or "no reason recorded").split())
        raise ValueError(
            f"{folder}: the run did not finish (status {state}: {error}): mend that, run again"
        )


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: the run is incomplete, run it again")
    text = read_text(path) if path.name != STATUS else path.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): run it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object: run it again")
    return value


def _config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: the run is incomplete, run it again")
    value = yaml_value(read_text(path), path)
    return value if isinstance(value, dict) else {}


def _table(folder: Path, name: str, schema: pa.Schema) -> pd.DataFrame:
    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise ValueError(f"{folder} has no {path.name}: the run is incomplete, run it again")
    table = read_table(path)
    version = (table.schema.metadata or {}).get(b"schema_version", b"").decode()
    if version == "4":
        table = of_version_4(name, table)
    elif version and version != str(SCHEMA_VERSION):
        raise ValueError(
            f"{path} has schema version {version}, this Tandem reads {SCHEMA_VERSION}: "
            "run it again, or read it with the Tandem that wrote it"
        )
    more = [field for field in OPTIONAL_COLUMNS.get(name, ()) if field.name in table.column_names]
    schema = pa.schema([*schema, *more])
    for field in schema:
        if field.name not in table.schema.names:
            raise ValueError(f"{path} lacks column {field.name}: written by another version")
        if table.schema.field(field.name).type != field.type:
            found = table.schema.field(field.name).type
            raise ValueError(f"{path}: column {field.name} is {found}, not {field.type}")
    frame: pd.DataFrame = table.select(schema.names).to_pandas()
    return frame
