"""`tandem list`: what can be chosen, each with one line on it; and what an experiment sweeps."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from analysis.yaml_text import yaml_value
from engine.contract.policy import traits_of
from tandem.config.build import Builder
from tandem.config.check import did_you_mean
from tandem.config.outside import check_outside

SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")  # between two
PLURALS = {
    "policies": "policy",
    "routers": "router",
    "schedulings": "scheduling",
    "memories": "memory",
    "planners": "planner",
    "traces": "trace",
    "trainings": "training",
    "recipes": "training/recipe",
    "arrivals": "arrival",
    "models": "model",
    "devices": "device",
    "backends": "backend",
    "slos": "slo",
    "experiments": "experiment",
}


def main(words: Sequence[str]) -> int:
    """Prints one group, or all of them."""
    parser = argparse.ArgumentParser(prog="tandem list", description=__doc__)
    names = [*PLURALS, *PLURALS.values()]
    parser.add_argument("group", nargs="?", metavar="GROUP", help=", ".join(PLURALS))
    parser.add_argument("--config-dir", help="a folder of your own yaml files, listed too")
    chosen = parser.parse_args(words)
    if chosen.group and chosen.group not in names:
        known = did_you_mean(chosen.group, names) or f"; there are {', '.join(PLURALS)}"
        parser.error(f"{chosen.group}: no such group{known}")
    groups = [PLURALS.get(chosen.group, chosen.group)] if chosen.group else list(PLURALS.values())
    for group in groups:
        found = options(group, chosen.config_dir)
        if found:
            print(f"{group}=")
        width = max(map(len, found), default=0) + 2
        for name, line in found.items():
            print(f"  {name:<{width}}{line}")
    return 0


def options(group: str, config_dir: str | None = None) -> dict[str, str]:
    """The options of a group with the first comment of their yaml files.

    ValueError where `config_dir` is no folder.
    """
    if config_dir and not Path(config_dir).is_dir():
        raise ValueError(f"--config-dir {config_dir}: no such folder")
    roots = [Path(str(files("conf"))), *([Path(config_dir)] if config_dir else [])]
    paths = [path for root in roots for path in sorted((root / group).glob("*.yaml"))]
    return {path.stem: f"{about(path)}{_promises(path)}" for path in paths}


def _promises(path: Path) -> str:
    """The traits of the policy of ours that a yaml file describes, with its settings."""
    try:
        node = _node(path)
        if not str(node.get("_target_")).startswith("policies."):
            return ""
        told = str(traits_of(Builder().build(node, path.parent.name)))
    except Exception:  # a list shows also what cannot be built: a yaml of a user may hold anything
        return ""
    return f" [{told}]" if told else ""


def _node(path: Path) -> dict[str, Any]:
    """A yaml file with the files that its defaults name: NAME, NAME@KEY, or /GROUP@KEY: NAME."""
    given = yaml_value(path.read_text(encoding="utf-8"), path) or {}
    node = dict[str, Any]()
    for entry in given.pop("defaults", ()):
        if isinstance(entry, Mapping):
            ((chosen, option),) = entry.items()
            group, _, key = chosen.removeprefix("/").partition("@")
            node[key] = _node(path.parents[1] / group / f"{option}.yaml")
            continue
        name, _, key = entry.partition("@")
        if name == "_self_":
            node = merged(node, given)
        elif key:
            node[key] = _node(path.with_name(f"{name}.yaml"))
        else:
            node |= _node(path.with_name(f"{name}.yaml"))
    return resolved(merged(node, given), path.parent.name)


def merged(node: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A yaml node with the values of another; nodes within are merged, too."""
    found = {**node, **given}
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(node.get(key), Mapping):
            found[key] = merged(node[key], value)
    return found


