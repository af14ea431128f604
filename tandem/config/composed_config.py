"""A composed configuration as plain values, the paths in it, and where a run's is kept.

Kept are single runs whose words set nothing of Hydra's own but the folder: they are composed of the
words and of our yaml alone. What depends on the environment is composed at every run, and so is
what was kept in a damaged file. Importing this takes no Hydra.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.build import OWN
from tandem.config.check import check_unused_keys, settings
from tandem.config.outside import check_trust, own_package


@dataclass(frozen=True)
class ComposedConfig:
    """A resolved configuration as plain values, and the folders of the user's own yaml files."""

    config: dict[str, Any]
    overrides: tuple[str, ...]
    folders: tuple[Path, ...] = ()


PATHS = (
    "profile",
    "quoted_profile",
    "model.path",
    "replayed",
    "cache",
    "trace.path",
    "trace.tokenizer",
    "trace.lengths",
    "arrival.path",
    "backend.tokenizer",
    "training.data.path",
    "training.resume",
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


FORMAT = 1  # to be raised where another text is kept than before
MOST = 1000  # files in the folder; one more, and all are removed
LIBRARIES = ("hydra-core", "omegaconf", "PyYAML")
FOLDER, CACHE = "hydra.run.dir=", "cache="
# A path that Hydra's grammar takes as it is written.
PATH = re.compile(r"(?!(null|true|false|inf|nan)$)/?(\.\.?/)*[a-z_][\w./-]*", re.ASCII | re.I)
# Interpolations that depend on the words and our yaml, and on where a package of ours lies.
PACKAGE = re.compile(r"\$\{package:(\w+)\}")
REFERENCE = re.compile(r"\$\{(oc\.select:)?[\w.,]+\}", re.ASCII)
NOW = re.compile(r"\$\{now:([^${}]*)\}")
RUN_ID = "${run_id:}"


class KeptRun(NamedTuple):
    """A resolved configuration, and the folder of its run with `${now:...}` and `${run_id:}`."""

    config: dict[str, Any]
    folder: str

    def new_folder(self) -> str:
        """The folder of a run that begins now."""
        now = datetime.now()
        named = NOW.sub(lambda found: now.strftime(found[1]), self.folder)
        return named.replace(RUN_ID, secrets.token_hex(3))


def recalled(words: Sequence[str]) -> KeptRun | None:
    """What the words of a command line were composed to; None where nothing is kept that holds.

    Usage in one line where code of ours has come to refuse them.
    """
    if (path := _path(words)) is None:
        return None
    try:
        stamp, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if stamp != _hash(text.encode()):
        return None
    kept = json.loads(text)
    if any(_place(name) != place for name, place in kept["packages"].items()):
        return None
    check_unused_keys(kept["config"], overrides_of(words))
    check_trust(kept["config"], words)
    return KeptRun(kept["config"], _given(words, FOLDER) or kept["folder"])


def keep(words: Sequence[str], composed: KeptRun, unresolved: Any) -> None:
    """Keeps what the words were composed to, unless it may be another at the next run.

    `unresolved` is the configuration with its interpolations.
    """
    told = json.dumps(unresolved, default=str)
    is_settled = "$" not in REFERENCE.sub("", PACKAGE.sub("", told))
    is_named = "$" not in NOW.sub("", composed.folder.replace(RUN_ID, ""))
    path = _path(words) if is_settled and is_named else None
    kept = {"packages": {name: _place(name) for name in PACKAGE.findall(told)}}
    kept |= composed._asdict()
    text = json.dumps(kept)
    if path is None or json.loads(text) != kept:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):  # no room, no rights: the next run composes anew
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(os.listdir(path.parent)) >= MOST:
            shutil.rmtree(path.parent)
            path.parent.mkdir()
        aside.write_text(f"{_hash(text.encode())}\n{text}", encoding="utf-8")
        aside.replace(path)


def overrides_of(words: Sequence[str]) -> tuple[str, ...]:
    """The words but for the folder's, which is Hydra's."""
    return tuple(word for word in words if not word.startswith(FOLDER))


def _path(words: Sequence[str]) -> Path | None:
    """Where the words' composition lies; None where it is not kept.

    Its name is the hash of the words, the folder's name aside, of our yaml and of the versions.
    """
    folders = [word for word in words if word.startswith(FOLDER)]
    caches = [word for word in words if word.startswith(CACHE)]
    plain = all(PATH.fullmatch(word.partition("=")[2]) for word in (*folders, *caches))
    if not plain or any("$" in word for word in words) or find_spec("hydra_plugins"):
        return None
    known = [FOLDER if word in folders else word for word in words]
    name = _hash(json.dumps([known, _sources()]).encode())
    return Path(_given(words, CACHE) or settings()["cache"]) / "composed" / f"{name[:32]}.json"


def _given(words: Sequence[str], key: str) -> str | None:
    """What the last of the words that set a key sets."""
    found = [word.removeprefix(key) for word in words if word.startswith(key)]
    return found[-1] if found else None


@cache
def _sources() -> str:
    """The hash of all that takes part beside the words."""
    root = Path(str(files("conf")))
    found = [
        [str(p.relative_to(root)), _hash(p.read_bytes())] for p in sorted(root.rglob("*.yaml"))
    ]
    versions = [platform.python_version(), *map(version, LIBRARIES)]
    return _hash(json.dumps([FORMAT, versions, found]).encode())


def _place(name: str) -> str:
    """Where a package of ours lies."""
    return str(files(own_package(name, OWN)))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
