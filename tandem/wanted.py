"""What an annotation wants of a value, in the words of whoever writes the value."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
ONE |= {types.NoneType: "null"}
MANY = {int: "whole numbers", float: "numbers", str: "words"}


def wanted(hint: Any) -> str:
    """Such as: keep, recompute or offload, or a list of these."""
    if not is_union(hint):
        return _one(hint)
    first, *others = get_args(hint)
    said = [_one(first)]
    for other in others:
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
    """Whether a list is wanted, of whatever."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def is_union(hint: Any) -> bool:
    """Whether it is one of several annotations."""
    return get_origin(hint) in (Union, types.UnionType)


def _one(hint: Any) -> str:
    if known := choices(hint):
        return " or ".join([", ".join(known[:-1]), known[-1]] if known[1:] else known)
    if is_sequence(hint):
        inner = get_args(hint)[0]
        return f"a list of {MANY.get(inner) or wanted(inner)}"
    if hint in ONE:
        return ONE[hint]
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return "a group of settings" + f" whose _target_ makes a {name}" * (name != "Mapping")
