"""Imported traces, kept by the contents of all that their import reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.fingerprint import content_hash
from traces.store import SCHEMA_VERSION, sha256_of, sidecar_path

READ = ("tokenizer", "lengths")  # options of an import that name files
IMPORT_VERSION = 3  # to be raised where an import keeps something else than before


def cached_import(path: Path, options: Mapping[str, Any], cache: Path) -> Path:
    """The normalised trace that `import_trace` makes of the file, made where it is not there.

    The sidecar is written last: where it is missing, somebody was killed over the import, or is at
    it. `options` are fields of traces.options.Options.
    """
    read = [content_hash(Path(str(options[name]))) for name in READ if options.get(name)]
    versions = f"{SCHEMA_VERSION} {IMPORT_VERSION}"
    made_of = f"{versions} {sha256_of(path)} {read} {sorted(options.items())}"
    key = hashlib.sha256(made_of.encode()).hexdigest()
    kept = cache / f"{path.stem}-{key[:16]}.parquet"
    if not sidecar_path(kept).is_file():
        from traces.import_ import import_trace

        import_trace(path, kept, **options)
    return kept
