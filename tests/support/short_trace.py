"""A trace of a dozen short requests, for command lines that measure: length proves nothing."""

from __future__ import annotations

import random
from pathlib import Path

from traces.serving.request import Request
from traces.store import write_trace

SHORT = ("trace=file", "trace.path=short.parquet")
PRESSED = "budget.kv_pages=16"  # pages of 16 tokens: the longest needs 6, all together some 45


def write_short(folder: Path) -> Path:
    """Writes what SHORT chooses in that folder; returns its path."""
    rng = random.Random(3)
    requests = [Request(i, 0, rng.randint(10, 60), rng.randint(15, 35)) for i in range(12)]
    write_trace(folder / "short.parquet", requests, {"rule": "none"})
    return folder / "short.parquet"
