"""Checks the values of a config against annotations of arguments, and finds unused keys."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from analysis.yaml_text import yaml_value
from tandem.cli.errors import Usage

ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
ONE |= {types.NoneType: "null"}
MANY = {int: "whole numbers", float: "numbers", str: "words"}


def expected(hint: Any) -> str:
    """Such as: keep, recompute or offload, or a list of these."""
    if not is_union(hint):
        return _one(hint)
    first, *rest = get_args(hint)
    said = [_one(first)]
    for other in rest:
        is_list_of_first = is_sequence(other) and get_args(other)[0] == first
        said.append("a list of these" if is_list_of_first else _one(other))
    return (", or " if choices(first) else " or ").join(said)


def choices(hint: Any) -> list[str]:
    """The values that an annotation lists; none where it lists none."""
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return []


def given(value: Any) -> str:
    """What a value is instead."""
    if isinstance(value, bool):
        return "a truth value"
    kinds: dict[Any, str] = {int | float: "a number", str: "text", list | tuple: "a list"}
    kinds |= {Mapping: "a group of settings", types.NoneType: "nothing"}
    known = (words for kind, words in kinds.items() if isinstance(value, kind))
    return next(known, f"a {type(value).__name__}")


def shown(value: Any) -> str:
    """A value as yaml has it in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    is_word = value is None or isinstance(value, bool)
    return {None: "null", True: "true", False: "false"}[value] if is_word else str(value)


def is_sequence(hint: Any) -> bool:
    """Whether the annotation is of a list, whatever its items."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def is_union(hint: Any) -> bool:
    """Whether the annotation is a union."""
    return get_origin(hint) in (Union, types.UnionType)


def _one(hint: Any) -> str:
    if known := choices(hint):
        return " or ".join([", ".join(known[:-1]), known[-1]] if known[1:] else known)
    if is_sequence(hint):
        inner = get_args(hint)[0]
        return f"a list of {MANY.get(inner) or expected(inner)}"
    if hint in ONE:
        return ONE[hint]
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return "a group of settings" + f" whose _target_ makes a {name}" * (name != "Mapping")


UNITS = {  # by the end of a key
    r"_bytes$": "bytes",
    r"_bytes_per_s$": "bytes per second",
    r"_ns$": "nanoseconds",
    r"(?<!_per)_s$": "seconds",
}


class Boundless(ValueError):
    """A number that is none, or that no float holds: right for no annotation of a number."""


def arguments(target: Any, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keyword arguments for `target`, checked by name and by type.

    ValueError names the key, what is wrong with it and what would do.
    """
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in parameters and not open_ended:
            meant = did_you_mean(key, parameters)
            raise ValueError(f"{where}.{key}: {name_of(target)} has no such setting{meant}")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and name not in given:
            raise ValueError(f"{where}.{name}: {name_of(target)} needs a value here")
    hints = hints_of(target)
    return {
        key: conform(value, hints.get(key, Any), f"{where}.{key}") for key, value in given.items()
    }


def did_you_mean(wrong: str, known: Any) -> str:
    """A clause that suggests the nearest known names, or lists the few there are."""
    names = list(dict.fromkeys(map(str, known)))
    begun = [name for name in names if wrong and name.startswith(wrong)]  # chunked: chunked_swap
    near = [*dict.fromkeys([*get_close_matches(wrong, names, n=3, cutoff=0.65), *begun])][:3]
    near = near or [name for name in names if wrong and wrong in name][:3]
    level = [name for name in near if name.count(".") == wrong.count(".")]
    if level and level[0] == near[0]:  # the nearest one lies where the wrong one does
        near = level
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(names)}" if 0 < len(names) <= 12 else ""


def name_of(target: Any) -> str:
    """The dotted name of a class or function."""
    return f"{target.__module__}.{target.__qualname__}"


@cache
def hints_of(target: Any) -> dict[str, Any]:
    """The annotations of what a target is called with, by name; none where they are unknown."""
    # an annotation that exists for the type checker only cannot be resolved; then it is not checked
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except NameError:
        return {}


