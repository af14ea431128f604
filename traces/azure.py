"""Azure's LLM inference traces: when, how many tokens in, how many out.

Columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset, CC-BY-4.0).
"""

from __future__ import annotations

from pathlib import Path

from traces.cells import NS_PER_S, at_ns, nanoseconds, whole
from traces.lengths import Limits
from traces.records import Record, records
from traces.rows import Parsed, Rows, read_rows

COLUMNS = (
    ("TIMESTAMP", "arrival_s"),
    ("ContextTokens", "prompt_tokens"),
    ("GeneratedTokens", "output_tokens"),
)
SECONDS = (("arrival_s",),)  # of extracts, also where they are whole: no nanoseconds of a date


def read_azure(path: Path, limits: Limits) -> Rows:
    """Rows of a .csv(.gz) or .parquet of the trace; TIMESTAMP may be text or a Parquet date.

    Reads extracts too, which have arrival_s (seconds), prompt_tokens, output_tokens.
    """
    return read_rows(records(path, COLUMNS, SECONDS), _parsed, limits)


def _parsed(record: Record) -> Parsed:
    stamp, prompt, output, seconds = record
    time_ns = at_ns(stamp) if seconds is None else nanoseconds(seconds, NS_PER_S)
    return time_ns, whole("prompt", prompt), whole("output", output), None
