"""The protocol of fidelity: measured reruns of a workload, in turns with their calibration.

A profile is calibrated on synthetic requests, never on the judged ones. Every measured run has
drift probes before and after it. A run, that of the capacity too, is discarded if a probe moved by
more than 3 %, and a calibration if its held-out replay is off by more than 3 % in all: the machine
was not steady. Neither rule looks at the error of a judged run. A shared machine's speed changes by
a third within seconds, so both clocks count time in reference works (runtime/measure/reference.py),
in calibrations and runs. Changes that these do not follow last for minutes (large batches took 8 %
longer half an hour after their calibration), so measurement and calibration take turns: before and
after every judged run, a replay of synthetic requests at the case's rate adds to the calibration of
its tables. With the other core busy, launches moved against the reference work by 4 %.

What lies in a folder already is not done again, so a stopped measurement goes on in its folder.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.distance import drift
from analysis.fidelity import Pair, Rerun, counts
from analysis.metrics import summary
from analysis.run import Run, load
from tandem.cli.compare import replay_of
from tandem.cli.errors import RunFailed
from tandem.config.compose import composed, quoted
from tandem.config.composed_config import with_absolute_paths
from tandem.sweeps.point import point_key
from tandem.wiring.cost import profile_hash
from tandem.wiring.experiment import run_experiment
from tandem.wiring.folder import OK, running_folder, status_of
from tandem.wiring.profile import (
    FITTED,
    calibrate,
    finetunes,
    fitted_replay,
    is_steady,
    refitted,
)

ATTEMPTS = 6  # measured runs per accepted one, at the most
# Files of a profile, without its replays.
GRID = ("profile.json", "steps.parquet", "holdout.parquet", "hashes.json")
POINT = ".point"  # file beside a run, with the hash of its point
PACE = "backend.reference_ns="
PREDICTED = "predicted"  # folder of a case's prediction
# Of the simulations beside the profile's own: factors on durations, evenly on both sides.
PACES = (0.99, 0.9925, 0.995, 0.9975, 1.0025, 1.005, 1.0075, 1.01)
# Words that choose what trains beside requests, and how it is laid out.
TRAINS = ("training=", "training.", "training/", "planner=", "planner.")

Tell = Callable[[str], None]  # hears of each piece of work once it is done

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """One point: its settings, and the folder of its runs."""

    name: str
    settings: tuple[str, ...]
    folder: Path
    calibration: Path  # the profile with the grid of shapes
    config_dir: str | None = None  # with yaml files of the user's

    @property
    def profile(self) -> Path:
        """The profile that is fitted to replays between the case's runs."""
        return self.folder / "profile"

    @property
    def predicted(self) -> tuple[str, ...]:
        """Settings of a simulation."""
        return (*self.settings, f"profile={quoted(self.profile)}")


