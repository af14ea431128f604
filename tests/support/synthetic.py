"""Run folders made by a toy engine whose every number can be computed by hand.

One device, one compute lane. A step prefills all that has arrived and waits, whole; if nothing
waits, it decodes one token of every running request. A prefill takes `prefill_ns` per token, a
decode step `decode_ns`, times a factor per step. KV takes one page of 16 tokens and 1000 bytes;
weights take 5000 bytes of 100 kB (or as told).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.results.schema import TABLES, marked

PAGE_TOKENS, PAGE_BYTES, WEIGHT_BYTES = 16, 1000, 5000
MS = 1_000_000

Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Toy:
    """What a toy run serves and how long its steps take."""

    arrivals_ns: Sequence[int]
    prompts: Sequence[int]
    outputs: Sequence[int]
    prefill_ns: int = MS
    decode_ns: int = 5 * MS
    host_ns: int = 0
    factor: Callable[[int], float] = field(default=lambda step: 1.0)
    backend: str = "sim"
    capacity_bytes: int = 100_000
    plans: Sequence[dict[str, Any]] | None = None  # played back where given
    provenance: dict[str, Any] = field(default_factory=dict)


TWO = Toy(arrivals_ns=(0, 5 * MS), prompts=(10, 10), outputs=(3, 2))


def write(folder: Path, toy: Toy = TWO, **changes: Any) -> Path:
    """Writes the run folder of a toy, with some of its fields changed."""
    toy = replace(toy, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    rows = _serve(toy)
    for name, schema in TABLES.items():
        pq.write_table(pa.Table.from_pylist(rows[name], marked(schema)), folder / f"{name}.parquet")
    provenance = {"backend": toy.backend, "trace_hash": f"{hash(tuple(toy.prompts))}"}
    texts = {
        "provenance.json": json.dumps(provenance | toy.provenance),
        "status.json": json.dumps({"status": "ok", "error": None}),
        "metrics.json": "{}",
        "config.yaml": f"backend:\n  name: {toy.backend}\nseed: 0\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _serve(toy: Toy) -> Rows:
    rows: Rows = {name: [] for name in TABLES}
    now, tokens = 0, {i: [] for i in range(len(toy.prompts))}
    scheduled: dict[int, int] = {}
    _remember(rows, toy, now, -1, 0)
    while any(len(tokens[i]) < toy.outputs[i] for i in tokens):
        step = len(rows["plans"])
        batch = _decide(toy, now, tokens, scheduled, step)
        now = max(now, *(toy.arrivals_ns[i] for i in batch))
        now = _step(rows, toy, now, step, batch, tokens)
        for i in batch:
            scheduled.setdefault(i, rows["plans"][-1]["at_ns"])
            tokens[i].append(now)
        held = [i for i in tokens if tokens[i] and len(tokens[i]) < toy.outputs[i]]
        pages = sum(-(-(toy.prompts[i] + len(tokens[i])) // PAGE_TOKENS) for i in held)
        _remember(rows, toy, now, step, pages)
    rows["requests"] = [_request(toy, i, tokens[i], scheduled[i]) for i in tokens]
    return rows


def _decide(toy: Toy, now: int, tokens: dict, scheduled: dict, step: int) -> list[int]:
    if toy.plans is not None:
        return json.loads(toy.plans[step]["body"])["jobs"]
    new = [i for i in tokens if i not in scheduled]
    running = [i for i in tokens if tokens[i] and len(tokens[i]) < toy.outputs[i]]
    if not running:
        now = max(now, min(toy.arrivals_ns[i] for i in new))
    return [i for i in new if toy.arrivals_ns[i] <= now] or running


def _step(rows: Rows, toy: Toy, now: int, step: int, batch: list, tokens: dict) -> int:
    prefill = sum(toy.prompts[i] for i in batch if not tokens[i])
    decode = sum(1 for i in batch if tokens[i])
    start = now + toy.host_ns
    cost = prefill * toy.prefill_ns + (toy.decode_ns if decode else 0)
    end = start + round(cost * toy.factor(step))
    plan = {"step": step, "device": 0, "at_ns": now, "grows": "[]"}
    rows["plans"].append(plan | {"body": json.dumps({"jobs": batch})})
    row = {"step": step, "device": 0, "lane": "compute", "issue_ns": now, "start_ns": start}
    row |= {"end_ns": end, "host_ns": toy.host_ns, "prefill_tokens": prefill, "nbytes": 0}
    row |= {"decode_tokens": decode, "samples": len(batch), "jobs": batch}
    rows["steps"].append(row | {"tokens": [toy.prompts[i] if not tokens[i] else 1 for i in batch]})
    return end


def _remember(rows: Rows, toy: Toy, at_ns: int, step: int, pages: int) -> None:
    row = {"at_ns": at_ns, "cause": "settle", "step": step, "tier": "gpu", "device": 0}
    row |= {"capacity_bytes": toy.capacity_bytes, "coming_bytes": 0, "kv_pages": pages}
    row |= {f"{kind}_bytes": 0 for kind in ("gradient", "optimizer", "activation", "buffer")}
    row |= {"kv_bytes": pages * PAGE_BYTES, "weight_bytes": WEIGHT_BYTES}
    used = row["kv_bytes"] + WEIGHT_BYTES
    measured = None if toy.backend == "sim" else used
    free = toy.capacity_bytes - used
    rows["memory"].append(row | {"free_bytes": free, "measured_bytes": measured})


def _request(toy: Toy, i: int, token_ns: list[int], scheduled_ns: int) -> dict[str, Any]:
    row = {"request_id": i, "prompt_tokens": toy.prompts[i], "output_tokens": len(token_ns)}
    row |= {"arrival_ns": toy.arrivals_ns[i], "scheduled_ns": scheduled_ns, "turn": 0, "slo": ""}
    row |= {"first_token_ns": token_ns[0], "finish_ns": token_ns[-1], "token_ns": token_ns}
    return row | {"restarts": 0, "swaps": 0, "cached_tokens": 0, "status": "finished"}
