"""What a `_target_` must be at its place: decided by looking at it, before anything is called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tandem.wanted import is_sequence, is_union

# By place: a class that has one of these methods.
METHODS = {
    "scheduling": ("batch",),
    "memory": ("fit",),
    "router": ("route",),
    "planner": ("prepare",),
    "arrival": ("times_ns", "seated"),
    "trace": ("drawn",),
    "training.data": ("batches",),
}
# By place: this class, one below it, or a function that says it returns one.
CLASSES = {
    "model": "engine.model.ModelSpec",
    "device": "sim.device.Device",
    "training": "traces.training.Training",
}
OWN = ("traces", "engine", "policies", "sim", "runtime", "analysis")
TARGET = re.compile(r"_target_:\s*([\w.]+)")


def check_kind(target: Any, path: str, where: str, hint: Any = None) -> None:
    """ValueError in one line where a target is not of the kind that its place wants.

    `hint` is what the argument that it is for is annotated with, None at the top. What no place and
    no annotation asks for must be a class, and, of ours, one that a yaml of ours names.
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
