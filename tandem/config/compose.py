"""Composes configurations outside `tandem run`, and puts Hydra's errors into one line."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from analysis.yaml_text import fault_in_file, libyaml, yaml_value
from tandem.cli.errors import Usage
from tandem.config.build import OWN
from tandem.config.check import check_unused_keys, did_you_mean
from tandem.config.composed_config import ComposedConfig, KeptRun, overrides_of
from tandem.config.outside import check_sources, check_trust, own_package

COMPOSING = (CompactHydraException, OmegaConfBaseException, YAMLError)  # what it raises
ALSO_CALLED = {"gpu": "cuda", "simulator": "sim", "server": "openai", "vllm": "vllm_v1"}  # options
CONFIG_DIR = ("--config-dir", "-cd")  # the flag of a folder of the user's options
PARTS = ("serving", "sharing")  # mappings that hold another option of the group
NO_NAME = "Config group override must be a string"  # what Hydra says
NO_VALUE = re.compile(r"Error parsing override '([^'=]+)' missing EQUAL")
WRONG_KEY = re.compile(r"(?:Could not (?:override|append|delete)[^']*|Key )'([^']+)'")


def register_resolvers() -> None:
    """`${run_id:}` makes folders unique, `${package:traces}` is where a package of ours lies.

    From then on yaml files of the user's folders are checked, see tandem/config/outside.py.
    """
    OmegaConf.register_new_resolver(
        "run_id", lambda: secrets.token_hex(3), use_cache=True, replace=True
    )
    OmegaConf.register_new_resolver(
        "package", lambda name: str(files(own_package(name, OWN))), replace=True
    )
    check_sources()


def composed(overrides: Sequence[str], config_dir: str | None = None) -> ComposedConfig:
    """The configuration that `tandem run OVERRIDES` would run. Usage in one line if it is wrong."""
    folders = (Path(config_dir),) if config_dir else ()
    config = plain(config_of(overrides, config_dir), overrides)
    return ComposedConfig(config, tuple(overrides), folders)


def config_of(overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """The configuration before it is resolved, for callers that change values in it."""
    register_resolvers()
    if config_dir and not Path(config_dir).is_dir():
        raise Usage(f"--config-dir {config_dir}: no such folder")
    search = [f"hydra.searchpath=[{quoted(config_dir, 'file://')}]"] if config_dir else []
    words = [*search, *overrides]
    with composing(overrides, config_dir):
        with suppress(YAMLError), libyaml():
            return _hydras(words)
        return _hydras(words)  # again: libyaml names other places


def composed_run(words: Sequence[str]) -> tuple[KeptRun, str, Any]:
    """What the words of `tandem run` compose, the folder of the run, and the configuration with its
    interpolations."""
    register_resolvers()
    with initialize_config_module("conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        cfg = loader.load_configuration("config", [*words], RunMode.RUN)
        template = OmegaConf.to_container(cfg.hydra.run)
        folder = str(cfg.hydra.run.dir)
    assert isinstance(template, dict)
    with open_dict(cfg):
        del cfg["hydra"]
    unresolved = OmegaConf.to_container(cfg)
    return KeptRun(plain(cfg, overrides_of(words)), str(template["dir"])), folder, unresolved


def quoted(folder: str | Path, scheme: str = "") -> str:
    """A folder as a value of Hydra's grammar, which takes no umlauts, spaces or commas bare."""
    path = str(Path(folder).resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{scheme}{path}'"


@contextmanager
def composing(overrides: Sequence[str], config_dir: str | None = None) -> Iterator[None]:
    """What goes wrong in composing is a Usage of one line."""
    try:
        yield
    except COMPOSING as error:
        raise Usage(one_line(error, overrides, config_dir)) from error
    except RecursionError as error:
        raise Usage("the settings are nested too deeply to be read; make them flat") from error
    except ValueError as error:
        if str(error).startswith(NO_NAME) and (word := _nameless(overrides)):
            raise Usage(f"{word}: the name of an option is wanted; see `tandem list`") from error
        raise


def _hydras(overrides: list[str]) -> DictConfig:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", overrides)


def config_folders(sources: Iterable[Any]) -> tuple[Path, ...]:
    """The folders of yaml files that the user gave, of Hydra's configuration sources."""
    return tuple(Path(source.path) for source in sources if source.schema == "file")


def plain(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration as plain dicts and lists: past here there is no DictConfig."""
    try:
        node = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or "a value"
        group = key.partition(".")[0]
        chosen = next((word for word in overrides if word.startswith(f"{group}=")), "")
        reads = f" (`tandem list {group}` tells what {chosen} reads)" if chosen else ""
        raise Usage(f"{key} has no value; give one with {key}=...{reads}") from error
    except OmegaConfBaseException as error:
        raise Usage(f"{error.full_key or 'configuration'}: {error.msg or error}") from error
    assert isinstance(node, dict)
    config = {str(key): value for key, value in node.items()}
    check_unused_keys(config, overrides)
    check_trust(config, overrides)
    return config


def one_line(error: Exception, overrides: Sequence[str] = (), config_dir: str | None = None) -> str:
    """What is wrong with a configuration, and what was probably meant."""
    if isinstance(error, YAMLError):
        return fault_in_file(error)
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = [str(option) for option in error.options or ()]
        other = ALSO_CALLED.get(name)
        meant = f"; did you mean {other}?" if other in options else did_you_mean(name, options)
        meant = meant or f"; there are {', '.join(options)}"
        return f"{group}={name}: no such option{_other_folder(group, config_dir) or meant}"
    if found := NO_VALUE.search(text):
        return f"{found.group(1)}: a value is missing; give {found.group(1)}=..."
    cause = error.__cause__
    if found := WRONG_KEY.search(text):
        key = found.group(1).partition("@")[0]
        inner = str(getattr(cause, "full_key", None) or "")
        if inner.startswith(f"{key}."):  # Hydra merges mappings, and adds nothing
            return (
                f"{key}: the {key.partition('.')[0]} that is chosen has a mapping there without "
                f"{inner.removeprefix(f'{key}.')}; replace it: ~{key} '+{key}={{...}}'"
            )
        if key in (known := _known_settings(key, config_dir)):  # arrival.rate where arrival=trace
            return f"{key}: no setting of the {key.partition('.')[0]} that is chosen"
        return f"{key}: no such setting{did_you_mean(key, known)}"
    return f"{text} {' '.join(str(cause).split())}" if cause else text


def _other_folder(group: str, config_dir: str | None) -> str:
    """A clause where a folder of options has none of the group; "" where it has some."""
    if config_dir is None or (Path(config_dir) / group).is_dir():
        return ""
    inside = Path(config_dir) / "conf"
    meant = f"; did you mean --config-dir {inside}?" if (inside / group).is_dir() else ""
    return f"; {config_dir} has no folder {group}{meant}"


def config_dir_of(words: Sequence[str]) -> str | None:
    """The folder that words of a command line give with --config-dir; None without one."""
    for before, word in pairwise(["", *words]):
        flag, mark, folder = word.partition("=")
        if flag in CONFIG_DIR and mark:
            return folder
        if before in CONFIG_DIR:
            return word
    return None


def _nameless(overrides: Sequence[str]) -> str | None:
    """The override that chooses by what is no name: nothing, a number or a truth value."""
    groups = {path.name for path in _groups()}
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        chosen = yaml_value(value, word) if key in groups else ""
        if chosen is None or isinstance(chosen, int | float):
            return word
    return None


def _known_settings(wrong: str, config_dir: str | None = None) -> list[str]:
    """Names at the level of the wrong key in the default configuration, groups included.

    And keys with an equal end, at any depth of any option of its group: training.path suggests
    training.data.path, and training.steps suggests training.num_steps. Before them those of the
    user's own options of the group.
    """
    try:
        config = default_config()
    except COMPOSING:
        return []
    everything = list(_dotted_settings(config)) + [path.name for path in _groups()]
    depth, (group, _, last) = wrong.count("."), wrong.rpartition(".")
    own = [*_settings_of_options(group, Path(config_dir))] if config_dir else []
    ours = _settings_of_options(group, Path(str(files("conf"))))
    if depth > 1:  # such as memory.records.hedge, or memory.serving.watermark
        return [*own, *ours, *_inner_settings(wrong, group)]
    found = [key for key in everything if key.count(".") == depth]
    return [*own, *found, *(key for key in ours if last in key.rpartition(".")[2])]


def _inner_settings(wrong: str, parent: str) -> Iterator[str]:
    """What may have been meant within a setting: keys of mappings there, and of options there."""
    top, place = wrong.partition(".")[0], parent.rpartition(".")[2]
    for key in dict.fromkeys(_settings_of_options(top, Path(str(files("conf"))))):
        before, _, last = key.rpartition(".")
        if before == parent or (before == top and place in PARTS):
            yield f"{parent}.{last}"


def _settings_of_options(group: str, folder: Path) -> Iterator[str]:
    """The keys of all options of a group, nested ones too; none where it is no group."""
    for path in sorted((folder / group.replace(".", "/")).glob("*.yaml")) if group else ():
        yield from _dotted_settings(
            yaml_value(path.read_text(encoding="utf-8"), path) or {}, f"{group}."
        )


@cache
def default_config() -> dict[str, Any]:
    """The default configuration, unresolved; safe to call while another app is being composed.

    Composed once, and not to be changed.
    """
    register_resolvers()
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            node = OmegaConf.to_container(compose("config"), resolve=False)
    finally:
        GlobalHydra.instance().hydra = before
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _dotted_settings(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if not key.startswith("_"):
            yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted_settings(value, f"{prefix}{key}.")


def _groups() -> list[Path]:
    root = Path(str(files("conf")))
    return [path for path in sorted(root.iterdir()) if path.is_dir() and any(path.glob("*.yaml"))]
