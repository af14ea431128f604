"""`tandem sweep`: a grid of points, run in parallel; what is finished is never run again."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from analysis.swept import REPLICATES, key_of, varied
from analysis.yaml_text import yaml_value
from tandem.cli.catalog import with_axes
from tandem.cli.errors import Usage
from tandem.cli.terminal import (
    Overrides,
    PointTold,
    Tried,
    best,
    largest_model_lines,
    model_of,
    num_lost,
    points_table,
)
from tandem.sweeps.engines import ENGINES
from tandem.sweeps.grid import Grid, grid_of
from tandem.sweeps.point import (
    PointOutcome,
    PointTask,
    add_points,
    check_points,
    metrics_of,
    superseded_in,
    tasks_of,
)
from tandem.wiring.folder import (
    ANSWERED,
    DOES_NOT_FIT,
    FAILED,
    OK,
    REJECTED,
    provenance_in,
    sole_user,
    status_of,
)

EXAMPLE = """example:
  tandem sweep policy=chunked_restart,continuous_swap arrival.rate=2,4,8 seed=0,1,2
  tandem sweep experiment=max_scale policy=patrickstar   (what else its yaml sweeps, is swept)
It prints a row per point. Each has a folder in DIR, named by what varies, with a hash behind.
An interrupted sweep goes on with its command and --out DIR. It may grow there; another sweep is
refused. Failed points are tried again, points that do not fit are not. Points whose settings, trace
or code have changed are run again."""
WALL_CLOCK = ("cpu", "cuda", "openai")
CHANGED = "code, trace or yaml changed since {} of them ran"
LOCK = ".lock"  # in the folder of a sweep, held while it runs


def main(words: Sequence[str]) -> int:
    """Runs the grid; 1 if a point failed or was rejected, or a server lost requests, else 0."""
    chosen = _parser().parse_intermixed_args(words)
    options = _options(chosen.option)
    grid = grid_of(with_axes(chosen.overrides, chosen.config_dir), chosen.config_dir)
    root = (chosen.out or default_folder()).resolve()
    tasks = tasks_of(grid.points(), root, _swept(grid))
    jobs = default_jobs(tasks) if chosen.jobs is None else chosen.jobs
    if jobs < 1:
        raise Usage(f"--jobs {jobs}: at least one is needed")
    with sole_user(root / LOCK, f"--out {root}: another sweep is running there"):
        points = {task.key: task.point.overrides for task in tasks}
        check_points(root, points)
        add_points(root, points)
        left = [task for task in tasks if status_of(task.folder) not in ANSWERED]
        _say_start(grid, len(tasks), len(left), jobs, chosen.engine, root)
        if num_changed := _num_changed(left, root):
            print(CHANGED.format(num_changed), flush=True, file=sys.stderr)
        try:
            carry_out(left, jobs, chosen.engine, options)
        finally:
            num_wrong = _say_end(root, tasks, words)
    return 1 if num_wrong else 0


def _swept(grid: Grid) -> set[str]:
    """The keys that take several values."""
    return {key_of(axis.key) for axis in grid.axes if len(axis.words) > 1}


def carry_out(
    tasks: Sequence[PointTask], jobs: int, engine: str, options: Mapping[str, Any]
) -> None:
    """Runs the tasks through an engine; the outcome of each is in its folder."""
    if not tasks:
        return
    from tandem.sweeps.workers import import_files

    import_files(task.point for task in tasks)
    points = {task.key: task.point for task in tasks}
    with _bar(len(tasks)) as tell, closing(ENGINES[engine](tasks, jobs, options)) as outcomes:
        for outcome in outcomes:
            tell(outcome, " ".join(points[outcome.key].overrides))


def default_folder() -> Path:
    """A new folder under outputs/, where runs lie too."""
    return (
        Path("outputs")
        / time.strftime("%Y-%m-%d")
        / time.strftime(f"%H-%M-%S-{secrets.token_hex(3)}")
    )


def default_jobs(tasks: Sequence[PointTask]) -> int:
    """A process per core; one alone where points are measured, so that they do not disturb."""
    measured = any(task.point.config["backend"]["name"] in WALL_CLOCK for task in tasks)
    return 1 if measured else max(1, min(os.cpu_count() or 1, len(tasks)))


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere failed points alone are told."""
    from tqdm import tqdm

    with tqdm(total=total, unit="point", disable=not sys.stderr.isatty(), file=sys.stderr) as bar:

        def tell(outcome: PointOutcome, words: str) -> None:
            if outcome.error is not None:
                tqdm.write(f"failed: {words}: {outcome.error}", file=sys.stderr)
            bar.update()

        yield tell


def _say_start(grid: Grid, total: int, left: int, jobs: int, engine: str, root: Path) -> None:
    done = f", {total - left} of them finished before" if left < total else ""
    print(f"{total} points ({grid.told()}){done}", file=sys.stderr)
    print(
        f"{left} to run, {engine}, {jobs} at a time, into {os.path.relpath(root)}",
        flush=True,
        file=sys.stderr,
    )


