"""A composed configuration as plain values, and the paths in it. Importing it takes no Hydra."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ComposedConfig:
    """A resolved configuration as plain values, and the folders of the user's own yaml files."""

    config: dict[str, Any]
    overrides: tuple[str, ...]
    folders: tuple[Path, ...] = ()


PATHS = (
    "profile",
    "model.path",
    "replayed",
    "cache",
    "trace.path",
    "trace.tokenizer",
    "trace.lengths",
    "arrival.path",
    "backend.tokenizer",
    "training.data.path",
    "training.data.tokenizer",
)


def with_paths(
    config: Mapping[str, Any], change: Callable[[Path], str], prefix: str = ""
) -> dict[str, Any]:
    """The configuration with `change` applied to every path in it."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out[key] = with_paths(value, change, f"{where}.")
        elif where in PATHS and value is not None:
            out[key] = change(Path(str(value)))
        else:
            out[key] = value
    return out


def with_absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration such that it works from any folder."""
    return with_paths(config, lambda path: str(path.expanduser().absolute()))
