"""Makes requests of the rows of a recorded trace: order, buckets, part of the recording, rate."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.import_options import Options
from traces.records import NS_PER_S, Drops, Record, Unusable
from traces.serving.arrivals import stretched
from traces.serving.lengths import Limits
from traces.serving.recorded_times import bucket_ns, spread_inside
from traces.serving.request import Request

Ints = npt.NDArray[np.int64]
Parsed = tuple[int, int, int, tuple[int, ...] | None]  # at_ns, prompt, output, prefix ids


@dataclass
class RecordRows(Drops):
    """The kept rows as columns, and the dropped rows by reason."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    at_ns: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    prefix_ids: list[tuple[int, ...] | None] = field(default_factory=list)  # empty: no row has ids
    slos: list[str] = field(default_factory=list)  # empty: no row has a class


def read_rows(
    found: Iterable[tuple[int, Record | None]],
    parse: Callable[[Record], Parsed],
    limits: Limits,
    slo_of: Callable[[Record], str] | None = None,
) -> RecordRows:
    """Parses records; a row is dropped where `parse` raises Unusable or the limits exclude it.

    `slo_of` gives the SLO class of a record.
    """
    rows = RecordRows()
    for line, record in found:
        rows.rows_read += 1
        if record is None:
            rows.drop("malformed line", line)
            continue
        try:
            at_ns, prompt, output, prefix_ids = parse(record)
        except Unusable as fault:
            rows.drop(str(fault), line)
            continue
        if excluded := limits.fault(prompt, output):
            rows.drop(excluded, line)
            continue
        rows.lines.append(line)
        rows.at_ns.append(at_ns)
        rows.prompt_tokens.append(prompt)
        rows.output_tokens.append(output)
        if slo_of is not None:
            rows.slos.append(slo_of(record))
        if prefix_ids is not None or rows.prefix_ids:
            rows.prefix_ids += [None] * (len(rows.lines) - 1 - len(rows.prefix_ids))
            rows.prefix_ids.append(prefix_ids)
    return rows


def requests_of(
    rows: RecordRows, options: Options, block_tokens: int = 0
) -> tuple[list[Request], dict[str, Any]]:
    """The requests from time 0 on, and the account of rows and times for the sidecar.

    Rows out of order are sorted, stably. A `rate` stretches time, which keeps the burstiness.
    """
    at_ns = np.frombuffer(rows.at_ns, dtype=np.int64)
    backwards = int(np.count_nonzero(np.diff(at_ns) < 0))
    order = np.argsort(at_ns, kind="stable")
    at_ns, notes = _apart(at_ns[order], options)
    kept = _part(rows, order, at_ns, options)
    order, at_ns = order[kept], at_ns[kept] - at_ns[kept][:1]
    notes |= {"rows_out_of_order": backwards, "recorded_rate": _rate(at_ns)}
    notes |= {"evenly_spaced": len(at_ns) > 2 and int(np.ptp(np.diff(at_ns))) == 0}
    if options.rate is not None:
        at_ns = stretched(at_ns, options.rate)
    requests = [
        _request(rows, number, at, int(time), block_tokens)
        for number, (at, time) in enumerate(zip(order, at_ns, strict=True))
    ]
    return requests, {**rows.account(len(requests)), **notes}


def _apart(at_ns: Ints, options: Options) -> tuple[Ints, dict[str, Any]]:
    """Times drawn inside their buckets, where stamps are bucketed and `spread` asks for it."""
    width_ns = bucket_ns(at_ns)
    if width_ns is None:
        return at_ns, {"bucket": None}
    note = {"width_s": width_ns / NS_PER_S, "is_spread": options.spread, "seed": options.seed or 0}
    if options.spread:
        at_ns = spread_inside(at_ns, width_ns, options.seed or 0)
    return at_ns, {"bucket": note}


def _part(rows: RecordRows, order: Ints, at_ns: Ints, options: Options) -> Ints:
    """Places of the rows inside `start_s` and `duration_s`, at most `limit`."""
    from_first_ns = at_ns - at_ns[:1]
    inside = from_first_ns >= options.start_s * NS_PER_S
    if options.duration_s is not None:
        inside &= from_first_ns < (options.start_s + options.duration_s) * NS_PER_S
    places: Ints = np.flatnonzero(inside)
    lines = np.frombuffer(rows.lines, dtype=np.int64)[order]
    _drop(rows, "outside the wanted time", lines[~inside])
    if options.limit is not None and len(places) > options.limit:
        reason = f"beyond the limit of {options.limit} requests"
        _drop(rows, reason, lines[places[options.limit :]])
        places = places[: options.limit]
    return places


def _drop(rows: RecordRows, reason: str, lines: Ints) -> None:
    if len(lines):
        rows.drop(reason, *lines.tolist())


def _rate(at_ns: Ints) -> float | None:
    """Requests per second; None for fewer than two distinct times."""
    span_s = float(at_ns[-1] - at_ns[0]) / NS_PER_S if len(at_ns) else 0.0
    return (len(at_ns) - 1) / span_s if span_s > 0 else None


def _request(rows: RecordRows, number: int, at: int, time_ns: int, block_tokens: int) -> Request:
    prefix_ids = rows.prefix_ids[at] if rows.prefix_ids else None
    return Request(
        number,
        time_ns,
        rows.prompt_tokens[at],
        rows.output_tokens[at],
        slo=rows.slos[at] if rows.slos else "",
        prefix_ids=prefix_ids,
        prefix_block_tokens=0 if prefix_ids is None else block_tokens,
    )
