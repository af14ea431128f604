"""The folder of one run: written aside and renamed, so that a killed run never looks finished."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.cli.errors import RunFailed, Usage, exits_fail, line_of
from tandem.config.renamed import old_imports
from traces.files import checked_text, write_text

ROOT = Path(__file__).resolve().parents[2]
# What claims write about the code, as pathspecs; no run depends on it.
RESULTS = (":(top,exclude)benchmarks/results", ":(top,exclude)benchmarks/CLAIMS.*")
LIBRARIES = ("simpy", "torch", "transformers", "hydra-core", "numpy", "pandas", "pyarrow")


@cache  # of the code that is loaded: it does not change under a process
def commit() -> dict[str, Any]:
    """The commit of the checkout, and whether tracked files differ from it, results aside.

    Outside a checkout, as in an installed wheel, the version instead.
    """
    if not (ROOT / ".git").exists():  # a repository around the installation is another project's
        return {"commit": None, "dirty": None, "version": __version__}
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "-uno", "--", ":/", *RESULTS)
    return {"commit": head, "dirty": bool(changed) if head else None}


@cache
def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that a result may depend on."""
    found: dict[str, str | None] = {"python": platform.python_version(), "tandem": __version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def host() -> dict[str, Any]:
    """The machine that the process ran on, without its name."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "executable": sys.executable,
    }


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(ROOT), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


PACKAGES = (
    "traces",
    "models",
    "engine",
    "policies",
    "sim",
    "runtime",
    "tandem",
    "analysis",
    "conf",
)
OURS = [ROOT / name for name in PACKAGES] + [ROOT / "build"]
STARTING, RUNNING, OK = "starting", "running", "ok"
REJECTED, INTERRUPTED, FAILED = "rejected", "interrupted", "failed"
DOES_NOT_FIT = "does_not_fit"
STATES = (STARTING, RUNNING, OK, REJECTED, INTERRUPTED, FAILED, DOES_NOT_FIT)
ANSWERED = (OK, DOES_NOT_FIT)  # another run of the point would give this again


@contextmanager
def run_folder(folder: Path, keeps_rejected: bool = True) -> Iterator[Path]:
    """Yields the folder to write into, and renames it in the end.

    status.json says starting, and running once the block writes so. Meanwhile, and after a kill,
    all lies in `<folder>.running`. In the end it says ok, which the block writes last, or, with the
    traceback, one of: rejected (a ValueError at the start: the settings are wrong, and nothing
    remains unless `keeps_rejected`), does_not_fit, interrupted, failed.

    Raises:
        ValueError: The folder holds something already, or a killed run was left there.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder}: there is something in it already; results are never overwritten"
        )
    aside = running_folder(folder)
    try:
        aside.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{aside}: a run is going on there, or was killed; remove it or take another folder"
        ) from None
    write_status(aside, STARTING)
    try:
        with exits_fail():
            yield aside
    except BaseException as error:
        state = _ending(aside, error)
        if state == REJECTED and not keeps_rejected:
            shutil.rmtree(aside)
        else:
            _write_failure(aside, state, error)
            _rename(aside, folder)
        if state in (REJECTED, INTERRUPTED) or isinstance(error, Usage):
            raise
        if state == DOES_NOT_FIT:
            line = line_of(error)
            raise RunFailed(f"does not fit: {line} (told in {folder}/status.json)") from error
        told = old_imports(error) or f"{type(error).__name__}: {line_of(error)}{_place(error)}"
        raise RunFailed(f"{told} (traceback in {folder}/status.json)") from error
    _rename(aside, folder)


@contextmanager
def sole_user(lock: Path, refusal: str) -> Iterator[None]:
    """Holds a lock file for the block, then removes it; Usage with `refusal` where it is taken."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Usage(refusal) from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # while it is still held


def running_folder(folder: Path) -> Path:
    """Where a run is written until it ends, and where a killed one stays."""
    return folder.with_name(f"{folder.name}.running")


def status_of(folder: Path) -> str | None:
    """What status.json says (see `run_folder`); None where there is none to read, or no status."""
    try:
        found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    status = found.get("status") if isinstance(found, dict) else None
    return status if status in STATES else None


def provenance_in(folder: Path) -> dict[str, Any]:
    """What a run of ours says of itself."""
    return checked_json(folder / "provenance.json")


def checked_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a finished run holds. ValueError where it is not as it was written."""
    found = json.loads(checked_text(path))
    assert isinstance(found, dict)
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON file, readable by people."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def write_status(folder: Path, status: str, **more: str) -> None:
    """How far the run is, or how it ended."""
    write_json(folder / "status.json", {"status": status, **more})


def remove_empty(folder: Path) -> None:
    """Removes the folder if it is empty, and those around it, up to the current one."""
    near = Path(os.path.relpath(folder))
    with suppress(OSError):
        folder.rmdir() if ".." in near.parts else os.removedirs(near)


def _ending(aside: Path, error: BaseException) -> str:
    if not isinstance(error, Exception):
        return INTERRUPTED
    from policies.training.out_of_memory import (
        DoesNotFit,  # where something has failed, not at every start
    )

    if isinstance(error, DoesNotFit):
        return DOES_NOT_FIT
    is_wrong = isinstance(error, ValueError) and status_of(aside) == STARTING
    return REJECTED if is_wrong else FAILED


def _place(error: BaseException) -> str:
    """The deepest line of the traceback in code of the user's own, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [*map(str, OURS), sysconfig.get_path("stdlib")]
    own = [f for f in frames if Path(f.filename).is_file() and not f.filename.startswith((*ours,))]
    own = [f for f in own if "site-packages" not in f.filename]
    return f", in {own[-1].filename}, line {own[-1].lineno}" if own else ""


def _write_failure(aside: Path, state: str, error: BaseException) -> None:
    reason = f"{type(error).__name__}: {line_of(error)}"
    lines = "".join(traceback.format_exception(error))
    write_status(aside, state, error=reason, traceback=lines)


def _rename(aside: Path, folder: Path) -> None:
    if folder.is_dir():
        folder.rmdir()  # Hydra made it, empty
    aside.rename(folder)
