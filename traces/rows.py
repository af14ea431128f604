"""The understood rows of a recorded trace as columns, and an account of the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from traces.drops import Drops
from traces.lengths import Limits
from traces.records import Record
from traces.units import MAX_NS, number_in

Parsed = tuple[int, int, int, tuple[int, ...] | None]  # at_ns, prompt, output, prefix ids


class Unusable(Exception):
    """Why a row is dropped."""


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


def whole(name: str, value: Any) -> int:
    """A count of tokens from a cell."""
    number: float = value if type(value) is int else _number(name, value, "a whole number")
    if number != number // 1:
        raise Unusable(f"{name} is not a whole number")
    return int(number)


def nanoseconds(value: Any, unit_ns: int) -> int:
    """A time stamp from a cell that counts units of `unit_ns`."""
    if type(value) is not int:
        value = _number("timestamp", value, "a number")
    if not abs(value) < MAX_NS / unit_ns:
        raise Unusable("timestamp out of range")
    at_ns: int = round(value * unit_ns)
    return at_ns


def _number(name: str, value: Any, kind: str) -> float:
    if value is None or value == "":
        raise Unusable(f"{name} missing")
    number = number_in(value)
    if number is None:
        raise Unusable(f"{name} is not {kind}")
    return number
