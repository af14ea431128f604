"""Requests of token counts alone: from a table of lengths, or drawn at random."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from traces.records import Unusable, whole_number
from traces.serving.recorded_times import TIME_COLUMNS, in_order, stamps_in
from traces.serving.request import Request
from traces.tables import read_columns

# Tandem; Vidur; Azure; BurstGPT; Mooncake; LLMServingSim
PROMPT_COLUMNS = (
    "prompt_tokens",
    "num_prefill_tokens",
    "ContextTokens",
    "Request tokens",
    "input_length",
    "input_toks",
)
OUTPUT_COLUMNS = (
    "output_tokens",
    "num_decode_tokens",
    "GeneratedTokens",
    "Response tokens",
    "output_length",
    "output_toks",
)
ID_COLUMNS = ("prompt_ids", "input_tok_ids")
MAX_TOKENS = 2**31 - 1  # the largest count and the highest token id that a trace can hold
SLO_COLUMN, TENANT_COLUMN = "slo", "tenant"
STREAM = 1  # of a seed: arrivals draw from the seed itself
MAX_REQUESTS = 10_000_000


@dataclass
class Lengths:
    """The rows of a table as requests: rows_read = len(requests) + rows_dropped.total()."""

    rows_read: int
    requests: list[Request] = field(default_factory=list)
    rows_dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Limits:
    """Bounds of the lengths that are taken, in tokens; None is no bound."""

    min_tokens: int = 1
    max_prompt_tokens: int | None = None
    max_total_tokens: int | None = None

    def fault(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Why a pair is not taken; None where it is."""
        for name, value in (("prompt", prompt_tokens), ("output", output_tokens)):
            if value < self.min_tokens:
                return f"{name} under {self.min_tokens} tokens"
            if value > MAX_TOKENS:
                return f"{name} over {MAX_TOKENS} tokens"
        if self.max_prompt_tokens is not None and prompt_tokens > self.max_prompt_tokens:
            return f"prompt over {self.max_prompt_tokens} tokens"
        limit = self.max_total_tokens
        if limit is not None and prompt_tokens + output_tokens > limit:
            return f"prompt and output over {limit} tokens"
        return None


def read_lengths(
    path: str | Path,
    limits: Limits | None = None,
    keep_ids: bool = True,
    slo_column: str | None = None,
) -> Lengths:
    """Each usable row of a table as a request, in file order; other rows are counted by reason.

    Arrival times of the table are kept, from 0 on. SLO classes are in `slo_column` (None: `slo`,
    where the table has it); an empty cell is no class. A column `tenant` names tenants.
    """
    path, classed_by = Path(path), slo_column or SLO_COLUMN
    known = (*PROMPT_COLUMNS, *OUTPUT_COLUMNS, *TIME_COLUMNS, *ID_COLUMNS)
    table = read_columns(path, (*known, classed_by, TENANT_COLUMN))
    columns, nothing = table.cells, [None] * len(table.lines)
    if slo_column is not None and slo_column not in columns:
        raise ValueError(f"{path}: no column {slo_column} for slo_column")
    prompts = _one_of(path, columns, PROMPT_COLUMNS)
    outputs = _one_of(path, columns, OUTPUT_COLUMNS)
    ids = next((columns[n] for n in ID_COLUMNS if keep_ids and n in columns), nothing)
    arrivals = _arrivals(path, columns) or [0] * len(table.lines)
    classes, tenants = columns.get(classed_by, nothing), columns.get(TENANT_COLUMN, nothing)
    lengths = Lengths(rows_read=len(table.lines) + len(table.malformed))
    lengths.rows_dropped.update({"malformed line": len(table.malformed)} if table.malformed else {})
    for row in zip(arrivals, prompts, outputs, ids, classes, tenants, strict=True):
        try:
            lengths.requests.append(_request(len(lengths.requests), row, limits or Limits()))
        except Unusable as fault:
            lengths.rows_dropped[str(fault)] += 1
    return lengths


