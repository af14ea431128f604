"""Keys that nobody reads: Hydra lets `+key=value` add whatever it likes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from analysis.yaml_text import yaml_value
from tandem.conform import did_you_mean
from tandem.errors import Usage

HYDRAS = ("defaults", "hydra")  # of config.yaml
CHOICES = ("arrival", "planner", "router", "training")  # groups whose node may build nothing at all


def check_keys(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Usage for the first key that nobody reads, at the top and in nodes that build nothing, and
    for a value where settings of its own are wanted.

    What has a `_target_` is checked by what it builds; budget, slo and trace by who reads them.
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
    """Whether the options of a group set keys of others, as `policy` does, and none of its own."""
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
    if known := _backend_keys(str(backend.get("name"))):
        yield "backend.", backend, known
    for name in CHOICES:
        if name in found and found[name].get("_target_") is None:
            # others are of an experiment, whose choice has been overridden
            asked = {key: value for key, value in found[name].items() if f"{name}.{key}" in given}
            yield f"{name}.", asked, ()


@cache
def _backend_keys(name: str) -> tuple[str, ...]:
    """What a backend reads, as its yaml has it; nothing for one that there is not."""
    path = files("conf") / "backend" / f"{name}.yaml"
    if not path.is_file():
        return ()
    return tuple(str(key) for key in OmegaConf.create(path.read_text(encoding="utf-8")))
