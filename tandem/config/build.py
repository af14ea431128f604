"""Builds what a config names: the only place where a `_target_` is followed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tandem.cli.errors import exits_fail
from tandem.config.check import arguments, did_you_mean, hints_of, is_sequence, is_union
from tandem.config.renamed import current, old_imports

# By place: a class that has one of these methods.
METHODS = {
    "scheduling": ("batch",),
    "memory": ("fit",),
    "router": ("route",),
    "planner": ("prepare",),
    "arrival": ("times_ns", "as_sessions"),
    "trace": ("drawn",),
    "training.data": ("batches",),
}
# By place: this class, one below it, or a function that says it returns one.
CLASSES = {
    "model": "models.spec.ModelSpec",
    "device": "sim.devices.device.Device",
    "training": "traces.training.job.TrainingWork",
}
OWN = ("traces", "models", "engine", "policies", "sim", "runtime", "analysis")
TARGET = re.compile(r"_target_:\s*([\w.]+)")


def check_kind(target: Any, path: str, where: str, hint: Any = None) -> None:
    """ValueError in one line where a target is not of the kind that its place wants.

    `hint` is the annotation of the argument that the target is for, None at the top. A target that
    neither a place nor an annotation describes must be a class; one of ours must be named in a yaml
    of ours.
    """
    made = target if inspect.isclass(target) else _returned(target)
    if hint is None and where in METHODS:
        methods = METHODS[where]
        if made is None or not any(callable(getattr(made, name, None)) for name in methods):
            _refuse(target, path, where, f"a class with {' or '.join(methods)}()")
    elif hint is None and where in CLASSES:
        wanted = CLASSES[where]
        if made is None or wanted not in map(_name, made.__mro__):
            _refuse(target, path, where, f"a {wanted.rpartition('.')[2]}")
    elif hint is None or hint is Any:
        if not inspect.isclass(target):
            _refuse(target, path, where, "a class")
        if path.partition(".")[0] in OWN and path not in declared():
            _refuse(target, path, where, "one that our own yaml names")
    elif made is None or not any(_is_like(made, option) for option in _options(hint)):
        wanted = " or ".join(getattr(o, "__name__", str(o)) for o in _options(hint))
        _refuse(target, path, where, wanted)


def item_hint(hint: Any) -> Any:
    """What the items of a list are annotated with; Any where the list is not."""
    for option in _options(hint):
        if is_sequence(option) and get_args(option):
            return get_args(option)[0]
    return Any


@cache
def declared() -> frozenset[str]:
    """The targets that yaml files of ours name."""
    found = Path(str(files("conf"))).rglob("*.yaml")
    return frozenset(
        name for path in found for name in TARGET.findall(path.read_text(encoding="utf-8"))
    )


def _options(hint: Any) -> Sequence[Any]:
    return [o for o in get_args(hint) if o is not type(None)] if is_union(hint) else [hint]


def _is_like(made: Any, option: Any) -> bool:
    """Whether a class is below another, or has all that a protocol names."""
    if option is Any:
        return True
    if not inspect.isclass(option) or option in (int, float, str, bool):
        return False
    if not getattr(option, "_is_protocol", False):
        return issubclass(made, option)
    named = {name for base in option.__mro__ if _is_protocol(base) for name in vars(base)}
    return all(hasattr(made, name) for name in named if not name.startswith("_"))


def _is_protocol(base: Any) -> bool:
    return bool(getattr(base, "_is_protocol", False)) and base.__module__ != "typing"


def _returned(target: Any) -> Any:
    """The class that a function says it returns; None where it says none, or is no function."""
    if not inspect.isroutine(target):
        return None
    try:
        found = get_type_hints(target).get("return")
    except (NameError, TypeError):
        return None
    return found if inspect.isclass(found) and found is not type(None) else None


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse(target: Any, path: str, where: str, wanted: str) -> None:
    what = "a class" if inspect.isclass(target) else "a function" if callable(target) else "a value"
    raise ValueError(f"{where}: {path} is {what} of another kind; {wanted} is wanted here")


@dataclass(frozen=True)
class Found:
    """A target whose kind has been checked, and what it is to be called with."""

    target: Any
    given: Mapping[str, Any]


class Builder:
    """Follows targets into our own packages and into packages that the user named.

    `trusted` are names of installed packages (config key `trusted`). `folders` hold the user's
    config files (`--config-dir`): a module in such a folder, or beside it, may be a target, so a
    user's policy is one .py next to its yaml.
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
        return _called(self._found(node, where), where, extra)

    def _found(self, node: Mapping[str, Any], where: str, hint: Any = None) -> Found:
        """The target of a node and what it is given, nested ones alike; nothing is called."""
        if "_target_" not in node:
            raise ValueError(f"{where}: no _target_ says what to build")
        path = current(str(node["_target_"]))
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
        module_name, _, name = path.rpartition(".")
        if not module_name or not name:
            raise ValueError(f"{where}: target {path} is no MODULE.CLASS")
        top = path.split(".")[0]
        if top not in self.trusted and not self._is_beside_config(top):
            if not _is_there(top):
                raise ValueError(f"{where}: {self._not_found(top, path)}")
            meant = f"did you mean {near}? Else " if (near := self._near(top)) else ""
            raise ValueError(
                f"{where}: target {path} is neither ours nor beside a config folder you gave; "
                f"{meant}add it with 'trusted=[{top}]'"
            )
        try:
            with exits_fail():
                module = importlib.import_module(module_name)
        except ImportError as error:
            if told := old_imports(error):
                raise ValueError(f"{where}: {told}") from error
            is_missing = isinstance(error, ModuleNotFoundError) and error.name is not None
            if is_missing and module_name.startswith(str(error.name)):
                raise ValueError(f"{where}: no module {module_name} for target {path}") from error
            raise
        if not hasattr(module, name):
            public = [n for n in vars(module) if not n.startswith("_")]
            raise ValueError(f"{where}: {module_name} has no {name}{did_you_mean(name, public)}")
        return getattr(module, name)

    def _not_found(self, top: str, path: str) -> str:
        """That there is no such module, where was looked, and what is there with a like name."""
        near = self._near(top)
        places = ", ".join([*map(str, self.folders), "our packages", "the installed packages"])
        return f"no module {top} for target {path}: looked in {places}" + (
            f"; did you mean {near}?" if near else ""
        )

    def _near(self, top: str) -> str:
        """Modules with a like name that a target may name; empty without any."""
        beside = [file.stem for folder in self.folders for file in folder.glob("*.py")]
        beside += [file.parent.name for f in self.folders for file in f.glob("*/__init__.py")]
        return " or ".join(get_close_matches(top, [*beside, *self.trusted]))

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


def _is_there(top: str) -> bool:
    """Whether a module or package can be found by its name; it is not imported."""
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:  # imported without a spec
        return True


def _called(found: Any, where: str, extra: Mapping[str, Any] | None = None) -> Any:
    """Calls what was found, nested ones first."""
    if isinstance(found, list):
        return [_called(item, f"{where}[{i}]") for i, item in enumerate(found)]
    if not isinstance(found, Found):
        return found
    given = {key: _called(value, f"{where}.{key}") for key, value in found.given.items()}
    made = arguments(found.target, {**given, **(extra or {})}, where)
    with exits_fail(), _naming(found.target, where):
        return found.target(**made)


@contextmanager
def _naming(target: Any, where: str) -> Iterator[None]:
    """A ValueError of a user's own class or function is told with its key of yaml and its name.

    Messages of ours name what they are about themselves.
    """
    try:
        yield
    except ValueError as error:
        module = str(getattr(target, "__module__", ""))
        if module.partition(".")[0] in OWN:
            raise
        name = getattr(target, "__qualname__", str(target))
        raise ValueError(f"{where}: {module}.{name}: {error}") from error
