"""BurstGPT: two months of requests to ChatGPT and GPT-4 at one campus (HPMLL/BurstGPT, CC-BY-4.0).

Columns Timestamp (whole seconds), Model, Request tokens, Response tokens, Total tokens, Log Type.
"""

from __future__ import annotations

from pathlib import Path

from traces.cells import NS_PER_S, Unusable, nanoseconds, whole
from traces.lengths import Limits
from traces.records import Record, records
from traces.rows import Parsed, Rows, read_rows

COLUMNS = (("Timestamp",), ("Model",), ("Request tokens",), ("Response tokens",))
OPTIONAL = (("Total tokens",), ("Log Type",))
CLASSES = {"Model": 1, "Log Type": 5}  # columns that may be SLO classes, and their places
FAILED = "failed: no response tokens"


def read_burstgpt(
    path: Path,
    limits: Limits,
    model: str | None = None,
    log_type: str | None = None,
    slo_column: str | None = None,
) -> Rows:
    """Rows of the .csv(.gz) or .parquet: of one model ("ChatGPT", "GPT-4") or log type if named.

    Their SLO class is the log type, where the file has it, or what `slo_column` names of CLASSES.
    A request without response tokens has failed and is dropped; so is a row whose total is not the
    sum of its parts. ValueError for another `slo_column`.
    """
    if slo_column is not None and slo_column not in CLASSES:
        raise ValueError(f"slo_column={slo_column}: BurstGPT has {' and '.join(CLASSES)}")
    at = CLASSES[slo_column or "Log Type"]

    def parsed(record: Record) -> Parsed:
        stamp, of_model, prompt, output, total, of_type = record
        if model is not None and of_model != model:
            raise Unusable(f"model is not {model}")
        if log_type is not None and of_type != log_type:
            raise Unusable(f"log type is not {log_type}")
        num_prompt, num_output = whole("prompt", prompt), whole("output", output)
        if num_output == 0:
            raise Unusable(FAILED)
        if total not in (None, "") and whole("total", total) != num_prompt + num_output:
            raise Unusable("total is not request and response tokens")
        return nanoseconds(stamp, NS_PER_S), num_prompt, num_output, None

    def slo_of(record: Record) -> str:
        return str(record[at] or "")

    return read_rows(records(path, COLUMNS, OPTIONAL), parsed, limits, slo_of)
