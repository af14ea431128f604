"""Rows of a JSON file without a library that types columns; errors name the place."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

from traces.records import NOT_JSON, json_line, json_value, opened

# A high surrogate without a low one after it, or a low one without a high one before it. One common
# prefix lets the search skip from escape to escape.
HALF_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]))"
)
NULL_LINE = re.compile(rb"^[ \t\r]*null", re.MULTILINE)


def plain_rows(path: Path) -> list[Any]:
    """The rows of one JSON list, or of JSON lines with NOT_JSON for each malformed line."""
    text = _text(path)
    start = text.lstrip()[:1]
    if start == "[":
        return _list_rows(path, text)
    lines = [json_line(line) for line in text.split("\n") if line.strip()]
    if lines and all(line is NOT_JSON for line in lines):
        _list_rows(path, text)  # no line is JSON: raises with the place in one document
        raise ValueError(f"{path}: the top level must be a list of rows")
    return lines


def first_row(path: Path) -> Any:
    """The first row of JSON lines; NOT_JSON where it is malformed."""
    with opened(path) as file:
        return json_line(file.readline())


def count_rows(path: Path) -> int:
    """The number of rows of a JSON list, or of lines that are not blank."""
    data = _bytes(path).removeprefix(codecs.BOM_UTF8)
    if data.lstrip()[:1] == b"[":
        return len(plain_rows(path))
    return sum(bool(line.strip()) for line in data.splitlines())


def is_beyond_datasets(path: Path) -> bool:
    """Whether `datasets` would change the rows of this file, or crash on them.

    It drops half of a surrogate pair silently. A null row kills the process where it comes first
    (pyarrow 26), and becomes an object elsewhere. Rows of a list that are no objects may be lost.
    """
    data = _bytes(path).removeprefix(codecs.BOM_UTF8)
    if HALF_SURROGATE.search(data) or NULL_LINE.search(data):
        return True
    is_list = data.lstrip()[:1] == b"["
    return is_list and not all(isinstance(row, dict) for row in plain_rows(path))


def _list_rows(path: Path, text: str) -> list[Any]:
    try:
        rows = json_value(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}, character {error.pos}"
        raise ValueError(f"{path}: not JSON at {where}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: JSON nested too deeply to read") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: the top level must be a list of rows")
    return rows


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error


def _bytes(path: Path) -> bytes:
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error})") from error
