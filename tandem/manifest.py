"""sweep.json of a sweep's folder: which points it has, also those that have no folder yet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "sweep.json"


def add_points(root: Path, points: Mapping[str, Sequence[str]]) -> None:
    """Adds points (key: overrides) to those of earlier calls; written aside and renamed."""
    kept = {**points_in(root), **{key: list(words) for key, words in points.items()}}
    aside = root / f".{NAME}.{os.getpid()}"
    aside.write_text(json.dumps({"points": kept}, indent=1) + "\n", encoding="utf-8")
    aside.rename(root / NAME)


def points_in(root: Path) -> dict[str, list[str]]:
    """The points of a sweep's folder; none where it is not a sweep's."""
    path = root / NAME
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["points"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, points are kept") from error
