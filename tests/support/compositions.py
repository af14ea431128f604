"""Composing again what was composed before, in a fifth of the time, by remembering Hydra's merges.

Nearly all of a composition's time goes into finding the two dozen files of what is chosen, and into
merging them. Both follow from the choices of groups, so each is done once per process. Values are
set, and mistakes in them are found, as ever; what looks into a user's folder is left alone. What
is remembered is pickled: to read it is four times as fast as OmegaConf's own copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

Loader = config_loader_impl.ConfigLoaderImpl


def remember(patch: pytest.MonkeyPatch) -> None:
    """From now on our files are read once, and those of equal choices found and merged once."""
    Plugins.instance()  # finds its sources: classes of its own, not those that one can import
    source = SourcesRegistry.instance().resolve("pkg")
    patch.setattr(source, "load_config", _reading_once(source, source.load_config))
    find, merge = defaults_list.create_defaults_list, Loader._compose_config_from_defaults_list
    patch.setattr(config_loader_impl, "create_defaults_list", _finding_once(find))
    patch.setattr(Loader, "_compose_config_from_defaults_list", _merging_once(merge))


def _reading_once(source: Any, load: Any) -> Any:
    @cache
    def read(provider: str, package: str, name: str) -> bytes:
        return pickle.dumps(load(source(provider, f"pkg://{package}"), name))

    def load_config(self: Any, config_path: str) -> Any:
        return pickle.loads(read(self.provider, self.path, config_path))

    return load_config


def _finding_once(find: Any) -> Any:
    found: dict[Hashable, Any] = {}

    def create_defaults_list(
        repo: Any, config_name: str, overrides_list: Sequence[Any], **how: bool
    ) -> defaults_list.DefaultsList:
        if (sources := _packages(repo)) is None:
            return find(repo, config_name, overrides_list, **how)
        choices = [o.input_line for o in overrides_list if repo.group_exists(o.key_or_group)]
        key = (sources, config_name, *choices, *how.items())
        if key not in found:
            found[key] = find(repo, config_name, overrides_list, **how)
        values = defaults_list.Overrides(repo, overrides_list).config_overrides
        return replace(found[key], config_overrides=values)

    return create_defaults_list


def _merging_once(merge: Any) -> Any:
    merged: dict[Hashable, bytes] = {}

    def compose_config(self: Any, defaults: Sequence[Any], repo: Any) -> Any:
        if (sources := _packages(repo)) is None:
            return merge(self, defaults, repo)
        key = (sources, *map(astuple, defaults))
        if key not in merged:
            merged[key] = pickle.dumps(merge(self, defaults, repo))
        config = pickle.loads(merged[key])
        OmegaConf.clear_cache(config)  # the moment and the name of the run that merged it
        return config

    return compose_config


def _packages(repo: Any) -> tuple[str, ...] | None:
    """Where files come from; None where a user's folder is among it."""
    sources = repo.get_sources()
    is_users = any(source.scheme() == "file" for source in sources)
    return None if is_users else tuple(source.path for source in sources)
