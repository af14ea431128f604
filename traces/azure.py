"""Azure's LLM inference traces: when, how many tokens in, how many out.

Columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset, CC-BY-4.0).
"""

from __future__ import annotations

from pathlib import Path

from traces.cells import at_ns, whole
from traces.lengths import Limits
from traces.records import Record, records
from traces.rows import Parsed, Rows, read_rows

COLUMNS = (
    ("TIMESTAMP", "arrival_s"),
    ("ContextTokens", "prompt_tokens"),
    ("GeneratedTokens", "output_tokens"),
)


def read_azure(path: Path, limits: Limits) -> Rows:
    """Rows of a .csv(.gz) or .parquet of the trace; TIMESTAMP may be text or a Parquet date.

    Reads extracts too, which have arrival_s (seconds), prompt_tokens, output_tokens.
    """
    return read_rows(records(path, COLUMNS), _parsed, limits)


def _parsed(record: Record) -> Parsed:
    stamp, prompt, output = record
    return at_ns(stamp), whole("prompt", prompt), whole("output", output), None
