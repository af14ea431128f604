"""Recorded traces by kind: the columns that identify each, and its reader.

Azure LLM inference traces and BurstGPT are read here, Mooncake and ServeGen in modules of their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from traces.import_options import Options
from traces.records import (
    NS_PER_S,
    Record,
    Unusable,
    at_ns,
    header,
    nanoseconds,
    records,
    whole_number,
)
from traces.serving.lengths import Limits
from traces.serving.mooncake import read_mooncake
from traces.serving.recorded import Parsed, RecordRows, read_rows, requests_of
from traces.serving.request import Request
from traces.serving.servegen import draw

AZURE_COLUMNS = (
    ("TIMESTAMP", "arrival_s"),
    ("ContextTokens", "prompt_tokens"),
    ("GeneratedTokens", "output_tokens"),
)
SECONDS = (("arrival_s",),)  # in extracts: seconds also where they are integers
BURSTGPT_COLUMNS = (("Timestamp",), ("Model",), ("Request tokens",), ("Response tokens",))
OPTIONAL = (("Total tokens",), ("Log Type",))
CLASSES = {"Model": 1, "Log Type": 5}  # columns that may be SLO classes, by place in a record
FAILED = "failed: no response tokens"
Imported = tuple[list[Request], dict[str, Any]]  # the requests, and their part of the sidecar
KIND_COLUMNS = {  # columns that only one kind has
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
    "mooncake": {"hash_ids"},
    "servegen": {"client_id", "iat_dist", "shape", "scale"},
}
SUFFIXES = (".csv", ".csv.gz", ".parquet", ".jsonl", ".jsonl.gz")


def read_azure(path: Path, limits: Limits) -> RecordRows:
    """Rows of an Azure .csv(.gz) or .parquet; TIMESTAMP may be text or a Parquet date.

    Extracts have arrival_s (seconds), prompt_tokens and output_tokens instead.
    """
    return read_rows(records(path, AZURE_COLUMNS, SECONDS), _parsed, limits)


def _parsed(record: Record) -> Parsed:
    stamp, prompt, output, seconds = record
    time_ns = at_ns(stamp) if seconds is None else nanoseconds(seconds, NS_PER_S)
    return time_ns, whole_number("prompt", prompt), whole_number("output", output), None


def read_burstgpt(
    path: Path,
    limits: Limits,
    model: str | None = None,
    log_type: str | None = None,
    slo_column: str | None = None,
) -> RecordRows:
    """Rows of a BurstGPT .csv(.gz) or .parquet, of one `model` or `log_type` if named.

    The SLO class is in `slo_column`, one of CLASSES; None takes the log type, where the file has
    it. A request without response tokens has failed and is dropped, and so is a row whose total is
    not the sum of its parts. Raises ValueError for another `slo_column`.
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
        num_prompt, num_output = whole_number("prompt", prompt), whole_number("output", output)
        if num_output == 0:
            raise Unusable(FAILED)
        if total not in (None, "") and whole_number("total", total) != num_prompt + num_output:
            raise Unusable("total is not request and response tokens")
        return nanoseconds(stamp, NS_PER_S), num_prompt, num_output, None

    def slo_of(record: Record) -> str:
        return str(record[at] or "")

    return read_rows(records(path, BURSTGPT_COLUMNS, OPTIONAL), parsed, limits, slo_of)


def recorded_kind(source: Path) -> str | None:
    """The kind that the columns of a source identify; None where they identify none."""
    if not source.name.endswith(SUFFIXES):
        return None
    names = set(header(source))
    return next((kind for kind, columns in KIND_COLUMNS.items() if columns <= names), None)


def _azure(source: Path, options: Options) -> Imported:
    return _with_options(*requests_of(read_azure(source, _limits(options)), options), options)


def _burstgpt(source: Path, options: Options) -> Imported:
    chosen = (options.model, options.log_type, options.slo_column)
    rows = read_burstgpt(source, _limits(options), *chosen)
    requests, origin = _with_options(*requests_of(rows, options), options)
    return requests, {**origin, "model": options.model, "log_type": options.log_type}


def _mooncake(source: Path, options: Options) -> Imported:
    found = read_mooncake(source, _limits(options), options.time_unit, options.block_tokens)
    rows, block_tokens, notes = found
    requests, origin = _with_options(*requests_of(rows, options, block_tokens), options)
    return requests, {**origin, **notes}


def _servegen(source: Path, options: Options) -> Imported:
    at_ns, pairs, account = draw(source, options, _limits(options))
    requests = [
        Request(number, time, prompt, output)
        for number, (time, (prompt, output)) in enumerate(
            zip(at_ns.tolist(), pairs.tolist(), strict=True)
        )
    ]
    return _with_options(requests, account, options)


READERS: dict[str, Callable[[Path, Options], Imported]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "servegen": _servegen,
}


def _limits(options: Options) -> Limits:
    return Limits(options.min_tokens or 1, None, options.max_total_tokens)


def _with_options(requests: list[Request], account: dict[str, Any], options: Options) -> Imported:
    """The requests, and their account with the options that decide the result."""
    chosen = {name: getattr(options, name) for name in ("start_s", "duration_s", "rate", "limit")}
    return requests, {**account, "limits": asdict(_limits(options)), **chosen}
