"""The points of a sweep: composed once per choice of groups, then expanded by setting values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import CompactHydraException, HydraException
from omegaconf import DictConfig, OmegaConf

from tandem.catalog import options
from tandem.compose import config_of, one_line, plain
from tandem.composed import Composed
from tandem.errors import Usage


@dataclass(frozen=True)
class Axis:
    """One swept key: what it takes, as on the command line, `KEY=VALUE` each."""

    key: str
    words: tuple[str, ...]
    is_composed: bool  # a choice of a group, or a key added: composed anew for each


@dataclass(frozen=True)
class Grid:
    """All points: fixed overrides, and the axes whose product is taken, the first the slowest."""

    fixed: tuple[str, ...]
    axes: tuple[Axis, ...]
    config_dir: str | None = None

    def points(self) -> Iterator[Composed]:
        """Every point's configuration. Usage in one line where a key or a choice is wrong."""
        bases: dict[tuple[str, ...], DictConfig] = {}
        folders = (Path(self.config_dir),) if self.config_dir else ()
        for words in product(*(axis.words for axis in self.axes)):
            chosen = tuple(w for a, w in zip(self.axes, words, strict=True) if a.is_composed)
            if chosen not in bases:
                # values too, so that Hydra itself says what is wrong with a key
                bases[chosen] = config_of([*self.fixed, *words], self.config_dir)
            values = [w for a, w in zip(self.axes, words, strict=True) if not a.is_composed]
            named = (*self.fixed, *words)
            yield Composed(plain(_with(bases[chosen], values), named), named, folders)

    def told(self) -> str:
        """The axes with their lengths, for the screen."""
        return " x ".join(f"{axis.key} {len(axis.words)}" for axis in self.axes) or "no axis"


def grid_of(words: Sequence[str], config_dir: str | None = None) -> Grid:
    """The grid of `KEY=a,b,c` words in Hydra's grammar: lists, choice(), range() and glob().

    Usage in one line where a word has no values to take one after another.
    """
    fixed: list[str] = []
    axes: list[Axis] = []
    for word in words:
        override = _parsed(word)
        if not override.is_sweep_override():
            fixed.append(word)
            continue
        key, values = override.get_key_element(), _values(override, config_dir)
        taken = tuple(dict.fromkeys(f"{key}={value}" for value in values))
        axes.append(Axis(key, taken, _is_composed(override, config_dir)))
    return Grid(tuple(fixed), tuple(axes), config_dir)


def _values(override: Override, config_dir: str | None) -> list[str]:
    """What a swept key takes; glob() takes the options of its group that match."""
    word, value = override.input_line, override.value()
    try:
        if isinstance(value, Glob):
            values = value.filter(list(options(override.key_or_group, config_dir)))
        else:
            values = list(override.sweep_string_iterator())
    except (HydraException, ValueError) as error:
        how = "a sweep takes a list, choice(), range() or glob()"
        raise Usage(f"{word}: {how} ({one_line(error)})") from error
    if not values:
        raise Usage(f"{word}: there is no value in it")
    return values


def _with(base: DictConfig, words: Sequence[str]) -> DictConfig:
    """The configuration with values set, in milliseconds where composing takes tens of them.

    In place, as the next point sets the same keys; in a copy where a value is a mapping, which
    is merged in and would stay.
    """
    overrides = [_parsed(word) for word in words]
    values: list[Any] = [override.value() for override in overrides]
    config = deepcopy(base) if any(isinstance(value, dict) for value in values) else base
    for override, value in zip(overrides, values, strict=True):
        OmegaConf.update(config, override.key_or_group, value, merge=True)
    return config


@cache
def _parsed(word: str) -> Override:
    try:
        [override] = OverridesParser.create().parse_overrides([word])
    except CompactHydraException as error:
        raise Usage(one_line(error, [word])) from error
    return override


def _is_composed(override: Override, config_dir: str | None) -> bool:
    if override.is_add() or override.is_force_add() or override.is_delete() or override.package:
        return True
    roots = [Path(str(files("conf"))), *([Path(config_dir)] if config_dir else [])]
    return any((root / override.key_or_group).is_dir() for root in roots)
