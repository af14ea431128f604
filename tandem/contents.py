"""What lies at a path, as one hash: results depend on contents, not on names."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from traces.store import sha256_of


@cache
def content_hash(path: Path) -> str:
    """The hash of a file, or of the files of a folder; once per process and path."""
    if path.is_dir():
        found = [[str(p.relative_to(path)), content_hash(p)] for p in sorted(path.rglob("*"))]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()
    if not path.is_file():
        return "missing"
    return sha256_of(path)
