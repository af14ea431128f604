"""Mooncake's JSON lines, read and written; most trace replayers know them.

Keys are timestamp, input_length, output_length and hash_ids (kvcache-ai/Mooncake FAST25,
Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from traces.files import write_text
from traces.records import Record, Unusable, nanoseconds, number_in, records, whole_number
from traces.serving.lengths import Limits
from traces.serving.recorded import Parsed, RecordRows, read_rows
from traces.serving.recorded_times import UNITS_NS, unit_of
from traces.serving.request import Request

COLUMNS = (("input_length", "prompt_tokens"), ("output_length", "output_tokens"))
OPTIONAL = (("timestamp",), ("arrival_s",), ("hash_ids",))  # arrival_s: extracts, in seconds
BLOCK_TOKENS = (512, 16, 32, 64, 128, 256, 1024)  # Mooncake has 512, Alibaba 16
MIN_FITTING = 0.99  # share of rows whose ids must be one per block


def read_mooncake(
    path: Path, limits: Limits, time_unit: str = "auto", block_tokens: int | None = None
) -> tuple[RecordRows, int, dict[str, Any]]:
    """Rows, tokens per block of hash ids (0: no ids), and notes on the file for the sidecar.

    `time_unit` "auto" tells milliseconds, which Mooncake's own files hold, from seconds by the mean
    gap. `block_tokens` None finds the size at which a prompt has one id per block.
    """
    found = list(records(path, COLUMNS, OPTIONAL))
    readable = [record for _, record in found if record is not None]
    unit, how = (time_unit, "given") if time_unit != "auto" else _unit_of(readable)
    block = block_tokens or _block_of(path, readable)

    def parsed(record: Record) -> Parsed:
        prompt, output, stamp, seconds, ids = record
        at_ns = nanoseconds(*((stamp, UNITS_NS[unit]) if seconds is None else (seconds, 10**9)))
        num_prompt, num_output = whole_number("prompt", prompt), whole_number("output", output)
        return at_ns, num_prompt, num_output, _checked_ids(ids, num_prompt, block)

    rows = read_rows(found, parsed, limits)
    return rows, block, {"time_unit": unit, "time_unit_by": how, "block_tokens": block or None}


def _unit_of(lines: Sequence[Record]) -> tuple[str, str]:
    if any(line[3] is not None for line in lines):
        return "s", "column arrival_s"
    return unit_of([line[2] for line in lines])


def _block_of(path: Path, lines: Sequence[Record]) -> int:
    lengths = [(number_in(line[0]) or 0, line[4]) for line in lines if isinstance(line[4], list)]
    counts = [(prompt, len(ids)) for prompt, ids in lengths if prompt > 0]
    if not counts:
        return 0
    for block in BLOCK_TOKENS:
        if sum(-(-prompt // block) == n for prompt, n in counts) >= MIN_FITTING * len(counts):
            return block
    raise ValueError(f"{path}: hash_ids are not one per block of a known size; give block_tokens")


def _checked_ids(ids: Any, prompt_tokens: int, block: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise Unusable("hash ids are not whole numbers")
    if prompt_tokens > 0 and len(ids) > -(-prompt_tokens // block):
        raise Unusable(f"more hash ids than blocks of {block} tokens")
    return tuple(ids)


def write_mooncake(
    path: str | Path, requests: Sequence[Request], block_tokens: int | None = None
) -> str | None:
    """Writes requests as Mooncake lines: integer milliseconds, lengths, hash ids.

    Prefix ids are written as they are. Prompt ids are hashed by block, so that equal beginnings
    have equal ids. A request without either gets fresh ids, so that it shares no block.

    Args:
        path: The file to write, whole or not at all.
        requests: Requests with arrival times.
        block_tokens: Tokens of a block; None takes those of the prefix ids, else 512.

    Returns:
        A warning where a reader may take the milliseconds for seconds, as the format names no unit.

    Raises:
        ValueError: A request is a later turn of a closed loop, whose time only a replay knows; or
            prefix blocks differ in size from each other or from `block_tokens`.
    """
    path = Path(path)
    if turn := next((r for r in requests if r.turn > 0), None):
        raise ValueError(
            f"request {turn.request_id} follows an answer: Mooncake lines have no closed loop; "
            "import the source with rule=multiturn_cumulative"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*_lines(requests, block_tokens)]
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    unit, how = unit_of([line["timestamp"] for line in lines])
    if unit == "ms":
        return None
    return f"its stamps are ms, but by their {how} a reader may take them for s: --time-unit ms"


def _lines(requests: Sequence[Request], block_tokens: int | None) -> Iterator[dict[str, Any]]:
    sizes = {r.prefix_block_tokens for r in requests if r.prefix_ids is not None}
    if len(sizes) > 1:
        raise ValueError(f"prefix blocks of {sorted(sizes)} tokens cannot share one file")
    block = next(iter(sizes), block_tokens or BLOCK_TOKENS[0])
    if block_tokens not in (None, block):
        raise ValueError(
            f"block_tokens is {block_tokens}, but the trace's prefix ids stand for {block} tokens "
            "each; leave it out"
        )
    given = (i for r in requests for i in r.prefix_ids or ())
    fresh = count(1 + max(given, default=-1))
    chains: dict[tuple[int, tuple[int, ...]], int] = {}
    for request in sorted(requests, key=lambda r: r.arrival_ns):
        yield {
            "timestamp": round(request.arrival_ns / UNITS_NS["ms"]),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": _ids(request, block, chains, fresh),
        }


def _ids(
    request: Request,
    block: int,
    chains: dict[tuple[int, tuple[int, ...]], int],
    fresh: Iterator[int],
) -> list[int]:
    """One id per block; an id stands for the tokens of its block and of all blocks before it."""
    if request.prefix_ids is not None:
        ids = list(request.prefix_ids)
    elif request.prompt_ids is not None:
        ids, before = [], -1
        for start in range(0, request.prompt_tokens, block):
            key = (before, request.prompt_ids[start : start + block])
            if key not in chains:
                chains[key] = next(fresh)
            before = chains[key]
            ids.append(before)
    else:
        ids = []
    missing = -(-request.prompt_tokens // block) - len(ids)
    return ids + [next(fresh) for _ in range(missing)]
