"""`tandem compare`: runs of one trace, how far apart they are and why.

Two runs of one policy, one simulated and one measured, are a prediction and its measurement. All
others are compared by the setting in which they differ.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.ab.groups import has_one_policy
from analysis.compare import Comparison, check_same_work, compare
from analysis.run import Run, load, load_checked, load_files
from analysis.yaml_text import yaml_value
from tandem.cli.collect import run_folders
from tandem.cli.errors import Usage
from tandem.sweeps.point import points_in, superseded_in
from tandem.wiring.folder import OK, status_of

RATIOS = "duration_ratios"
OF_COMPARE = ("-replay", "-corrected")  # ends of folders that a comparison simulates


def main(words: Sequence[str]) -> int:
    """Prints the table and the path of the report."""
    parser = argparse.ArgumentParser(
        prog="tandem compare",
        description="Compares runs. A simulated and a measured run of one policy: how far the "
        "prediction is off; the measured plan log is replayed in the simulator to tell the direct "
        "error of durations from its consequence for decisions. Runs that differ in a policy or "
        "another setting, with one seed or several: which is better, by how much, and whether that "
        "could be chance; the first setting is the baseline. Given one run, writes its own report.",
    )
    about = "folder of a run, or one with runs in it, such as a sweep's"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    parser.add_argument("--out", type=Path, help="folder of the report; default: beside the runs")
    parser.add_argument("--no-replay", action="store_true", help="leave the replays out")
    about = "another measurement of the same point; errors within their spread are not explained"
    parser.add_argument("--rerun", type=Path, action="append", default=[], help=about)
    about = "a folder of your own yaml files that the predicted run was given, for the replay"
    parser.add_argument("--config-dir", type=Path, action="append", default=[], help=about)
    about = "an installed package that it was told to trust, again for the replay"
    parser.add_argument("--trusted", action="append", default=[], metavar="PACKAGE", help=about)
    chosen = parser.parse_args(words)
    given = _without_reports(chosen.runs)
    folders = [folder for one in given for folder in _runs_in(one)]
    if len(folders) == 1:
        page = report_of(folders[0], chosen.out)
    elif _is_prediction_and_measurement(folders):
        first, second = folders
        replays, own = not chosen.no_replay, tuple(chosen.config_dir)
        comparison, page = compare_folders(
            first, second, chosen.out, replays, own, chosen.trusted, chosen.rerun
        )
        from analysis.verdicts import table

        print(table(comparison))
    else:
        if chosen.rerun:
            raise Usage("--rerun is of a prediction and its measurement; give these runs as RUN")
        told, page = compare_settings(folders, chosen.out or _beside(given, folders))
        print(told)
    print(f"report: {page}")
    return 0


def _runs_in(given: Path) -> list[Path]:
    """The folder itself, or all finished runs below it that no newer run supersedes.

    They have the order of their sweep, whose first point is the baseline.
    """
    if not given.is_dir() or (given / "status.json").is_file():
        return [given]  # which says what it lacks as it is read
    found = run_folders(given)
    places = sorted({folder.parent for folder in found})
    old = {place: superseded_in(place) for place in places}
    order = {place / name: i for place in places for i, name in enumerate(points_in(place))}
    kept = [f for f in found if status_of(f) == OK and f.name not in old[f.parent]]
    kept = [f for f in kept if not _is_of_compare(f)]
    return sorted(kept, key=lambda f: (f.parent, order.get(f, len(order)))) or [given]


def _without_reports(given: Sequence[Path]) -> Sequence[Path]:
    """Leaves out, and tells, reports of earlier comparisons, which a pattern of a shell names too.

    All stay where fewer than two folders would be left: then each says what it lacks.
    """
    reports = [one for one in given if _is_report(one)]
    kept = [one for one in given if one not in reports]
    if not reports or len(kept) < 2:
        return given
    names = ", ".join([report.name for report in reports])
    print(f"tandem: {names}: left out, a report and no run", file=sys.stderr)
    return kept


def _is_report(folder: Path) -> bool:
    return (folder / "report.html").is_file() and not run_folders(folder)


def _is_of_compare(folder: Path) -> bool:
    """Whether an earlier comparison simulated this run: its report lies beside it."""
    of = [folder.name.removesuffix(end) for end in OF_COMPARE if folder.name.endswith(end)]
    return any((folder.with_name(name) / "report.html").is_file() for name in of)


def _is_prediction_and_measurement(folders: Sequence[Path]) -> bool:
    if len(folders) != 2:
        return False
    a, b = (load_files(folder) for folder in folders)
    return a.is_measured != b.is_measured and has_one_policy(a, b)


def _beside(given: Sequence[Path], folders: Sequence[Path]) -> Path:
    """The default place of a report of settings: in a sweep, else beside the first run."""
    if len(given) == 1:
        return given[0] / "comparison"
    first, *others = (folder.resolve() for folder in folders)
    name = others[0].name if len(others) == 1 else f"{len(others)}-runs"
    return first.with_name(f"{first.name}-against-{name}")


def compare_settings(folders: Sequence[Path], out: Path) -> tuple[str, Path]:
    """Compares runs by the setting that differs and writes the report; returns the tables.

    Raises:
        ValueError: In one line, runs that cannot be compared.
    """
    from analysis.ab.differences import against_baseline
    from analysis.ab.told import table
    from analysis.pages.ab import left_out, write_ab_report

    found = against_baseline([load_checked(folder) for folder in folders])
    words = [*(str(folder.resolve()) for folder in folders), "--out", str(out.resolve())]
    command = f"tandem compare {shlex.join(words)}"
    page = write_ab_report(found, out, command)
    told = [table(pair) for pair in found]
    return "\n\n".join([*told, *left_out([found[0].a, *(pair.b for pair in found)])]), page


def report_of(folder: Path, out: Path | None = None) -> Path:
    """The report of a single run, by default beside its folder."""
    from analysis.pages.report import write_run_report

    run = load(folder)
    out = out or run.folder.with_name(f"{run.name}-report")
    page = write_run_report(run, out)
    _export(out, {"run": run})
    return page


def compare_folders(
    first: Path,
    second: Path,
    out: Path | None = None,
    replays: bool = True,
    folders: Sequence[Path] = (),
    trusted: Sequence[str] = (),
    reruns: Sequence[Path] = (),
) -> tuple[Comparison, Path]:
    """Compares and writes the report; the measured run is the yardstick whatever the order."""
    from analysis.pages.report import write_report

    a, b = load(first), load(second)
    if a.is_measured and not b.is_measured:
        a, b = b, a
    check_same_work(a, b)
    others = [load(folder) for folder in reruns]
    for run in others:
        if not run.is_measured:
            raise Usage(f"--rerun {run.folder}: a simulation has no spread; give a measured run")
        check_same_work(run, b)
    out = out or b.folder.with_name(f"{a.name}-against-{b.name}")
    replay = corrected = None
    # a server shows no plans, so there is nothing of it to replay
    if replays and b.is_measured and not a.is_measured and len(b.plans):
        beside = out.with_name(f"{out.name}{OF_COMPARE[0]}")
        replay = load(replay_of(a, b, beside, folders, trusted))
        if not a.config.get(RATIOS):  # the ratios would have to be those of the plain cost
            beside = out.with_name(f"{out.name}{OF_COMPARE[1]}")
            corrected = load(corrected_of(a, b, replay, beside, folders, trusted))
    comparison = compare(a, b, replay, corrected, others)
    page = write_report(comparison, out)
    _export(out, {"prediction": a, "measurement": b})
    return comparison, page


def _export(out: Path, runs: dict[str, Run]) -> None:
    """For other tools: one timeline for Perfetto, and each run as a vLLM benchmark's result."""
    from analysis.classes import limits_in
    from analysis.perfetto import write_perfetto
    from analysis.vllm_json import write_vllm_json

    write_perfetto(out / "timeline.json.gz", list(runs.items()))
    served = {name: run for name, run in runs.items() if len(run.requests)}
    for name, run in served.items():
        write_vllm_json(run.folder, out / f"{name}.vllm.json", limits_in(run.config))


