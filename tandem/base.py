"""A composed configuration that points of a sweep take over, each with values of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from tandem.compose import plain

# What an interpolation may be and yet depend on no setting: resolvers of ours and of the system's.
SETTLED = re.compile(r"\$\{(?:package|oc\.env):[^${}]*\}")


class Base:
    """Resolved once, as resolving takes as long as all else that a sweep does for a point."""

    def __init__(self, config: DictConfig, words: Sequence[str]) -> None:
        self._config = config
        self._settled = None if _refers(OmegaConf.to_container(config)) else plain(config, words)

    def point(self, overrides: Sequence[Override], words: Sequence[str]) -> dict[str, Any]:
        """The configuration with values set, which must be of the same keys at every call.

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
