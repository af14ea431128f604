"""Yaml files from outside the package: they choose and set, and add no trust."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from analysis.yaml_text import yaml_value
from tandem.cli.errors import Usage
from tandem.config.check import given

TRUSTED, HYDRA = "trusted", "hydra"
RESERVED = (TRUSTED, HYDRA)
RESOLVERS = ("package", "run_id", "now", "oc.select")  # that a yaml from outside may call
CALLED = re.compile(r"\$\{\s*([^{}$:]*)([:$])")
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@cache  # once per process
def check_sources() -> None:
    """From now on Hydra reads no file of a folder that `check_outside` refuses."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # finds the sources
    source = SourcesRegistry.instance().resolve("file")
    setattr(source, "load_config", _checking(source.load_config))  # noqa: B010


def _checking(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_config(self: Any, config_path: str) -> Any:
        name = self._normalize_file_name(config_path)
        if (path := Path(self.path) / name).is_file():
            check_outside(path, Path(name))
        return load(self, config_path)

    return load_config


def check_outside(path: Path, name: Path) -> None:
    """Usage in one line for a yaml file, `name` within its folder, that may not be composed."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Usage(f"{path}: no text in UTF-8 (byte {error.start}); save it as UTF-8") from error
    node = yaml_value(text, path)
    if node is None:
        return
    if not isinstance(node, Mapping):
        raise Usage(f"{path}: that is {given(node)}; give settings by name, KEY: value")
    named = [*name.parts[:1], *(word for found in PACKAGE.findall(text) for word in _parts(found))]
    for word in (*named, *_defaults(path, node)):
        if word in RESERVED:
            _refuse(path, word)
    if TRUSTED in node:
        _refuse(path, TRUSTED)
    if HYDRA in node:
        _check_hydras(path, node[HYDRA])
    for value in _strings(node):
        _check_interpolations(path, value)


def check_trust(config: Mapping[str, Any], words: Iterable[str]) -> None:
    """Usage where a configuration trusts packages that no word of the command line names."""
    said = " ".join(word.partition("=")[2] for word in words if key_of(word) == TRUSTED)
    trusted = config.get(TRUSTED) or []
    named = set(re.findall(r"[\w.]+", said))
    if isinstance(trusted, list) and (odd := [name for name in trusted if str(name) not in named]):
        raise Usage(
            f"trusted={odd[0]}: only words on the command line add trust; give it there: "
            f"'trusted=[{odd[0]}]'"
        )


def key_of(word: str) -> str:
    """The key that a word of the command line sets."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _check_hydras(path: Path, node: Any) -> None:
    """Of Hydra's own settings a yaml may say what a sweep takes, and nothing else."""
    for key in ("sweeper", "params"):
        if not isinstance(node, Mapping) or {*node} - {key}:
            _refuse(path, HYDRA)
        node = node.get(key)
    for swept in node or {}:
        if (root := _parts(key_of(str(swept)))[0]) in RESERVED:
            _refuse(path, root)


def _defaults(path: Path, node: Mapping[Any, Any]) -> Iterator[str]:
    """The words of a defaults list: groups, packages and options."""
    entries = node.get("defaults") or []
    for text in _strings(entries if isinstance(entries, Sequence) else [entries]):
        yield from _parts(text)


def _check_interpolations(path: Path, text: str) -> None:
    for name, end in CALLED.findall(text):
        is_call = end == ":" and name.strip() not in RESOLVERS
        if is_call or (end == "$" and ":" in text):  # a name made of other names may be any
            raise Usage(
                f"{path}: {' '.join(text.split())[:80]}: a yaml reads no environment and calls "
                "nothing; give the value itself, or on the command line"
            )


def _strings(node: Any) -> Iterator[str]:
    """All text in a node, keys too."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(node, list):
        for item in node:
            yield from _strings(item)
    elif isinstance(node, str):
        yield node


def _parts(text: str) -> list[str]:
    return re.split(r"[\s./@:]+", text.strip("/ "))


def _refuse(path: Path, word: str) -> None:
    what = "adds no trust" if word == TRUSTED else "configures nothing of Hydra itself"
    raise Usage(f"{path}: a yaml {what}; take {word} out, and give it on the command line")


def own_package(name: str, own: Sequence[str]) -> str:
    """A package of ours, for the resolver `package`. Usage for any other, which it would import."""
    if name.partition(".")[0] not in own:
        raise Usage(f"${{package:{name}}}: that is no package of ours; give a path")
    return name
