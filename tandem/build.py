"""Builds what a config names: the only place where a `_target_` is followed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.conform import arguments, did_you_mean, hints_of
from tandem.errors import exits_fail
from tandem.kinds import OWN, check_kind, item_hint


@dataclass(frozen=True)
class Found:
    """A target whose kind has been checked, and what it is to be called with."""

    target: Any
    given: Mapping[str, Any]


class Builder:
    """Follows targets into our own packages and into those that the user named.

    `trusted` are names of installed packages (config key `trusted`). `folders` are where the user's
    config files lie (`--config-dir`): a module in such a folder, or beside it, may be a target, so
    an outsider's policy is one .py next to its yaml.
    """

    def __init__(self, trusted: Sequence[str] = (), folders: Iterable[Path] = ()) -> None:
        self.trusted = (*OWN, *trusted)
        config_folders = [Path(folder).resolve() for folder in folders]
        self.folders = tuple(dict.fromkeys(p for f in config_folders for p in (f, f.parent)))
        for folder in self.folders:
            if str(folder) not in sys.path:
                sys.path.append(str(folder))  # at the end: it can shadow nothing

    def build(self, node: Mapping[str, Any], where: str, **extra: Any) -> Any:
        """What the node describes, its nested targets built first.

        `extra` are arguments that no yaml can hold. ValueError in one line for a wrong target,
        key or value, or a target of another kind than its place wants: before any is called.
        """
        return _made(self._found(node, where), where, extra)

    def _found(self, node: Mapping[str, Any], where: str, hint: Any = None) -> Found:
        """The target of a node and what it is given, nested ones alike; nothing is called."""
        if "_target_" not in node:
            raise ValueError(f"{where}: no _target_ says what to build")
        path = str(node["_target_"])
        target = self._follow(path, where)
        check_kind(target, path, where, hint)
        hints = hints_of(target)
        given = {
            key: self._value(value, f"{where}.{key}", hints.get(key))
            for key, value in node.items()
            if not key.startswith("_")
        }
        return Found(target, given)

    def _value(self, value: Any, where: str, hint: Any) -> Any:
        if isinstance(value, Mapping) and "_target_" in value:
            return self._found(value, where, Any if hint is None else hint)
        if isinstance(value, list):
            inner = item_hint(hint)
            return [self._value(item, f"{where}[{i}]", inner) for i, item in enumerate(value)]
        return value

    def _follow(self, path: str, where: str) -> Any:
        top = path.split(".")[0]
        if top not in self.trusted and not self._is_beside_config(top):
            raise ValueError(
                f"{where}: target {path} is neither ours nor beside a config folder you gave; "
                f"add it with 'trusted=[{top}]'"
            )
        module_name, _, name = path.rpartition(".")
        if not module_name or not name:
            raise ValueError(f"{where}: target {path} is no MODULE.CLASS")
        try:
            with exits_fail():
                module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and module_name.startswith(error.name):
                raise ValueError(f"{where}: no module {module_name} for target {path}") from error
            raise
        if not hasattr(module, name):
            public = [n for n in vars(module) if not n.startswith("_")]
            raise ValueError(f"{where}: {module_name} has no {name}{did_you_mean(name, public)}")
        return getattr(module, name)

    def _is_beside_config(self, top: str) -> bool:
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:
            return False
        if spec is None or spec.origin is None:
            return False
        origin = Path(spec.origin).resolve()
        home = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        return home in self.folders


def _made(found: Any, where: str, extra: Mapping[str, Any] | None = None) -> Any:
    """Calls what was found, nested ones first."""
    if isinstance(found, list):
        return [_made(item, f"{where}[{i}]") for i, item in enumerate(found)]
    if not isinstance(found, Found):
        return found
    given = {key: _made(value, f"{where}.{key}") for key, value in found.given.items()}
    made = arguments(found.target, {**given, **(extra or {})}, where)
    with exits_fail():
        return found.target(**made)
