"""Values of JSON texts as they come from anywhere: what cannot be read stops nobody."""

from __future__ import annotations

import json
from typing import Any

NOT_JSON = object()  # stands for a line that cannot be read


def json_value(text: str) -> Any:
    """The value of a text. Also raises RecursionError; no other error than these two.

    Python reads no integer of more than 4,300 digits: it is infinite here, so that whoever wants a
    number of it says which row is wrong.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_integer)


def json_line(line: str) -> Any:
    """The value of a line, NOT_JSON where it is spoilt."""
    try:
        return json_value(line)
    except (json.JSONDecodeError, RecursionError):
        return NOT_JSON


def is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which no encoder takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _integer(digits: str) -> float:
    try:
        return int(digits)
    except ValueError:
        return float(digits)
