"""Imports a file as a normalised trace, and shows one: `tandem trace import` and `show`."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from traces.files import absent
from traces.import_options import Options
from traces.plain_json import first_row
from traces.records import Drops
from traces.serving.lengths import Limits, read_lengths, sample
from traces.serving.published import READERS, Imported, recorded_kind
from traces.serving.request import Request
from traces.serving.rules import MessageRule, rule_named, spread
from traces.serving.selection import Selection, select
from traces.serving.sessions import Think, with_think
from traces.serving.sharegpt import LAYOUTS, ShareGPT, read_sharegpt
from traces.store import (
    read_sidecar,
    read_trace,
    sha256_of,
    write_trace,
)
from traces.tokenizer import described, tokenizer_for
from traces.training.texts import import_text, inspect_text

KINDS_WITH_SLO = ("lengths", "burstgpt")


def import_trace(source: str | Path, out: str | Path, **options: Any) -> dict[str, Any]:
    """Reads conversations, token lengths, a recorded trace or text; writes a normalised trace.

    Text of kind "text" becomes documents to train on, all other sources become requests.

    Args:
        source: The file to read.
        out: The .parquet file to write; its sidecar lies beside it.
        options: Fields of traces.import_options.Options.

    Returns:
        The sidecar.

    Raises:
        ValueError: The source, the target or an option is unusable; one line.
    """
    source, out, chosen = Path(source), Path(out), Options(**options)
    if not source.is_file():
        raise ValueError(f"{source}: {absent(source)}")
    if out.suffix != ".parquet" or out.resolve() == source.resolve():
        raise ValueError(f"{out}: the trace to write must be another .parquet file")
    kind = _kind_of(source) if chosen.kind == "auto" else chosen.kind
    if kind in READERS and chosen.oversample:
        raise ValueError(f"{source}: a recorded trace cannot be oversampled; its times are its own")
    if kind == "text" and chosen.oversample:
        raise ValueError(f"{source}: text to train on is not oversampled; it is read by epochs")
    if chosen.slo_column is not None and kind not in KINDS_WITH_SLO:
        raise ValueError(
            f"{source}: slo_column is for {' and '.join(KINDS_WITH_SLO)}, not for {kind}"
        )
    if kind == "text":
        return import_text(source, out, chosen)
    read = {**READERS, "lengths": _from_lengths, "sharegpt": _from_sharegpt}[kind]
    requests, origin = read(source, chosen)
    if not requests:
        raise ValueError(f"{source}: no request left of {origin['rows_read']} rows: {_why(origin)}")
    filled = _filled(requests, chosen)
    origin = {
        "kind": kind,
        "source": str(source),
        "source_sha256": sha256_of(source),
        **origin,
        "oversampled": len(filled) - len(requests),
    }
    return write_trace(out, filled, origin)


def inspect_trace(path: str | Path) -> dict[str, Any]:
    """A summary of a trace: lengths, sessions and arrivals of its requests, and its sidecar."""
    sidecar = read_sidecar(path)
    if "documents" in sidecar:
        return inspect_text(Path(path))
    requests = read_trace(path)
    sessions = {r.session for r in requests if r.session is not None}
    arrivals_ns = [r.arrival_ns for r in requests]
    return {
        "path": str(path),
        "requests": len(requests),
        "sessions": len(sessions),
        "prompt_tokens": spread([r.prompt_tokens for r in requests]),
        "output_tokens": spread([r.output_tokens for r in requests]),
        "slo_classes": dict(Counter(r.slo for r in requests if r.slo)),
        "tenants": dict(Counter(r.tenant for r in requests if r.tenant)),
        "has_prompt_ids": all(r.prompt_ids is not None for r in requests),
        "has_prefix_ids": all(r.prefix_ids is not None for r in requests),
        "last_arrival_s": max(arrivals_ns, default=0) / 1e9,
        "sidecar": sidecar,
    }


def _from_sharegpt(source: Path, options: Options) -> Imported:
    rule = _overridden(rule_named(options.rule), options)
    think = Think(mean_s=options.think_s, is_exponential=options.think_exponential)
    if options.oversample and rule.is_closed_loop:
        raise ValueError(f"{rule.name} cannot be oversampled: a turn belongs to one session")
    tokenizer = tokenizer_for(source, options.tokenizer, options.bos_token)
    held = read_sharegpt(source, options.max_message_chars)
    seed = rule.shuffle_seed if options.seed is None else options.seed
    seed = seed if options.shuffle else None
    selection = select(
        held.conversations,
        rule,
        tokenizer,
        seed=seed,
        limit=options.limit,
        keep_ids=options.keep_ids,
    )
    origin = {
        **_account(held, selection),
        "rule": asdict(rule),
        "shuffle_seed": seed,
        "limit": options.limit,
        "tokenizer": described(tokenizer),
        "think": asdict(think) if rule.is_closed_loop else None,
    }
    return with_think(selection.requests, think, options.seed or 0), origin


def _from_lengths(source: Path, options: Options) -> Imported:
    limits = Limits(options.min_tokens or 1, None, options.max_total_tokens)
    seed = options.seed if options.shuffle else None
    lengths = read_lengths(source, limits, options.keep_ids, options.slo_column)
    lengths = sample(lengths, options.limit, seed)
    origin = {
        "rows_read": lengths.rows_read,
        "rows_kept": len(lengths.requests),
        "rows_dropped": dict(lengths.rows_dropped),
        "limits": asdict(limits),
        "sample_seed": seed,
        "limit": options.limit,
    }
    return lengths.requests, origin


def _overridden(rule: MessageRule, options: Options) -> MessageRule:
    given = {name: getattr(options, name) for name in ("max_total_tokens", "min_tokens")}
    return replace(rule, **{name: value for name, value in given.items() if value is not None})


def _account(held: ShareGPT, selection: Selection) -> dict[str, Any]:
    """The account of rows and of pairs: read = kept + dropped, for both."""
    drops = Drops(held.rows_read)
    for row, reason in sorted((held.faults | selection.faults).items()):
        drops.drop(reason, row)
    assert selection.pairs_read == len(selection.requests) + selection.pairs_dropped.total()
    return {
        **drops.account(selection.rows_kept),
        "pairs_read": selection.pairs_read,
        "pairs_kept": len(selection.requests),
        "pairs_dropped": dict(selection.pairs_dropped),
        "noted": dict(selection.noted),
    }


def _filled(requests: list[Request], options: Options) -> list[Request]:
    """The requests, with more drawn again up to the limit where `oversample` asks for it."""
    missing = (options.limit or 0) - len(requests)
    if not options.oversample or missing <= 0:
        return requests
    repeated = random.Random(options.seed or 0).choices(requests, k=missing)
    return [replace(r, request_id=number) for number, r in enumerate([*requests, *repeated])]


def _kind_of(source: Path) -> str:
    if kind := recorded_kind(source):
        return kind
    if source.name.endswith((".txt", ".txt.gz")):
        return "text"
    if source.name.endswith((".csv", ".csv.gz", ".parquet")):
        return "lengths"
    if not source.name.endswith((".jsonl", ".jsonl.gz")):
        return "sharegpt"
    row = first_row(source)
    is_chat = not isinstance(row, dict) or not LAYOUTS.keys().isdisjoint(row)
    return "sharegpt" if is_chat else "lengths"


def _why(origin: dict[str, Any]) -> str:
    dropped: dict[str, int] = origin["rows_dropped"]
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "no rows"
