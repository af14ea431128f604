"""One point of a sweep: what identifies its result, how it is run, and the list of all points."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from analysis.swept import key_of, number
from tandem.cli.errors import RunFailed, line_of
from tandem.config.composed_config import ComposedConfig, with_absolute_paths, with_paths
from tandem.wiring.experiment import as_swept, run_experiment, write_config
from tandem.wiring.folder import (
    ANSWERED,
    OK,
    PACKAGES,
    ROOT,
    checked_json,
    run_folder,
    running_folder,
    status_of,
    versions,
)
from traces.store import content_hash

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

    A change of code, trace or yaml gives overrides another key. The new point supersedes the
    earlier one, whose folder stays.
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


KEY_DIGITS = 16
HASH = re.compile(rf"(?:^|-)([0-9a-f]{{{KEY_DIGITS}}})$")  # at the end of a folder's name
LABEL_CHARACTERS = 60  # before it: names of two points in one stay within the 255 bytes of a name
UNSAFE = re.compile(r"[^A-Za-z0-9._@-]+")
CODE = tuple(name for name in PACKAGES if name not in ("analysis", "conf"))
# Modules of analysis that make metrics.json; the choices of conf are in the configuration.
MEASURES = (
    "classes.py",
    "columns.py",
    "distance.py",
    "metric_names.py",
    "metrics.py",
    "replicas.py",
    "run.py",
    "training.py",
    "usage.py",
    "workspace.py",
    "yaml_text.py",
)


@dataclass(frozen=True)
class PointTask:
    """A point and the folder that its run gets. Goes to workers, so it can be pickled.

    `key` is the folder's name: what varies, and the hash of the point behind it.
    """

    key: str
    point: ComposedConfig
    folder: Path


@dataclass(frozen=True)
class PointOutcome:
    """What became of a point: its metrics, none where it does not fit, or what went wrong."""

    key: str
    error: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0


def tasks_of(
    points: Iterable[ComposedConfig], root: Path, swept: Collection[str]
) -> list[PointTask]:
    """A task per distinct point, in the folder that a sweep in `root` has given it before, if any.

    Args:
        points: the points.
        root: folder of the sweep.
        swept: keys of the overrides that vary, which name new folders.
    """
    names = _names_by_hash(root)
    tasks = [task_of(point, root, swept, names) for point in points]
    return list({task.key: task for task in tasks}.values())


def task_of(
    point: ComposedConfig,
    root: Path,
    swept: Collection[str] = (),
    names: dict[str, str] | None = None,
) -> PointTask:
    """The point with absolute paths, in the folder named by what varies and the point's hash.

    Args:
        point: the point.
        root: folder of the sweep.
        swept: see `tasks_of`.
        names: names of folders by the hash in them; a new name is added.
    """
    config = as_swept(with_absolute_paths(point.config))
    folders = tuple(Path(folder).resolve() for folder in point.folders)
    point_hash = point_key(config, folders)
    label = folder_label(point.overrides, swept)
    key = (names if names is not None else {}).setdefault(
        point_hash, f"{label}-{point_hash}" if label else point_hash
    )
    return PointTask(key, replace(point, config=config, folders=folders), root / key)


def folder_label(overrides: Sequence[str], swept: Collection[str]) -> str:
    """The swept settings as part of a file's name: `policy@orca+arrival.rate@8`.

    Every character may stand unquoted in an override, so that `replayed=FOLDER` reads it: neither
    `=` nor `,`. Settings that go beyond LABEL_CHARACTERS are left out.
    """
    label = ""
    for word in overrides:
        if key_of(word) in swept:
            value = word.partition("=")[2]
            found = number(value)
            text = value if found is None else f"{found:.12g}".replace("+", "")
            part = UNSAFE.sub("_", f"{key_of(word)}@{text.rpartition('/')[2]}")
            longer = f"{label}+{part}" if label else part
            label = longer if len(longer) <= LABEL_CHARACTERS else label
    return label


def _names_by_hash(root: Path) -> dict[str, str]:
    """The folders of earlier calls by the hash at the end of their names."""
    beside = [path.name.removesuffix(".running") for path in root.glob("*") if path.is_dir()]
    names = [*superseded_in(root), *beside, *points_in(root)]
    return {found[1]: name for name in names if (found := HASH.search(name))}


def point_key(config: Mapping[str, Any], folders: tuple[Path, ...] = ()) -> str:
    """The hash of a point: configuration, contents of the files it names, and code version.

    Code is ours, the modules in or beside the user's config folders, and the versions of the
    libraries; packages under `trusted` count by name only.
    """
    beside = [content_hash(path) for folder in folders for path in _modules(folder)]
    known = {name: node for name, node in config.items() if name != "cache"}  # changes no result
    made_of = [with_paths(known, content_hash), beside, code_version()]
    text = json.dumps(made_of, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def run_point(task: PointTask) -> PointOutcome:
    """Runs the point unless its result is there; leaves a run folder, also where it failed."""
    began = time.perf_counter()
    if (known := answer_of(task)) is not None:
        return known
    clear(task.folder)
    try:
        metrics = run_experiment(task.point, task.folder)
    except (ValueError, RunFailed) as error:
        found = answer_of(task) or PointOutcome(task.key, " ".join(line_of(error).split()))
        return replace(found, wall_s=time.perf_counter() - began)
    return PointOutcome(task.key, None, metrics, time.perf_counter() - began)


def answer_of(task: PointTask) -> PointOutcome | None:
    """The outcome of a point that has finished or does not fit; None where there is none yet."""
    status = status_of(task.folder)
    if status not in ANSWERED:
        return None
    return PointOutcome(task.key, None, metrics_of(task.folder) if status == OK else {})


def run_points(tasks: list[PointTask]) -> list[PointOutcome]:
    """Several, one after the other: engines whose jobs are slow to start take them so."""
    return [run_point(task) for task in tasks]


def lost(task: PointTask, reason: str) -> PointOutcome:
    """Records a point whose worker was lost on every attempt."""
    if (known := answer_of(task)) is not None:  # lost after its last byte was written
        return known
    clear(task.folder)
    try:
        with run_folder(task.folder) as aside:
            write_config(aside, task.point.config)
            raise RunFailed(reason)
    except RunFailed:
        return PointOutcome(task.key, reason)


def clear(folder: Path) -> None:
    """Removes what a failed or killed attempt left; a finished run is never touched."""
    assert status_of(folder) not in ANSWERED
    for left in (folder, running_folder(folder)):
        if left.exists():
            shutil.rmtree(left)


def metrics_of(folder: Path) -> dict[str, Any]:
    """The metrics of a finished run."""
    return checked_json(folder / "metrics.json")


@cache
def code_version() -> str:
    """One hash of the sources that a result depends on, and of the versions of libraries.

    The sources count also where they run compiled: both forms give equal results.
    """
    paths = [path for name in CODE for path in sorted((ROOT / name).rglob("*.py"))]
    paths += [ROOT / "analysis" / name for name in MEASURES]
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _modules(folder: Path) -> list[Path]:
    """Python files that a `_target_` may reach from a config folder: in it and beside it."""
    places = (folder, folder.parent)
    return [path for f in places for glob in ("*.py", "*/*.py") for path in sorted(f.glob(glob))]
