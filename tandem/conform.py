"""Checks a value of a config against the annotation of the argument that it is meant for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tandem.wanted import choices, given, is_sequence, is_union, shown, wanted

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
    near = get_close_matches(wrong, names, n=3, cutoff=0.65)
    near = near or [name for name in names if wrong and wrong in name][:3]  # zero3: zero3_offload
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(names)}" if 0 < len(names) <= 12 else ""


def name_of(target: Any) -> str:
    """The dotted name of a class or function."""
    return f"{target.__module__}.{target.__qualname__}"


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
        raise Boundless(f"{where}={value}: that is no finite number; give {wanted(hint)}")
    if hint is int and isinstance(value, float) and not value.is_integer():
        return _refuse(value, hint, where)
    return hint(value)


def _refuse(value: Any, hint: Any, where: str) -> Any:
    unit = next((f" (in {unit})" for end, unit in UNITS.items() if re.search(end, where)), "")
    told = f"that is {given(value)}"
    if isinstance(value, str) and any(map(choices, [hint, *get_args(hint)])):
        told = "there is no such choice"
    raise ValueError(f"{where}={shown(value)}: {told}; give {wanted(hint)}{unit}")
