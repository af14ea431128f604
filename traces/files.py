"""Files of results: written whole or not at all, and read only as they were written."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NAME = "hashes.json"  # of a folder: the SHA-256 of its files, by name
log = logging.getLogger(__name__)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a path beside this one to write to, which takes its place when the block ends.

    Nothing is left of a block that fails. OSError names the path, also where the disk is full and
    the library that wrote names none.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield aside
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block that names no file names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all."""
    with whole(path) as aside:
        aside.write_text(text, encoding="utf-8")


def absent(path: Path, what: str = "file") -> str:
    """Why there is no file to read at a path."""
    return "that is a folder; name a file in it" if path.is_dir() else f"no such {what}"


def seal(folder: Path, *names: str) -> None:
    """Keeps the hashes of these files of a folder, beside those that it keeps already."""
    found = {name: _hash((folder / name).read_bytes()) for name in names}
    known = _hashes(folder / NAME) if (folder / NAME).is_file() else {}
    write_text(folder / NAME, json.dumps(known | found, indent=1) + "\n")


def is_sealed(folder: Path) -> bool:
    """Whether a folder keeps hashes of its files; those of earlier versions keep none."""
    return (folder / NAME).is_file()


def checked_bytes(path: Path) -> bytes:
    """The bytes of a file whose folder keeps its hash.

    A folder that keeps no hashes is told once in the log. ValueError in one line where the bytes
    are not those that were written.
    """
    content = path.read_bytes()
    kept = path.parent / NAME
    if not kept.is_file():
        _warn_of(path.parent)
        return content
    wanted = _hashes(kept).get(path.name)
    if wanted is None:
        raise ValueError(f"{path}: {kept} has no hash of it: it is not of this run; run it again")
    if _hash(content) != wanted:
        raise ValueError(
            f"{path} is damaged, or was changed (not the bytes of its hash in {NAME}): run it again"
        )
    return content


def checked_text(path: Path) -> str:
    """The same as text. ValueError where it is not UTF-8."""
    try:
        return checked_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error.reason})") from error


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hashes(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): run it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no JSON object): run it again")
    return found


@cache
def _warn_of(folder: Path) -> None:
    log.warning(
        "%s keeps no %s, so nothing tells whether its files are as they were written: made by an "
        "earlier version, they are taken as they are",
        folder,
        NAME,
    )
