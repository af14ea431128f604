"""The recorded traces that Tandem knows by name: how each is told, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from traces.azure import read_azure
from traces.burstgpt import read_burstgpt
from traces.lengths import Limits
from traces.mooncake import read_mooncake
from traces.options import Options
from traces.recorded import requests_of
from traces.records import header
from traces.request import Request
from traces.servegen import draw

Imported = tuple[list[Request], dict[str, Any]]  # the requests, and their part of the sidecar
SIGNS = {  # columns that only one kind has
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
    "mooncake": {"hash_ids"},
    "servegen": {"client_id", "iat_dist", "shape", "scale"},
}
SUFFIXES = (".csv", ".csv.gz", ".parquet", ".jsonl", ".jsonl.gz")


def recorded_kind(source: Path) -> str | None:
    """The kind that the source's columns show, None if they show none."""
    if not source.name.endswith(SUFFIXES):
        return None
    names = set(header(source))
    return next((kind for kind, sign in SIGNS.items() if sign <= names), None)


def _azure(source: Path, options: Options) -> Imported:
    return _told(*requests_of(read_azure(source, _limits(options)), options), options)


def _burstgpt(source: Path, options: Options) -> Imported:
    chosen = (options.model, options.log_type, options.slo_column)
    rows = read_burstgpt(source, _limits(options), *chosen)
    requests, origin = _told(*requests_of(rows, options), options)
    return requests, {**origin, "model": options.model, "log_type": options.log_type}


def _mooncake(source: Path, options: Options) -> Imported:
    found = read_mooncake(source, _limits(options), options.time_unit, options.block_tokens)
    rows, block_tokens, notes = found
    requests, origin = _told(*requests_of(rows, options, block_tokens), options)
    return requests, {**origin, **notes}


def _servegen(source: Path, options: Options) -> Imported:
    at_ns, pairs, account = draw(source, options, _limits(options))
    requests = [
        Request(number, time, prompt, output)
        for number, (time, (prompt, output)) in enumerate(
            zip(at_ns.tolist(), pairs.tolist(), strict=True)
        )
    ]
    return _told(requests, account, options)


READERS: dict[str, Callable[[Path, Options], Imported]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "servegen": _servegen,
}


def _limits(options: Options) -> Limits:
    return Limits(options.min_tokens or 1, None, options.max_total_tokens)


def _told(requests: list[Request], account: dict[str, Any], options: Options) -> Imported:
    """The account, and the options that decide the result."""
    said = {name: getattr(options, name) for name in ("start_s", "duration_s", "rate", "limit")}
    return requests, {**account, "limits": asdict(_limits(options)), **said}
