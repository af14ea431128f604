"""`tandem trace import|export|show`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

SWITCHES = {
    "shuffle": "--no-shuffle",
    "keep_ids": "--no-ids",
    "spread": "--no-spread",
}  # on unless said otherwise
WHOLES = ("limit", "seed", "max_total_tokens", "min_tokens", "max_message_chars", "block_tokens")
REALS = ("think_s", "start_s", "duration_s", "rate")
NO_LINES: Mapping[str, list[int]] = {}
HELP = {
    "tokenizer": "tokenizer.json(.gz) or its folder; text needs one",
    "rule": "which messages become requests; see the list below",
    "kind": "sharegpt (OpenAI's messages, too), text (to train on), lengths, azure, burstgpt, "
    "mooncake, servegen or auto",
    "limit": "stop at this many requests, or documents",
    "shuffle": "keep the order of the file",
    "seed": "of the shuffle; the rule's own if not given",
    "oversample": "draw again until the limit is reached, as vLLM does",
    "keep_ids": "store lengths only",
    "max_total_tokens": "longest prompt and output together",
    "min_tokens": "shortest prompt, and output",
    "think_s": "closed loop: mean think time in seconds",
    "think_exponential": "closed loop: exponential think times instead of equal ones",
    "bos_token": "token before every prompt, or document; '' for none",
    "max_message_chars": "longest message, or document, that is tokenized",
    "start_s": "recorded traces: leave out what came before",
    "duration_s": "recorded traces: take this much of the time",
    "rate": "recorded traces: mean requests per second, instead of the recorded rate",
    "spread": "recorded traces: keep stamps as they were rounded",
    "model": "BurstGPT: one model's requests, ChatGPT or GPT-4",
    "log_type": "BurstGPT: one log type's requests",
    "time_unit": "Mooncake: ms, s or auto",
    "block_tokens": "Mooncake: prompt tokens per hash id; found out if not given",
    "slo_column": "column of the SLO classes: of lengths [slo], of BurstGPT [Log Type] or Model",
    "text_field": "text to train on: the field of its rows that holds it",
    "sample_by": "plain text to train on: a document per line, paragraph or document (whole file)",
    "eos_token": "text to train on: token behind every document; the tokenizer's own if not given",
    "lengths": "ServeGen: a length histogram, or a table of lengths; default: the one beside",
}


def main(words: Sequence[str]) -> int:
    """Imports or shows; returns the exit code."""
    arguments = _parser().parse_args(words)
    return int(arguments.carry_out(arguments))


def _parser() -> argparse.ArgumentParser:
    from traces.import_options import Options
    from traces.serving.rules import RULES

    parser = argparse.ArgumentParser(prog="tandem trace", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="import|export|show")
    rules = "\n".join(f"  {name}" for name in RULES)
    imports = verbs.add_parser(
        "import",
        help="text, a table of lengths or a recorded trace to a normalised Parquet trace",
        epilog=f"rules:\n{rules}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    imports.add_argument(
        "source", help="ShareGPT or OpenAI JSON, .csv, .parquet, .jsonl of lengths, any text"
    )
    imports.add_argument("--out", required=True, help="the .parquet to write (sidecar beside it)")
    for field in fields(Options):
        _add_option(imports, field.name, field.default)
    imports.set_defaults(carry_out=_import)
    exports = verbs.add_parser("export", help="a normalised trace to Mooncake JSON lines")
    exports.add_argument("trace", help="its .parquet")
    exports.add_argument("--out", required=True, help="the .jsonl to write")
    exports.add_argument("--block-tokens", type=int, help="per hash id [the trace's, else 512]")
    exports.set_defaults(carry_out=_export)
    shows = verbs.add_parser("show", help="what a normalised trace holds")
    shows.add_argument("trace", help="its .parquet")
    shows.set_defaults(carry_out=_show)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    flag = SWITCHES.get(name, "--" + name.replace("_", "-"))
    about = HELP[name] + ("" if default in (None, False, True, MISSING) else f" [{default}]")
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        parser.add_argument(flag, dest=name, action=action, help=about)
        return
    kind = float if name in REALS else int if name in WHOLES else str
    parser.add_argument(flag, dest=name, type=kind, default=default, help=about)


def _import(chosen: argparse.Namespace) -> int:
    from traces.import_options import Options
    from traces.importing import import_trace

    options = {field.name: getattr(chosen, field.name) for field in fields(Options)}
    sidecar = import_trace(chosen.source, chosen.out, **options)
    held = "documents" if "documents" in sidecar else "requests"
    print(f"{chosen.out}: {sidecar[held]} {held}", *accounts(sidecar), sep="\n")
    return 0


def accounts(sidecar: Mapping[str, Any]) -> list[str]:
    """What became of the rows of an imported file, by its sidecar, in lines."""
    rows, pairs = sidecar.get("rows_dropped", {}), sidecar.get("pairs_dropped", {})
    told = _account("rows read", sidecar["rows_read"], rows, sidecar.get("first_lines_dropped", {}))
    if not pairs.items() <= rows.items():  # else each row had one pair, and went with it
        told += _account("pairs read", sidecar["pairs_read"], pairs)
    if drawn := sidecar.get("requests_dropped"):
        told += _account("requests drawn", sidecar["requests_drawn"], drawn)
    if noted := sidecar.get("noted"):
        told += ["kept, though odd:", *_reasons(noted)]
    if again := sidecar.get("oversampled"):
        told.append(f"{again} requests drawn again, to reach the limit")
    if (how := sidecar.get("time_unit_by", "given")) != "given":
        told.append(f"stamps count {sidecar['time_unit']} ({how}; --time-unit says it)")
    return told


def _account(
    what: str, count: int, dropped: Mapping[str, int], lines: Mapping[str, list[int]] = NO_LINES
) -> list[str]:
    lost = sum(dropped.values())
    return [f"{what} {count} = kept {count - lost} + dropped {lost}", *_reasons(dropped, lines)]


def _reasons(counts: Mapping[str, int], lines: Mapping[str, list[int]] = NO_LINES) -> list[str]:
    """The most frequent first, with the first lines or rows of each where they are known."""
    told = []
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        first = ", ".join(map(str, lines.get(reason, [])))
        told.append(f"  {count:>7} {reason}{f' (first at {first})' if first else ''}")
    return told


def _export(chosen: argparse.Namespace) -> int:
    from traces.serving.mooncake import write_mooncake
    from traces.store import read_trace

    requests = read_trace(chosen.trace)
    warning = write_mooncake(chosen.out, requests, chosen.block_tokens)
    print(f"{chosen.out}: {len(requests)} requests", *([warning] if warning else []), sep="\n")
    return 0


def _show(chosen: argparse.Namespace) -> int:
    from traces.importing import inspect_trace

    print(json.dumps(inspect_trace(Path(chosen.trace)), indent=2, default=str))
    return 0