def sample(lengths: Lengths, n: int | None, seed: int | None) -> Lengths:
    """n rows drawn by seed without replacement; a prompt keeps its output.

    Without a seed they are the first n rows in file order. The i-th request arrives when the i-th
    row of the table did, whichever row was drawn.
    """
    rows = lengths.requests
    n = len(rows) if n is None else n
    order = range(len(rows)) if seed is None else np.random.default_rng(seed).permutation(len(rows))
    drawn = [
        replace(rows[at], request_id=place, arrival_ns=rows[place].arrival_ns)
        for place, at in enumerate(order[:n])
    ]
    dropped = Counter(lengths.rows_dropped)
    if len(drawn) < len(rows):
        dropped[f"beyond the limit of {n} requests"] += len(rows) - len(drawn)
    return Lengths(lengths.rows_read, drawn, dropped)


def _arrivals(path: Path, columns: Mapping[str, list[Any]]) -> list[int | Unusable]:
    """Times from the first one on, or the fault of a row; empty where no column has times."""
    stamps, found = stamps_in(columns), list[int | Unusable]()
    if stamps is None:
        return found
    for cell in stamps.cells:
        try:
            found.append(stamps.in_ns(cell))
        except Unusable as fault:
            found.append(fault)
    known = in_order(path, np.asarray([t for t in found if isinstance(t, int)], dtype=np.int64))
    return [t - int(known[0]) if isinstance(t, int) else t for t in found]


def _request(number: int, row: Sequence[Any], limits: Limits) -> Request:
    """A request of arrival, prompt, output, ids, SLO class and tenant. Raises Unusable."""
    at_ns, prompt, output, ids, slo, tenant = row
    if isinstance(at_ns, Unusable):
        raise at_ns
    prompt, output = whole_number("prompt", prompt), whole_number("output", output)
    fault = limits.fault(prompt, output) or (None if ids is None else _fault_of_ids(prompt, ids))
    if fault:
        raise Unusable(fault)
    prompt_ids = None if ids is None else tuple(ids)
    slo, tenant = ("" if cell is None else str(cell) for cell in (slo, tenant))
    return Request(number, at_ns, prompt, output, slo=slo, tenant=tenant, prompt_ids=prompt_ids)


def _one_of(path: Path, columns: dict[str, list[Any]], names: tuple[str, ...]) -> list[Any]:
    for name in names:
        if name in columns:
            return columns[name]
    raise ValueError(f"{path}: no column of token counts; it needs one of {', '.join(names)}")


def _fault_of_ids(prompt: int, ids: Any) -> str | None:
    if not isinstance(ids, list):
        return "prompt ids are not a list"
    if len(ids) != prompt:
        return "prompt ids are not as many as prompt tokens"
    if not all(type(i) is int and 0 <= i <= MAX_TOKENS for i in ids):
        return "prompt ids are not all token ids"
    return None


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths uniform over [n (1 - range_ratio), n (1 + range_ratio)], both included, at least 1.

    All prompts begin with one common prefix of `prefix_tokens`, on top of their length. Equal seeds
    give equal requests. All requests arrive at 0 until `assign` gives them times.
    """

    requests: int = 200
    input_tokens: int = 1024
    output_tokens: int = 128
    range_ratio: float = 0.0
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"trace.{name}={getattr(self, name)}: it must be at least 1")
        if self.requests > MAX_REQUESTS:
            raise ValueError(f"trace.requests={self.requests}: at most {MAX_REQUESTS:,} are drawn")
        if self.prefix_tokens < 0:
            raise ValueError(f"trace.prefix_tokens={self.prefix_tokens}: it must be at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"trace.range_ratio={self.range_ratio}: it must be in [0, 1)")

    def drawn(self, seed: int = 0) -> list[Request]:
        """The requests, with ids in order of arrival."""
        rng = np.random.default_rng((seed, STREAM))
        inputs, outputs = (self._lengths(rng, n) for n in (self.input_tokens, self.output_tokens))
        prefix = self.prefix_tokens
        return [
            Request(
                number,
                0,
                prefix + length,
                output,
                prefix_ids=(0,) if prefix else None,
                prefix_block_tokens=prefix,
            )
            for number, (length, output) in enumerate(zip(inputs, outputs, strict=True))
        ]

    def _lengths(self, rng: np.random.Generator, mean: int) -> list[int]:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = math.ceil(mean * (1 + self.range_ratio))
        found: list[int] = rng.integers(low, high, self.requests, endpoint=True).tolist()
        return found