def replay_of(
    prediction: Run,
    measurement: Run,
    folder: Path,
    folders: Sequence[Path] = (),
    trusted: Sequence[str] = (),
) -> Path:
    """Simulates the measured run's plan log in the predicted run's configuration.

    The memory is the measured run's to the page, so every plan of the log fits. Replaces an earlier
    replay, and nothing else. Only our packages, modules in or beside `folders`, and `trusted`
    packages are built.

    Raises:
        Usage: Another run lies in `folder`, or the files of the predicted run have changed.
    """
    recorded = {
        "scheduling": None,
        "memory": None,
        "planner": {"_target_": None},
        "replayed": str(measurement.folder),
    }
    budget = {
        **prediction.config["budget"],
        "kv_pages": measurement.provenance["kv_pages"],
        "kv_bytes": None,
        "may_refuse": True,  # refused requests are in the log
    }
    changes = {**recorded, "budget": budget}
    return _simulated(prediction, changes, folder, folders, trusted, "policy=recorded")


def corrected_of(
    prediction: Run,
    measurement: Run,
    replay: Run,
    folder: Path,
    folders: Sequence[Path] = (),
    trusted: Sequence[str] = (),
) -> Path:
    """Simulates the predicted run with durations scaled by the measured ratios; see `replay_of`.

    Its policy decides for itself: the error that it leaves does not come from durations.

    Raises:
        Usage: as `replay_of`.
    """
    from analysis.causes import duration_ratios

    changes = {RATIOS: duration_ratios(replay, measurement)}
    return _simulated(prediction, changes, folder, folders, trusted)


