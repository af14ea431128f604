"""The points of a sweep: composed once per choice of groups, then expanded by setting values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import CompactHydraException, HydraException
from omegaconf import DictConfig, OmegaConf

from tandem.cli.catalog import options
from tandem.cli.errors import Usage
from tandem.config.compose import config_of, one_line, plain
from tandem.config.composed_config import ComposedConfig

# What an interpolation may be and yet depend on no setting: resolvers of ours and of the system's.
SETTLED = re.compile(r"\$\{(?:package|oc\.env):[^${}]*\}")


class Base:
    """Resolved once, as resolving takes as long as all else that a sweep does for a point."""

    def __init__(self, config: DictConfig, words: Sequence[str]) -> None:
        self._config = config
        self._settled = None if _refers(OmegaConf.to_container(config)) else plain(config, words)

    def point(self, overrides: Sequence[Override], words: Sequence[str]) -> dict[str, Any]:
        """The configuration with values set; every call must set the same keys.

        `words` are all that the point was asked for. Usage in one line where it cannot be resolved.
        """
        values: list[Any] = [override.value() for override in overrides]
        found = self._settled
        for override, value in zip(overrides, values, strict=True):
            found = found and _replaced(found, override.key_or_group.split("."), value)
        if found is not None:
            return found
        for override, value in zip(overrides, values, strict=True):
            # in place, as the next point sets the same keys
            OmegaConf.update(self._config, override.key_or_group, value, merge=True)
        return plain(self._config, words)


def _refers(node: Any) -> bool:
    """Whether a value of the unresolved node may depend on another one."""
    if isinstance(node, Mapping):
        return any(map(_refers, node.values()))
    if isinstance(node, list):
        return any(map(_refers, node))
    return isinstance(node, str) and "${" in SETTLED.sub("", node)


def _replaced(node: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any] | None:
    """A copy with one plain value in the place of another; None where either is not plain."""
    key, *rest = path
    if key not in node:
        return None
    below = node[key]
    if rest:
        new = _replaced(below, rest, value) if isinstance(below, Mapping) else None
        return None if new is None else {**node, key: new}
    is_plain = not isinstance(below, Mapping | list) and _is_plain(value)
    return {**node, key: value} if is_plain else None


def _is_plain(value: Any) -> bool:
    """Whether a value is itself once resolved."""
    if isinstance(value, str):
        return "${" not in value and value != "???"
    return value is None or isinstance(value, bool | int | float)


MOST = 100_000  # points of a sweep


@dataclass(frozen=True)
class Axis:
    """One swept key: what it takes, as on the command line, `KEY=VALUE` each."""

    key: str
    words: tuple[str, ...]
    is_composed: bool  # a choice of a group, a key added, a mapping: composed anew for each


@dataclass(frozen=True)
class Grid:
    """All points: fixed overrides, and the axes whose product is taken, the first the slowest."""

    fixed: tuple[str, ...]
    axes: tuple[Axis, ...]
    config_dir: str | None = None

    def points(self) -> Iterator[ComposedConfig]:
        """Every point's configuration. Usage in one line where a key or a choice is wrong."""
        bases: dict[tuple[str, ...], Base] = {}
        folders = (Path(self.config_dir),) if self.config_dir else ()
        for words in product(*(axis.words for axis in self.axes)):
            chosen = tuple(w for a, w in zip(self.axes, words, strict=True) if a.is_composed)
            named = (*self.fixed, *words)
            if chosen not in bases:
                # values too, so that Hydra itself says what is wrong with a key
                bases[chosen] = Base(config_of(named, self.config_dir), named)
            values = [w for a, w in zip(self.axes, words, strict=True) if not a.is_composed]
            config = bases[chosen].point([_parsed(word) for word in values], named)
            yield ComposedConfig(config, named, folders)

    def told(self) -> str:
        """The axes with their lengths, for the terminal."""
        return " x ".join(f"{axis.key} {len(axis.words)}" for axis in self.axes) or "no axis"


def grid_of(words: Sequence[str], config_dir: str | None = None) -> Grid:
    """The grid of `KEY=a,b,c` words in Hydra's grammar: lists, choice(), range() and glob().

    Usage in one line where a word has no values to take one after another.
    """
    overrides = [_parsed(word) for word in words]
    swept = [_swept(o, config_dir) for o in overrides if o.is_sweep_override()]
    merged = [key for key, taken in swept if _is_merged(key, taken)]
    roots = [Path(str(files("conf"))), *([Path(config_dir)] if config_dir else [])]
    axes = []
    for key, taken in swept:
        is_group = "@" in key or any((root / key).is_dir() for root in roots)
        axes.append(Axis(key, taken, is_group or any(_overlap(key, other) for other in merged)))
    if (points := prod(len(axis.words) for axis in axes)) > MOST:
        raise Usage(f"{points:,} points: a sweep has {MOST:,} at most; take fewer values")
    fixed = [w for w, o in zip(words, overrides, strict=True) if not o.is_sweep_override()]
    return Grid(tuple(fixed), tuple(axes), config_dir)


def check_ranges(words: Sequence[str]) -> None:
    """Usage for a range() of more values than a sweep has points, before they are counted out."""
    for word in words:
        if "range(" not in word or word.startswith("-"):
            continue
        try:
            override = _parsed(word)
        except Usage:
            continue  # Hydra says what is wrong with it
        if override.is_range_sweep():
            _values(override, None)


@cache
def _parsed(word: str) -> Override:
    try:
        [override] = OverridesParser.create().parse_overrides([word])
    except CompactHydraException as error:
        raise Usage(one_line(error, [word])) from error
    return override


def _swept(override: Override, config_dir: str | None) -> tuple[str, tuple[str, ...]]:
    """The key of an axis, and the words that it takes."""
    key, values = override.get_key_element(), _values(override, config_dir)
    return key, tuple(dict.fromkeys(f"{key}={value}" for value in values))


def _values(override: Override, config_dir: str | None) -> list[str]:
    """What a swept key takes; glob() takes the options of its group that match."""
    word, value = override.input_line, override.value()
    try:
        if isinstance(value, Glob):
            values = value.filter(list(options(override.key_or_group, config_dir)))
        else:
            values = list(islice(override.sweep_string_iterator(), MOST + 1))
    except (HydraException, ValueError) as error:
        how = "a sweep takes a list, choice(), range() or glob()"
        raise Usage(f"{word}: {how} ({one_line(error)})") from error
    if len(values) > MOST:
        raise Usage(f"{word}: more than {MOST:,} values; a sweep has {MOST:,} points at most")
    if not values:
        raise Usage(f"{word}: there is no value in it")
    return values


def _is_merged(key: str, taken: Sequence[str]) -> bool:
    """Whether a key is added or deleted, or some value is a mapping or refers to another."""
    return key[0] in "+~" or any("{" in word for word in taken)


def _overlap(one: str, other: str) -> bool:
    """Whether one key sets the other's value, or a part of it: their order counts."""
    a, b = (f"{key.lstrip('+~')}." for key in (one, other))
    return a.startswith(b) or b.startswith(a)