def resolved(node: Mapping[str, Any], group: str) -> dict[str, Any]:
    """A node of a group whose values that name another value of it are that.

    They name it as `${GROUP.KEY}`, or as `${..KEY}` in the node around their own, a dot more for
    each one further out. Values that name one of another group are left out.
    """
    own = re.compile(rf"\$\{{(?:{group}\.|(?P<dots>\.+))(?P<key>\w+)\}}")

    def value_of(value: Any, around: Sequence[Mapping[str, Any]]) -> Any:
        if isinstance(value, Mapping):
            kept = {key: inner for key, inner in value.items() if not is_foreign(inner)}
            return {key: value_of(inner, (*around, value)) for key, inner in kept.items()}
        if isinstance(value, str) and (found := own.fullmatch(value)):
            out = min(len(found["dots"] or around), len(around))
            return around[-out].get(found["key"])
        return value

    def is_foreign(value: Any) -> bool:
        return isinstance(value, str) and value.startswith("${") and not own.fullmatch(value)

    return dict(value_of(node, ()))


def is_comment(line: str) -> bool:
    """Whether a line of yaml is one whole comment."""
    return line.startswith("#")


def about(path: Path) -> str:
    """The first line of a yaml file's comment, or its first sentence where the line breaks off."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("# @package")]
    comment = takewhile(is_comment, dropwhile(lambda line: not is_comment(line), kept))
    told = [line.lstrip("# ").strip() for line in comment]
    if not told or told[0].endswith("."):
        return "".join(told[:1])
    return SENTENCE.split(" ".join(told))[0]


TAKING_SETTINGS = ("run", "sweep", "plan", "calibrate", "fidelity")  # verbs that take KEY=VALUE


def completions(line: str, verbs: Iterable[str]) -> list[str]:
    """What may follow on a command line that begins so: verbs, groups, and their choices.

    bash breaks words at `=`, so what it completes is what stands behind it.
    """
    words = line.split()[1:]
    if not line[-1:].strip():
        words.append("")
    if len(words) < 2:
        return [verb for verb in verbs if verb.startswith("".join(words))]
    verb, last = words[0], words[-1]
    if verb == "list":
        return [name for name in PLURALS if name.startswith(last)]
    if verb not in TAKING_SETTINGS:
        return []
    key, mark, value = last.partition("=")
    if not mark:
        return [f"{name}=" for name in _overridable() if name.startswith(key)]
    before, comma, start = value.rpartition(",")  # a sweep takes several
    found = [name for name in options(key) if name.startswith(start)] if _is_group(key) else []
    return [f"{before}{comma}{name}" for name in found]


def _overridable() -> list[str]:
    """Groups, and the settings of config.yaml."""
    text = files("conf").joinpath("config.yaml").read_text(encoding="utf-8")
    node = yaml_value(text, Path("config.yaml"))
    own = [name for name in node if name not in ("defaults", "hydra")]
    return sorted({*PLURALS.values(), *own})


def _is_group(key: str) -> bool:
    return key in PLURALS.values()


CHOICE = "experiment="


def with_axes(words: Sequence[str], config_dir: str | None = None) -> list[str]:
    """The words, and behind them the axes of the experiment that they choose.

    A key that the words give themselves is not swept. ValueError for a yaml that is none.
    """
    given = {word.lstrip("+~").partition("=")[0] for word in words}
    found = [word.removeprefix(CHOICE) for word in words if word.startswith(CHOICE)]
    swept = axes_of(found[-1], config_dir) if found else {}
    return [*words, *(f"{key}={values}" for key, values in swept.items() if key not in given)]


def unswept(words: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """The keys that the experiment of the words sweeps and the words leave alone."""
    added = with_axes(words, str(folders[0]) if folders else None)[len(words) :]
    return [word.partition("=")[0] for word in added]


def axes_of(name: str, config_dir: str | None = None) -> Mapping[str, str]:
    """What each key of an experiment takes, as on the command line; nothing if it is no sweep."""
    roots = [Path(config_dir)] if config_dir else []
    for root in (*roots, Path(str(files("conf")))):
        path = root / "experiment" / f"{name}.yaml"
        if path.is_file():
            if root in roots:
                check_outside(path, path.relative_to(root))
            node = yaml_value(path.read_text(encoding="utf-8"), path)
            for key in ("hydra", "sweeper", "params"):
                node = (node or {}).get(key)
            return {key: " ".join(str(values).split()) for key, values in (node or {}).items()}
    return {}  # Hydra says which experiments there are
