"""What lies at a path, as one hash: results depend on contents, not on names."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from traces.store import sha256_of


def content_hash(path: Path) -> str:
    """The hash of a file, or of the files of a folder; read again when time or size change."""
    if path.is_dir():
        listed = [[str(p.relative_to(path)), content_hash(p)] for p in sorted(path.rglob("*"))]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    if not path.is_file():
        return "missing"
    found = path.stat()
    return _of_file(path, found.st_mtime_ns, found.st_size)


@cache
def _of_file(path: Path, mtime_ns: int, size_bytes: int) -> str:
    """A sweep asks for the same files at every point; one that was written since has a new key."""
    return sha256_of(path)