def run(
    settings: Iterable[str], folder: Path, replaces: bool = False, config_dir: str | None = None
) -> Run:
    """Runs into a folder of its own, or loads the run that a stopped measurement has left there.

    Remains of a killed or failed run are removed. A run of another point (settings, code, yaml,
    trace or profile) is removed with `replaces`; otherwise it raises ValueError.
    """
    settings = [*settings]
    made_of, kept = point_of(settings, config_dir), folder.with_name(f"{folder.name}{POINT}")
    if status_of(folder) == OK:
        if kept.is_file() and kept.read_text(encoding="utf-8") == made_of:
            return load(folder)
        told = f"{folder} holds a run of other settings, code, yaml, trace or profile"
        if not replaces:
            raise ValueError(f"{told}; take another folder")
        log.warning("%s: it is replaced", told)
    cleared(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(made_of, encoding="utf-8")
    run_experiment(composed(settings, config_dir), folder)
    return load(folder)


def point_of(settings: Sequence[str], config_dir: str | None = None) -> str:
    """The hash of a point: its configuration, the files that it names, and the code."""
    point = composed([*settings], config_dir)
    folders = tuple(Path(folder).resolve() for folder in point.folders)
    return point_key(with_absolute_paths(point.config), folders)


def cleared(folder: Path) -> None:
    """Removes a run's folder, and the remains of a killed run beside it."""
    for path in (folder, running_folder(folder)):
        shutil.rmtree(path, ignore_errors=True)


def calibrated(
    settings: Sequence[str],
    folder: Path,
    replays: int,
    tell: Tell,
    config_dir: str | None = None,
) -> Path:
    """Calibrates a profile into `folder` on a steady machine, fitted to `replays` replays.

    Discarded profiles stay beside it. RunFailed after ATTEMPTS unsteady calibrations.
    """
    for _ in range(ATTEMPTS):
        if not folder.is_dir():
            calibrate(composed(settings, config_dir), folder, replays)
        if is_steady(pd.read_csv(folder / "errors.csv", index_col="class")):
            tell("calibrated")
            return folder
        discard(folder)
        tell("the machine changed during the calibration, which is discarded and repeated")
    raise RunFailed(f"{folder}: no steady calibration in {ATTEMPTS}; go on there at a quieter time")


def discard(folder: Path) -> None:
    """Renames a folder whose machine was not steady; it stays beside its repeat."""
    folder.rename(folder.with_name(f"{folder.name}-unsteady{num_discarded(folder)}"))


def num_discarded(folder: Path) -> int:
    """How often a calibration or a capacity was discarded, by what stays beside its folder."""
    return len(list(folder.parent.glob(f"{folder.name}-unsteady*")))


def clock_of(profile: Path) -> str:
    """The override with a profile's clock: one clock for all policies makes them comparable.

    Calibrations within one hour gave decode steps of 2.2 to 4.4 ms.
    """
    about = json.loads((profile / "profile.json").read_text(encoding="utf-8"))
    return PACE + json.dumps(about["reference_ns"], separators=(",", ":"))


def capacity(
    settings: Sequence[str],
    backend: Sequence[str],
    folder: Path,
    replaces: bool = False,
    config_dir: str | None = None,
) -> float:
    """Requests per second with all requests at once, measured; `replaces` as in `run`.

    Settings of other arrivals are left out, and a job that finetunes: the capacity is that of
    serving. The drain is included, so a steady stream of this rate can be served.
    """
    alone = serving_alone(settings, config_dir)
    kept = [word for word in alone if not word.lstrip("+").startswith(("arrival=", "arrival."))]
    done = run((*kept, *backend, "arrival=all_at_once"), folder, replaces, config_dir)
    return float(summary(done)["request_throughput"])


def serving_alone(settings: Sequence[str], config_dir: str | None = None) -> list[str]:
    """The settings without a job that finetunes: its policy then serves by its rules, alone."""
    if not finetunes(composed([*settings], config_dir)):
        return [*settings]
    kept = [word for word in settings if not word.lstrip("+~").startswith(TRAINS)]
    return [*kept, "training=none", "planner=none"]


def steady_capacity(
    settings: Sequence[str],
    backend: Sequence[str],
    folder: Path,
    tell: Tell,
    config_dir: str | None = None,
) -> float:
    """The capacity, measured on a steady machine: the rates of all loads rest on it.

    Discarded runs stay beside it. RunFailed after ATTEMPTS unsteady runs.
    """
    for _ in range(ATTEMPTS):
        found = capacity(settings, backend, folder, config_dir=config_dir)
        moved = drift(load(folder))
        if moved is None or counts(moved):
            tell(f"capacity {found:.3g} requests/s")
            return found
        discard(folder)
        tell(f"capacity: probes moved {moved:.1%}: discarded, and repeated")
    raise RunFailed(f"{folder}: no steady run in {ATTEMPTS}; go on there at a quieter time")


def reruns(case: Case, backend: Sequence[str], count: int, tell: Tell) -> list[Rerun]:
    """Measured runs with their predictions: `count` on a steady machine, and the discarded ones.

    Fewer are steady if the machine is not for long enough. The profile is fitted when all replays
    are there, so each run is predicted by replays before it and after it.
    """
    moves = dict[int, float]()
    accepted = 0
    for number in range(ATTEMPTS * count):
        synthetic_replay(case, backend, number, tell)
        moved = measured_drift(case, backend, number)
        moves[number] = moved
        accepted += counts(moved)
        again = "" if counts(moved) else ": discarded, and repeated"
        tell(f"{case.name}: run {number}, probes moved {moved:.1%}{again}")
        if accepted == count:
            break
    synthetic_replay(case, backend, len(moves), tell)
    refitted(case.profile)
    return [Rerun(number, moved, pair(case, number)) for number, moved in moves.items()]


def measured_drift(case: Case, backend: Sequence[str], number: int) -> float:
    """Measures the judged requests once; the largest drift of the probes around the run."""
    done = run((*case.settings, *backend), measured_folder(case, number), False, case.config_dir)
    moved = drift(done)
    assert moved is not None, "a measured run has probes"
    return moved


def measured_folder(case: Case, number: int) -> Path:
    return case.folder / f"run{number}" / "measured"


def synthetic_replay(case: Case, backend: Sequence[str], number: int, tell: Tell) -> None:
    """Adds a replay of synthetic requests to the case's profile, unless it is there."""
    if number == 0:
        case.profile.mkdir(parents=True, exist_ok=True)
        for name in GRID:  # also where it goes on: it may have stopped here
            shutil.copy(case.calibration / name, case.profile)
    folder = case.profile / f"{FITTED}-{number}"
    if status_of(folder) != OK:
        cleared(folder)
        point = composed([*case.settings, *backend], case.config_dir)
        fitted_replay(point, case.profile, number, streams=True)
    tell(f"{case.name}: replay {number} of synthetic requests")


def pair(case: Case, number: int) -> Pair:
    """A measured run with its prediction, and with its plans replayed in the simulator."""
    measured, predicted = load(measured_folder(case, number)), prediction(case)
    replayed = case.folder / f"run{number}" / "replayed"
    if not (replayed / "metrics.json").is_file():
        folders = [Path(case.config_dir)] if case.config_dir else []
        trusted = predicted.config.get("trusted") or []  # by the words of this command itself
        replay_of(predicted, measured, replayed, folders, trusted)
    return Pair(measured, predicted, load(replayed), varied(case))


def prediction(case: Case) -> Run:
    """The simulation of a case by its profile, anew where that has grown since."""
    return _simulation(case, PREDICTED)


def varied(case: Case) -> tuple[Run, ...]:
    """The simulations of a case at paces beside its own."""
    return tuple([_simulation(case, f"{PREDICTED}-{pace}", f"pace={pace}") for pace in PACES])


def _simulation(case: Case, name: str, *settings: str) -> Run:
    folder = case.folder / name
    if status_of(folder) == OK:
        priced_by = load(folder).provenance.get("profile_hash")
        if priced_by != profile_hash(case.profile):
            cleared(folder)
    return run((*case.predicted, *settings), folder, False, case.config_dir)
