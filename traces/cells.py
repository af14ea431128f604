"""What a cell of a recorded table says: a count of tokens, a time; text and numbers alike."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

NS_PER_S = 1_000_000_000
MAX_NS = 2**62  # of a time: the difference of two is an int64
EPOCH = datetime(1970, 1, 1)
# up to nine digits of a second (Azure's files of 2023 have seven), in those of 2024 an offset
DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?")


class Unusable(Exception):
    """Why a cell, and with it its row, says nothing."""


def number_in(cell: Any) -> float | None:
    """The finite number in a cell, also as text; whole ones exactly. None where there is none."""
    if type(cell) is int:
        return cell
    if isinstance(cell, str):
        with suppress(ValueError):
            return int(cell)
    try:
        number = math.nan if isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def whole(name: str, cell: Any) -> int:
    """A count of tokens. Unusable with the `name` where it is none."""
    number: float = cell if type(cell) is int else _checked(name, cell, "a whole number")
    if number != number // 1:
        raise Unusable(f"{name} is not a whole number")
    return int(number)


def nanoseconds(cell: Any, unit_ns: int) -> int:
    """A time stamp that counts units of `unit_ns`."""
    number: float = cell if type(cell) is int else _checked("timestamp", cell, "a number")
    if not abs(number) < MAX_NS / unit_ns:
        raise Unusable("timestamp out of range")
    return round(number * unit_ns)


def at_ns(cell: Any) -> int:
    """Nanoseconds since 1970 of a date and time; whole numbers are that already, floats seconds."""
    if isinstance(cell, str) and (found := DATE.fullmatch(cell.strip())):
        return _date_ns(*found.groups())
    return nanoseconds(cell, 1 if isinstance(cell, int) else NS_PER_S)


def _date_ns(
    date: str, fraction: str | None, sign: str | None, hours: str | None, minutes: str | None
) -> int:
    try:
        seconds = (datetime.fromisoformat(date) - EPOCH) // timedelta(seconds=1)
    except ValueError as error:
        raise Unusable("timestamp is no date and time") from error
    if sign is not None:
        ahead = int(hours or 0) * 3600 + int(minutes or 0) * 60
        seconds -= ahead if sign == "+" else -ahead
    return seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))


def _checked(name: str, cell: Any, kind: str) -> float:
    if cell is None or cell == "":
        raise Unusable(f"{name} missing")
    number = number_in(cell)
    if number is None:
        raise Unusable(f"{name} is not {kind}")
    return number
