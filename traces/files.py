"""Files of results: written whole or not at all, and checked against their hashes when read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NAME = "hashes.json"  # in a folder: the SHA-256 of its files, by name
log = logging.getLogger(__name__)


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to; it replaces `path` when the block ends.

    A block that fails leaves nothing behind. An OSError names the path, also where the disk is full
    and the writing library names no file.
    """
    with naming(path), replacing(path) as temporary:
        yield temporary


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """As `atomically`, for a block that does more than to write: its errors are its own."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with naming(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the path into an OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all."""
    with atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def absent(path: Path, what: str = "file") -> str:
    """Why there is no file to read at a path."""
    return "that is a folder; name a file in it" if path.is_dir() else f"no such {what}"


def seal(folder: Path, *names: str) -> None:
    """Adds the hashes of these files to the hashes of their folder."""
    found = {name: _hash((folder / name).read_bytes()) for name in names}
    known = _hashes(folder / NAME) if (folder / NAME).is_file() else {}
    write_text(folder / NAME, json.dumps(known | found, indent=1) + "\n")


def is_sealed(folder: Path) -> bool:
    """Whether a folder keeps hashes of its files; folders of earlier versions keep none."""
    return (folder / NAME).is_file()


def checked_bytes(path: Path) -> bytes:
    """The bytes of a file whose folder keeps its hash.

    The log warns once of a folder without hashes. Raises a ValueError of one line where the bytes
    are not those that were written.
    """
    content = path.read_bytes()
    kept = path.parent / NAME
    if not kept.is_file():
        _warn_of(path.parent)
        return content
    expected = _hashes(kept).get(path.name)
    if expected is None:
        raise ValueError(f"{path}: {kept} has no hash of it: it is not of this run; run it again")
    if _hash(content) != expected:
        raise ValueError(
            f"{path} is damaged, or was changed (not the bytes of its hash in {NAME}): run it again"
        )
    return content


def checked_text(path: Path) -> str:
    """The text of a file whose folder keeps its hash. Raises ValueError where it is not UTF-8."""
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
