"""A configuration as runs and workers take it: past Hydra, which they need not import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Composed:
    """A resolved configuration as plain values, and the folders of the user's own yaml files."""

    config: dict[str, Any]
    overrides: tuple[str, ...]
    folders: tuple[Path, ...] = ()