def _num_changed(left: Sequence[PointTask], root: Path) -> int:
    """How many of these have a result in the folder whose settings are equal, but not its key."""
    earlier = {
        tuple(sorted(words))
        for key, words in superseded_in(root).items()
        if status_of(root / key) in ANSWERED
    }
    return sum(tuple(sorted(task.point.overrides)) in earlier for task in left)


def _say_end(root: Path, tasks: Sequence[PointTask], words: Sequence[str]) -> int:
    """Collects and tells the results, also after Ctrl-C.

    Returns how many points failed, were rejected or lost requests.
    """
    from tandem.cli.collect import run_folders, write_runs

    if run_folders(root):
        write_runs(root)
    states = {task.key: status_of(task.folder) for task in tasks}
    finished = [task for task in tasks if states[task.key] == OK]
    counted = [list(states.values()).count(s) for s in (DOES_NOT_FIT, FAILED, REJECTED)]
    num_unfit, num_failed, num_rejected = counted
    metrics = {task.key: metrics_of(task.folder) for task in finished}
    lost = [count for found in metrics.values() if (count := num_lost(found))]
    common = set.intersection(*(set(task.point.overrides) for task in tasks))
    if table := points_table(points_told(tasks, states, metrics)):
        print(f"{table}\n")
    keys = varied(task.point.overrides for task in tasks)
    is_repeated = any(key in REPLICATES for key in keys)
    runs = [
        (" ".join(_but_replicates(_apart(task, common))), metrics[task.key]) for task in finished
    ]
    print(best(runs, ", means over seeds" if is_repeated else ""))
    print(*_largest_model_lines(tasks, states, common), sep="", end="")
    where = os.path.relpath(root)
    told = f"{len(finished)} of {len(tasks)} points finished, {num_failed} failed"
    told += f", {num_unfit} do not fit" if num_unfit else ""
    told += f", {num_rejected} rejected" if num_rejected else ""
    told += f"; the server lost {sum(lost)} requests at {len(lost)} of them" if lost else ""
    print(f"{told}: {where}")
    if len(finished) + num_unfit < len(tasks):
        print(f"to go on: tandem sweep {shlex.join(_without_out(words))} --out {where}")
    if finished:
        print(f"report:   tandem report {where}")
    if is_repeated and len({name for name, _ in runs}) > 1:
        print(f"compare:  tandem compare {where}")
    return num_failed + num_rejected + len(lost)


def points_told(
    tasks: Sequence[PointTask],
    states: Mapping[str, str | None],
    metrics: Mapping[str, Mapping[str, Any]],
) -> list[PointTold]:
    """Settings, status and metrics of each point, in the order of the grid."""
    keys = varied(task.point.overrides for task in tasks)
    told = []
    for task in tasks:
        values = {key_of(word): word.partition("=")[2] for word in task.point.overrides}
        own = {key: values.get(key, "") for key in keys}
        told.append(PointTold(own, states[task.key] or "not run", metrics.get(task.key, {})))
    return told


def _apart(task: PointTask, common: set[str]) -> Overrides:
    """The overrides that tell a point from other points."""
    return tuple(word for word in task.point.overrides if word not in common)


def _but_replicates(words: Overrides) -> Overrides:
    return tuple(word for word in words if key_of(word) not in REPLICATES)


def _largest_model_lines(
    tasks: Sequence[PointTask], states: Mapping[str, str | None], common: set[str]
) -> Iterator[str]:
    """The largest model trained per choice of all else; nothing where one model was swept."""
    rows = []
    for task in tasks:
        if (state := states[task.key]) in ANSWERED:
            known = provenance_in(task.folder) if state == OK else {}
            if state == OK and "parameters" not in known:
                return  # serves
            words = _apart(task, common)
            rows.append(Tried(words, known.get("parameters", 0), state == OK))
    if len({model_of(row.overrides) for row in rows}) > 1:
        yield from (f"{line}\n" for line in largest_model_lines(rows, "trained"))


def _without_out(words: Sequence[str]) -> list[str]:
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if word != "--out" and before != "--out" and not word.startswith("--out="):
            kept.append(word)
    return kept


def _options(words: Sequence[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    if wrong := [key for key, mark, _ in pairs if not mark]:
        raise Usage(f"--option {wrong[0]}: KEY=VALUE is wanted")
    return {key: _option(key, value) for key, _, value in pairs}


def _option(key: str, text: str) -> Any:
    """A value in YAML, but for times, which YAML counts in base sixty: 1:00:00 is text."""
    value = yaml_value(text, f"--option {key}={text}")
    return text if ":" in text and isinstance(value, int | float) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem sweep",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=a,b,c", help="as for tandem run -m")
    parser.add_argument("--jobs", type=int, help="points at a time; default: a process per core")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="processes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="an earlier sweep's is continued")
    parser.add_argument("--config-dir", help="a folder of your own yaml files")
    about = "of a ray task (num_gpus=1) or of submitit (slurm_time=1:00:00)"
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=about)
    return parser
