"""The understood rows of a recorded trace as columns, and an account of the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from traces.cells import Unusable
from traces.drops import Drops
from traces.lengths import Limits
from traces.records import Record

Parsed = tuple[int, int, int, tuple[int, ...] | None]  # at_ns, prompt, output, prefix ids


@dataclass
class Rows(Drops):
    """The rows kept as columns; rows_read = rows kept + rows dropped."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    at_ns: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    prefix_ids: list[tuple[int, ...] | None] = field(default_factory=list)  # empty: no row has any
    slos: list[str] = field(default_factory=list)  # the same


def read_rows(
    found: Iterable[tuple[int, Record | None]],
    parse: Callable[[Record], Parsed],
    limits: Limits,
    slo_of: Callable[[Record], str] | None = None,
) -> Rows:
    """Parses the records; a row that `parse` calls Unusable or the limits exclude is dropped.

    `slo_of` names the SLO class of a record.
    """
    rows = Rows()
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
