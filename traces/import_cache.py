"""Imported traces, kept by the contents of all that their import reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.store import SCHEMA_VERSION, content_hash, sha256_of, sidecar_path

FILE_OPTIONS = ("tokenizer", "lengths")  # options of an import that name files
IMPORT_VERSION = 3  # to be raised where an import keeps something else than before


def cached_import(path: Path, options: Mapping[str, Any], cache: Path) -> Path:
    """The normalised trace of a file, imported where the cache lacks it.

    A trace is kept under the hash of source, options and versions. The sidecar is written last, so
    a trace without one is an import that was killed or is under way.

    Args:
        path: The source.
        options: Fields of traces.import_options.Options.
        cache: The folder of imported traces.

    Returns:
        The trace in the cache.

    Raises:
        ValueError: The source or an option is unusable; one line.
    """
    hashes = [content_hash(Path(str(options[n]))) for n in FILE_OPTIONS if options.get(n)]
    versions = f"{SCHEMA_VERSION} {IMPORT_VERSION}"
    made_of = f"{versions} {sha256_of(path)} {hashes} {sorted(options.items())}"
    key = hashlib.sha256(made_of.encode()).hexdigest()
    kept = cache / f"{path.stem}-{key[:16]}.parquet"
    if not sidecar_path(kept).is_file():
        from traces.importing import import_trace  # and with it all readers: most runs need none

        import_trace(path, kept, **options)
    return kept
