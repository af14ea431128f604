"""What an experiment's yaml sweeps: Hydra's `hydra.sweeper.params`, for commands with grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from analysis.yaml_text import yaml_value
from tandem.outside import check_outside

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
