"""Small files of recorded traces for tests, and what importing them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traces.importing import import_trace
from traces.serving.request import Request
from traces.store import read_trace

S = 1_000_000_000
MS = 1_000_000
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def imported(source: Path, **options: Any) -> tuple[dict[str, Any], list[Request]]:
    """Sidecar and requests of a file; no row of it may be lost without a reason."""
    out = source.with_name("out.parquet")
    sidecar = import_trace(source, out, **options)
    total = sum(sidecar["rows_dropped"].values())
    assert sidecar["rows_read"] == sidecar["rows_kept"] + total
    return sidecar, read_trace(out)


def written(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mooncake(path: Path, *rows: tuple[Any, int, int, Any]) -> Path:
    """A Mooncake file: timestamp, input length, output length, hash ids."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return written(path, *(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
