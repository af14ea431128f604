"""Azure's LLM inference traces: when, how many tokens in, how many out.

Columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure/AzurePublicDataset, CC-BY-4.0).
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from traces.lengths import Limits
from traces.records import Record, records
from traces.rows import Parsed, Rows, Unusable, nanoseconds, read_rows, whole

NS_PER_S = 1_000_000_000
COLUMNS = (
    ("TIMESTAMP", "arrival_s"),
    ("ContextTokens", "prompt_tokens"),
    ("GeneratedTokens", "output_tokens"),
)
EPOCH = datetime(1970, 1, 1)
# up to nine digits of a second (the 2023 files have seven), an offset from UTC in those of 2024
DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?")


def read_azure(path: Path, limits: Limits) -> Rows:
    """Rows of a .csv(.gz) or .parquet of the trace; TIMESTAMP may be text or a Parquet date.

    Reads extracts too, which have arrival_s (seconds), prompt_tokens, output_tokens.
    """
    return read_rows(records(path, COLUMNS), _parsed, limits)


def _parsed(record: Record) -> Parsed:
    stamp, prompt, output = record
    return at_ns(stamp), whole("prompt", prompt), whole("output", output), None


def at_ns(stamp: Any) -> int:
    """Nanoseconds since 1970 of a date and time; whole numbers are that already, floats seconds."""
    if stamp is None or stamp == "":
        raise Unusable("timestamp missing")
    if not isinstance(stamp, str):
        return nanoseconds(stamp, 1 if isinstance(stamp, int) else NS_PER_S)
    if found := DATE.fullmatch(stamp.strip()):
        return _date_ns(*found.groups())
    return nanoseconds(stamp, NS_PER_S)


def _date_ns(
    date: str, fraction: str | None, sign: str | None, hours: str | None, minutes: str | None
) -> int:
    try:
        seconds = (datetime.fromisoformat(date) - EPOCH) // timedelta(seconds=1)
    except ValueError as error:
        raise Unusable("timestamp is no date and time") from error
    if sign is not None:
        ahead = int(hours or 0) * 3600 + int(minutes or 0) * 60
        seconds -= ahead if sign == "+" else -ahead
    return seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))
