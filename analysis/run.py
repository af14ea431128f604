"""A run as read from its folder, checked against the schema of results."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from analysis.yaml_text import yaml_value
from engine.results.schema import SCHEMA_VERSION, TABLES, read_table, read_text

NOTHING: Mapping[str, Collection[str]] = {}
STATUS = "status.json"  # has no hash: it changes until the run ends


@dataclass(frozen=True, eq=False)
class Run:
    """The tables of a run, its provenance and its configuration.

    Integer columns with nulls are float64, which is exact below 2**53 ns (104 days of run).
    """

    folder: Path
    requests: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    plans: pd.DataFrame
    training: pd.DataFrame
    provenance: Mapping[str, Any]
    config: Mapping[str, Any]

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


def read_run(folder: Path, left_out: Mapping[str, Collection[str]] = NOTHING) -> Run:
    """Reads the folder of a run of any status, also of one that is still being written.

    Args:
        folder: the folder.
        left_out: columns that the tables of the run are to lack, by table.

    Raises:
        ValueError: in one line, see `load`.
    """
    return Run(
        folder,
        **read_tables(folder, left_out),
        provenance=_json(folder / "provenance.json"),
        config=_config(folder / "config.yaml"),
    )


def read_tables(
    folder: Path, left_out: Mapping[str, Collection[str]] = NOTHING
) -> dict[str, pd.DataFrame]:
    """The tables of a folder, checked against the schema, whatever the run's status."""
    tables = {}
    for name, schema in TABLES.items():
        fields = [field for field in schema if field.name not in left_out.get(name, ())]
        tables[name] = _table(folder, name, pa.schema(fields))
    return tables


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
    table = read_table(path, None if schema == TABLES[name] else schema.names)
    version = (table.schema.metadata or {}).get(b"schema_version", b"").decode()
    if version and version != str(SCHEMA_VERSION):
        raise ValueError(
            f"{path} has schema version {version}, this Tandem reads {SCHEMA_VERSION}: "
            "run it again, or read it with the Tandem that wrote it"
        )
    for field in schema:
        if field.name not in table.schema.names:
            raise ValueError(f"{path} lacks column {field.name}: written by another version")
        if table.schema.field(field.name).type != field.type:
            found = table.schema.field(field.name).type
            raise ValueError(f"{path}: column {field.name} is {found}, not {field.type}")
    frame: pd.DataFrame = table.select(schema.names).to_pandas()
    return frame