def conform(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it: lists become tuples, names become enum members."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_union(hint):
        return _any_of(value, hint, inner, where)
    if origin is Literal:
        return value if value in inner else _refuse(value, hint, where)
    if is_sequence(hint):
        return _sequence(value, hint, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(value, hint, where)
    return _plain(value, hint, where)


def _any_of(value: Any, hint: Any, options: Sequence[Any], where: str) -> Any:
    if isinstance(value, list) and len(lists := [*filter(is_sequence, options)]) == 1:
        return _sequence(value, lists[0], where)  # which says what is wrong in it
    for option in options:
        try:
            return conform(value, option, where)
        except Boundless:
            raise
        except ValueError:
            continue
    return _refuse(value, hint, where)


def _sequence(value: Any, hint: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        return _refuse(value, hint, where)
    inner = get_args(hint)
    if get_origin(hint) is tuple and inner[-1:] not in ((), (...,)):
        return _fixed(value, inner, where)
    items = [conform(v, inner[0] if inner else Any, f"{where}[{i}]") for i, v in enumerate(value)]
    return items if get_origin(hint) is list else tuple(items)


def _mapping(value: Any, hint: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        return _refuse(value, hint, where)
    inner = get_args(hint)[1] if len(get_args(hint)) == 2 else Any
    return {key: conform(item, inner, f"{where}.{key}") for key, item in value.items()}


def _fixed(value: Sequence[Any], inner: Sequence[Any], where: str) -> tuple[Any, ...]:
    if len(value) != len(inner):
        raise ValueError(
            f"{where}={shown(value)}: that is a list of {len(value)}; give one of {len(inner)}"
        )
    pairs = enumerate(zip(value, inner, strict=True))
    return tuple(conform(item, hint, f"{where}[{i}]") for i, (item, hint) in pairs)


def _plain(value: Any, hint: Any, where: str) -> Any:
    if hint is type(None):
        return None if value is None else _refuse(value, hint, where)
    if not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return value
    if issubclass(hint, Enum):
        return hint(value) if value in choices(hint) else _refuse(value, hint, where)
    if hint in (int, float):
        return _number(value, hint, where)
    return value if isinstance(value, hint) else _refuse(value, hint, where)


def _number(value: Any, hint: Any, where: str) -> Any:
    """Whole floats are integers (yaml reads 1e9 as a float); true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _refuse(value, hint, where)
    try:
        is_finite = isfinite(value)
    except OverflowError:  # a whole number that no float holds
        raise Boundless(f"{where}: that number is beyond all bounds; give a smaller one") from None
    if not is_finite:
        raise Boundless(f"{where}={value}: that is no finite number; give {expected(hint)}")
    if hint is int and isinstance(value, float) and not value.is_integer():
        return _refuse(value, hint, where)
    return hint(value)


def _refuse(value: Any, hint: Any, where: str) -> Any:
    unit = next((f" (in {unit})" for end, unit in UNITS.items() if re.search(end, where)), "")
    told = f"that is {given(value)}"
    if isinstance(value, str) and any(map(choices, [hint, *get_args(hint)])):
        told = "there is no such choice"
    raise ValueError(f"{where}={shown(value)}: {told}; give {expected(hint)}{unit}")


HYDRAS = ("defaults", "hydra")  # of config.yaml
CHOICES = ("arrival", "planner", "router", "training")  # groups whose node may build nothing at all


def check_unused_keys(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Usage for the first key that no code reads, at the top and in nodes that build nothing.

    Also for a plain value in the place of a node. A node with a `_target_` is checked by what it
    builds; budget, slo, tenants and trace are checked where they are read.
    """
    for name, default in settings().items():
        if isinstance(default, Mapping) and not isinstance(config.get(name, {}), Mapping):
            value = "null" if config[name] is None else config[name]
            raise Usage(
                f"{name}={value}: it has settings of its own; write {name}.KEY=value, "
                f"KEY one of {', '.join(default)}"
            )
    given = {word.lstrip("+~").partition("=")[0] for word in overrides}
    for where, node, known in _nodes(config, given):
        for key in map(str, node):
            if key not in known and not key.startswith("_"):
                raise Usage(f"{where}{key}: no such setting{did_you_mean(key, known)}")


@cache
def settings() -> dict[str, Any]:
    """What config.yaml sets, and the groups whose options are nodes of their own: what may be set.

    Read from the files: to compose them for this would double what a run composes.
    """
    root = Path(str(files("conf")))
    text = (root / "config.yaml").read_text(encoding="utf-8")
    own = {k: v for k, v in yaml_value(text, "config.yaml").items() if k not in HYDRAS}
    groups = (path for path in sorted(root.iterdir()) if any(path.glob("*.yaml")))
    return own | {path.name: None for path in groups if not _is_spread(path)}


def _is_spread(group: Path) -> bool:
    """Whether the options of a group set keys of other groups alone, as `policy` does."""
    options = (path.read_text(encoding="utf-8") for path in group.glob("*.yaml"))
    return any("@package _global_" in text for text in options)


def _nodes(
    config: Mapping[str, Any], given: set[str]
) -> Iterator[tuple[str, Mapping[str, Any], tuple[str, ...]]]:
    """Prefix of its keys, the node, and the keys that it may have."""
    found = {name: node for name, node in config.items() if isinstance(node, Mapping)}
    yield "", config, tuple(settings())
    yield "sampling.", found.get("sampling", {}), tuple(settings()["sampling"])
    backend = found.get("backend", {})
    if known := _settings_of_backend(str(backend.get("name"))):
        yield "backend.", backend, known
    for name in CHOICES:
        if name in found and found[name].get("_target_") is None:
            # further keys are of an experiment, whose choice has been overridden
            asked = {key: value for key, value in found[name].items() if f"{name}.{key}" in given}
            yield f"{name}.", asked, ()


@cache
def _settings_of_backend(name: str) -> tuple[str, ...]:
    """What a backend reads, as its yaml has it; nothing for one that there is not."""
    path = files("conf") / "backend" / f"{name}.yaml"
    if not path.is_file():
        return ()
    return tuple(map(str, yaml_value(path.read_text(encoding="utf-8"), path)))