def _simulated(
    prediction: Run,
    changes: Mapping[str, Any],
    folder: Path,
    folders: Sequence[Path],
    trusted: Sequence[str],
    policy: str | None = None,
) -> Path:
    """Runs the predicted run's configuration with changes; `policy` is the word that they mean."""
    from tandem.config.composed_config import ComposedConfig
    from tandem.wiring.cost import profile_hash
    from tandem.wiring.experiment import run_experiment

    if status_of(folder) is not None:
        _remove_replay(folder)
    priced_by = prediction.provenance.get("profile_hash")
    if priced_by not in (None, profile_hash(prediction.config.get("profile"))):
        raise Usage(
            f"the measured plans cannot be replayed: profile={prediction.config['profile']} is not "
            f"what {prediction.name} was predicted with, its files have changed; try --no-replay"
        )
    # What a run's folder says adds no trust: the comparison's own words say what may be built.
    config = {**prediction.config, **changes, "trusted": [*trusted]}
    words = tuple(prediction.provenance.get("overrides", ()))
    if policy is not None:
        words = (*(word for word in words if not word.startswith("policy=")), policy)
    try:
        run_experiment(ComposedConfig(config, words, tuple(folders)), folder)
    except ValueError as error:  # such as a trace or profile that is gone
        raise Usage(
            f"the measured plans cannot be replayed ({error}); try --no-replay, or --config-dir "
            "and --trusted where the run was given such"
        ) from error
    return folder


def _remove_replay(folder: Path) -> None:
    path = folder / "config.yaml"
    config = yaml_value(path.read_text(encoding="utf-8"), path) if path.is_file() else None
    if not isinstance(config, dict) or not (config.get("replayed") or config.get(RATIOS)):
        raise Usage(
            f"{folder}: the replay belongs there, and a run that is none is in it; results are "
            "never overwritten: take another --out, or --no-replay"
        )
    shutil.rmtree(folder)
