"""`tandem run`: one run, or a sweep with -m by Hydra's app."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.catalog import unswept
from tandem.cli.errors import RunFailed
from tandem.config.composed_config import FOLDER, ComposedConfig, keep, overrides_of, recalled
from tandem.config.outside import check_trust
from tandem.wiring.folder import provenance_in, remove_empty

if TYPE_CHECKING:
    from omegaconf import DictConfig

SHORT_FLAGS = ("-c", "-p", "-i", "-cp", "-cn", "-cd")  # Hydra's, that a value follows

log = logging.getLogger(__name__)
_given: list[str] = []  # the words of the command line
_failed: list[Exception] = []  # of a single run, for `_run_app` to raise without Hydra's own words


def main(words: Sequence[str]) -> int:
    """Runs what the words say; 0 if all runs served as they should. Raises what `guarded` tells."""
    if any("range(" in word for word in words):
        from tandem.sweeps.grid import check_ranges

        check_ranges(words)
    if _is_for_app(words):
        _run_app(words)
    elif (known := recalled(words)) is not None:
        _run_once(words, known.config, known.new_folder())
    else:
        from tandem.config.compose import composed_run, composing, config_dir_of

        with composing(words, config_dir_of(words)):
            composed, folder, unresolved = composed_run(words)
            _run_once(words, composed.config, folder)
        keep(words, composed, unresolved)
    return 0


def _is_for_app(words: Sequence[str]) -> bool:
    """Whether Hydra itself is asked for something: a flag, or a setting of its own, the folder
    aside."""
    others = (word for word in words if not word.startswith(FOLDER))
    return any(word.startswith("-") or "hydra" in word for word in others)


def _run_once(words: Sequence[str], config: dict[str, Any], named: str) -> None:
    """What Hydra's app would do with these words; the app composes them twice, first for a mode."""
    folder = Path(named).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _carry_out(ComposedConfig(config, overrides_of(words)), folder, is_single=True)
    except (ValueError, RunFailed):
        remove_empty(folder)
        raise


def _run_app(words: Sequence[str]) -> None:
    """Sweeps, the user's own folders, `--cfg`, `--help`: whatever Hydra can do."""
    import hydra

    from tandem.config.compose import composing, config_dir_of, register_resolvers

    _failed.clear()
    _given[:] = words
    register_resolvers()
    app = hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    told = composing(words, config_dir_of(words))
    with told, _raising_hydra(["tandem run", *options_first(words)]):
        app(_run_job)()
    if _failed:
        raise _failed[0]


def _run_job(cfg: DictConfig) -> None:
    """One point, into Hydra's folder. In a sweep an error passes on once all points have run."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from tandem.config.compose import config_folders, plain

    of_hydra = HydraConfig.get()
    folder = Path(of_hydra.runtime.output_dir)
    is_single = of_hydra.mode is RunMode.RUN
    folders = config_folders(of_hydra.runtime.config_sources)
    given = OmegaConf.to_container(of_hydra.overrides.task)  # interpolations as they were written
    assert isinstance(given, list)
    overrides = tuple(map(str, given))
    try:
        point = ComposedConfig(plain(cfg, overrides), overrides, folders)
        check_trust(point.config, _given)  # a sweep's own words may be of a yaml
        _carry_out(point, folder, is_single)
    except (ValueError, RunFailed) as error:
        if not is_single:
            raise
        remove_empty(folder)  # Hydra made it
        _failed.append(error)


def _carry_out(point: ComposedConfig, folder: Path, is_single: bool) -> None:
    """Runs the point; RunFailed, with the results in place, where all requests were refused, or a
    server lost some."""
    from tandem.cli.terminal import brief, refusal, told
    from tandem.wiring.experiment import as_swept, run_experiment

    if not is_single:
        point = replace(point, config=as_swept(point.config))
    if is_single and (keys := unswept(point.overrides, point.folders)):
        log.warning(
            "this experiment sweeps %s, and one point of it is run; tandem sweep runs them all",
            ", ".join(keys),
        )
    try:
        metrics = run_experiment(
            point, folder, is_single and sys.stderr.isatty(), keeps_rejected=not is_single
        )
    except RunFailed as failed:
        if not is_single:
            raise
        raise _with_min_budget(point, failed) from failed.__cause__
    where = os.path.relpath(folder)
    if is_single:
        print(told(metrics, provenance_in(folder)))
        print(where)
    else:
        print(f"{where}  {' '.join(point.overrides)}  {brief(metrics)}", flush=True)
    if (refused := refusal(Path(where), metrics, point.config)) is not None:
        raise RunFailed(refused)


def _with_min_budget(point: ComposedConfig, failed: RunFailed) -> RunFailed:
    """With what `tandem plan` says of a job that does not fit: the budget that would do."""
    from policies.training.out_of_memory import DoesNotFit
    from tandem.cli.plan_command import told_min_budget

    why = failed.__cause__
    if not isinstance(why, DoesNotFit):
        return failed
    try:
        least = told_min_budget(point, why)
    except (Exception, KeyboardInterrupt):  # the cause of the failure is told in any case
        return failed
    return RunFailed(f"{failed}; {least}") if least else failed


def options_first(words: Sequence[str]) -> list[str]:
    """Flags and their values before overrides: argparse takes overrides in one stretch only."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        takes_one = before in SHORT_FLAGS or before.startswith("--")
        is_value = takes_one and "=" not in before and "=" not in word
        (flags if word.startswith("-") or is_value else overrides).append(word)
    return flags + overrides


@contextmanager
def _raising_hydra(argv: list[str]) -> Iterator[None]:
    """Hydra reads these words, and raises what it would print; `guarded` prints one line."""
    old_argv, old_switch = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = old_argv
        del os.environ["HYDRA_FULL_ERROR"]
        if old_switch is not None:
            os.environ["HYDRA_FULL_ERROR"] = old_switch
