"""sweep.json of a sweep's folder: its points, also those without a folder yet, or superseded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "sweep.json"


def check_points(root: Path, points: Mapping[str, Sequence[str]]) -> None:
    """ValueError where a folder's points and these are two sweeps: neither holds all of the other.

    A part of a sweep may be run again, and a sweep may grow.
    """
    before, now = ({tuple(sorted(w)) for w in part.values()} for part in (points_in(root), points))
    if not (before <= now or now <= before):
        raise ValueError(
            f"--out {root}: another sweep is in it, of {len(before)} points such as "
            f"{' '.join(min(before - now))}; take another folder, or a grid that has them all"
        )


def add_points(root: Path, points: Mapping[str, Sequence[str]]) -> None:
    """Adds points (key: overrides) to those of earlier calls; written aside and renamed.

    Overrides that come again under another key, since code, trace or yaml have changed, supersede
    the earlier one: its folder stays, and it is no point of the sweep any more.
    """
    now = {key: list(words) for key, words in points.items()}
    named = {tuple(sorted(words)) for words in now.values()}
    before, superseded = ({k: w for k, w in part.items() if k not in now} for part in _read(root))
    kept = {key: words for key, words in before.items() if tuple(sorted(words)) not in named}
    superseded |= {key: words for key, words in before.items() if key not in kept}
    aside = root / f".{NAME}.{os.getpid()}"
    text = json.dumps({"points": kept | now, "superseded": superseded}, indent=1)
    aside.write_text(text + "\n", encoding="utf-8")
    aside.rename(root / NAME)


def points_in(root: Path) -> dict[str, list[str]]:
    """The points of a sweep's folder, by key; none where it is not a sweep's."""
    return _read(root)[0]


def superseded_in(root: Path) -> dict[str, list[str]]:
    """The points whose overrides have a newer key by now."""
    return _read(root)[1]


def _read(root: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    path = root / NAME
    if not path.is_file():
        return {}, {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["points"]), dict(found.get("superseded", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, points are kept") from error
