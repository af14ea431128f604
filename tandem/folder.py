"""The folder of one run: written aside and renamed, so that a killed run never looks finished."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.errors import RunFailed, Usage


@contextmanager
def run_folder(folder: Path) -> Iterator[Path]:
    """Yields the folder to write into, and renames it in the end.

    Afterwards status.json says ok, or failed with the traceback; while it runs (or if it was
    killed) all lies in `<folder>.running`. ValueError if the folder holds something already, or if
    such a run was left there.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder}: there is something in it already; results are never overwritten"
        )
    aside = aside_of(folder)
    try:
        aside.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{aside}: a run is going on there, or was killed; remove it or take another folder"
        ) from None
    write_status(aside, "running")
    try:
        yield aside
    except BaseException as error:
        _write_failure(aside, error)
        _rename(aside, folder)
        if isinstance(error, ValueError) or not isinstance(error, Exception):
            raise
        raise RunFailed(
            f"{type(error).__name__}: {error} (traceback in {folder}/status.json)"
        ) from error
    _rename(aside, folder)


@contextmanager
def sole_user(lock: Path, others: str) -> Iterator[None]:
    """Holds a lock file for the block; Usage, with what `others` are doing, where they hold it."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Usage(others) from error
        yield


def aside_of(folder: Path) -> Path:
    """Where a run is written until it ends, and where a killed one stays."""
    return folder.with_name(f"{folder.name}.running")


def status_of(folder: Path) -> str | None:
    """ok, failed or running, as status.json says; None where there is none to read."""
    try:
        found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(found["status"]) if isinstance(found, dict) and "status" in found else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON file, readable by people."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def write_status(folder: Path, status: str, **more: str) -> None:
    """What became of the run: running, ok or failed."""
    write_json(folder / "status.json", {"status": status, **more})


def _write_failure(aside: Path, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {error}"
    lines = "".join(traceback.format_exception(error))
    write_status(aside, "failed", error=reason, traceback=lines)


def _rename(aside: Path, folder: Path) -> None:
    if folder.is_dir():
        folder.rmdir()  # Hydra made it, empty
    aside.rename(folder)
