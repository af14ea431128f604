"""Values of YAML texts; what is none is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml  # type: ignore[import-untyped]

DEEPEST, MOST = 50, 100_000  # levels and values of a text
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is libyaml


def yaml_value(text: str, where: object) -> Any:
    """The value of a text that comes from `where`.

    ValueError with line and column, or where it is too deep or too large, see `check_size`.
    """
    check_size(text, where)
    with suppress(yaml.YAMLError, ValueError):
        return yaml.load(text, LOADER)
    try:  # again, since libyaml names other places
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {fault(error)}") from error
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise ValueError(f"{where}: {error}") from error


def check_size(text: str, where: object) -> None:
    """ValueError for a text of more levels than DEEPEST, of more than MOST values with all aliases
    written out, or with an alias that holds itself. What is no YAML passes, and is told elsewhere.

    Stops at the first breach: the time that it takes does not grow with what aliases would make.
    """
    sizes: dict[str, int] = {}  # of what anchors name
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
    """Has OmegaConf, which asks for `yaml.SafeLoader` at each file, read by LOADER meanwhile."""
    before = yaml.SafeLoader
    yaml.SafeLoader = LOADER
    try:
        yield
    finally:
        yaml.SafeLoader = before


def fault(error: Any) -> str:
    """What a YAMLError says, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a character that no YAML may hold
        return f"not YAML: {' '.join(str(error).split())}"
    return f"not YAML at line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def fault_in_file(error: Any) -> str:
    """The same of a file that somebody else has read: its path, too."""
    mark = getattr(error, "problem_mark", None) or error
    return f"{getattr(mark, 'name', 'a yaml file')}: {fault(error)}"
