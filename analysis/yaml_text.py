"""Values of YAML texts; what is none is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml  # type: ignore[import-untyped]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is libyaml


def yaml_value(text: str, where: object) -> Any:
    """The value of a text that comes from `where`. ValueError with line and column."""
    with suppress(yaml.YAMLError):
        return yaml.load(text, LOADER)
    try:  # again, since libyaml names other places
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {fault(error)}") from error


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
