"""Values of YAML texts, with one-line errors, and texts of values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml  # type: ignore[import-untyped]

DEEPEST, MOST = 50, 100_000  # levels and values of a text
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is libyaml
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # likewise


def yaml_text(value: Any) -> str:
    """The text of plain values, keys in their order."""
    return str(yaml.dump(value, Dumper=DUMPER, sort_keys=False, allow_unicode=True))


def yaml_value(text: str, where: object) -> Any:
    """The value of a text.

    Args:
        text: the YAML text.
        where: its origin, for messages.

    Returns:
        Plain Python values.

    Raises:
        ValueError: no YAML, with line and column; or too deep or too large, see `check_size`.
    """
    check_size(text, where)
    with suppress(yaml.YAMLError, ValueError):
        return yaml.load(text, LOADER)
    try:  # again, because libyaml names other places
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {fault(error)}") from error
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise ValueError(f"{where}: {error}") from error


def check_size(text: str, where: object) -> None:
    """Refuses a text that would be too large once its aliases are written out.

    The check stops at the first breach, so its time does not grow with the expanded size. A text
    that is no YAML passes: `yaml_value` reports it.

    Args:
        text: the YAML text.
        where: its origin, for messages.

    Raises:
        ValueError: more levels than DEEPEST, more values than MOST, or an alias within itself.
    """
    sizes: dict[str, int] = {}  # values under each anchor
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and values before it
    count = 0
    with suppress(yaml.YAMLError):
        for event in yaml.parse(text, LOADER):
            anchor = getattr(event, "anchor", None)
            if isinstance(event, yaml.AliasEvent):
                if any(anchor == name for name, _ in open_nodes):
                    raise ValueError(f"{where}: *{anchor} holds itself; write it out")
                count += sizes.get(str(anchor), 0)
            elif isinstance(event, yaml.NodeEvent):
                count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((anchor, count))
            elif isinstance(event, yaml.CollectionEndEvent):
                name, before = open_nodes.pop()
                if name is not None:
                    sizes[name] = count - before + 1
            elif isinstance(event, yaml.ScalarEvent) and anchor is not None:
                sizes[anchor] = 1
            if len(open_nodes) > DEEPEST:
                raise ValueError(f"{where}: more than {DEEPEST} levels deep; make it flat")
            if count > MOST:
                raise ValueError(f"{where}: more than {MOST:,} values, aliases written out")


@contextmanager
def libyaml() -> Iterator[None]:
    """Makes OmegaConf, which reads `yaml.SafeLoader` at each file, use LOADER in this context."""
    before = yaml.SafeLoader
    yaml.SafeLoader = LOADER
    try:
        yield
    finally:
        yaml.SafeLoader = before


def fault(error: Any) -> str:
    """The message of a YAMLError, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a character that no YAML may hold
        return f"not YAML: {' '.join(str(error).split())}"
    return f"not YAML at line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def fault_in_file(error: Any) -> str:
    """The message of a YAMLError with the path of its file, in one line."""
    mark = getattr(error, "problem_mark", None) or error
    return f"{getattr(mark, 'name', 'a yaml file')}: {fault(error)}"
