"""`tandem run`: the Hydra app. One run, or a sweep with -m."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tandem.compose import COMPOSING, config_folders, one_line, plain, register_resolvers
from tandem.composed import Composed
from tandem.errors import RunFailed, Usage
from tandem.folder import provenance_in, remove_empty

SHORT_FLAGS = ("-c", "-p", "-i", "-cp", "-cn", "-cd")  # Hydra's, that a value follows

register_resolvers()
_failed: list[Exception] = []  # of a single run, for `main` to raise without Hydra's own words


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def carry_out(cfg: DictConfig) -> None:
    """One point, into Hydra's folder. In a sweep an error passes on once all points have run."""
    of_hydra = HydraConfig.get()
    folder = Path(of_hydra.runtime.output_dir)
    is_single = of_hydra.mode is RunMode.RUN
    try:
        _carry_out(cfg, folder, is_single)
    except (ValueError, RunFailed) as error:
        if not is_single:
            raise
        remove_empty(folder)  # Hydra made it
        _failed.append(error)


def _carry_out(cfg: DictConfig, folder: Path, is_single: bool) -> None:
    """Also raises RunFailed, with the results in place, where every request was refused."""
    from tandem.experiment import run_experiment
    from tandem.refusal import refusal
    from tandem.screen import brief, told

    of_hydra = HydraConfig.get()
    overrides = tuple(of_hydra.overrides.task)
    folders = config_folders(of_hydra.runtime.config_sources)
    point = Composed(plain(cfg, overrides), overrides, folders)
    metrics = run_experiment(
        point, folder, is_single and sys.stderr.isatty(), keeps_rejected=not is_single
    )
    where = os.path.relpath(folder)
    if is_single:
        print(told(metrics, provenance_in(folder)))
        print(where)
    else:
        print(f"{where}  {' '.join(overrides)}  {brief(metrics)}", flush=True)
    if (nobody := refusal(Path(where), metrics, point.config)) is not None:
        raise RunFailed(nobody)


def main(words: Sequence[str]) -> int:
    """Hands the words to Hydra; 0 if all runs served somebody. Raises what `guarded` tells."""
    _failed.clear()
    with _raising_hydra(["tandem run", *options_first(words)]):
        try:
            carry_out()
        except COMPOSING as error:
            raise Usage(one_line(error, words)) from error
    if _failed:
        raise _failed[0]
    return 0


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
