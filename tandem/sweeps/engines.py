"""Where the points of a sweep run. All engines take tasks and yield outcomes as they are known."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from tandem.cli.errors import RunFailed, Usage
from tandem.sweeps.point import PointOutcome, PointTask, lost, run_point, run_points
from tandem.sweeps.workers import ATTEMPTS, in_processes

log = logging.getLogger(__name__)
Options = Mapping[str, Any]
Outcomes = Generator[PointOutcome, None, None]
Engine = Callable[[Sequence[PointTask], int, Options], Outcomes]
DAY_MINUTES = 24 * 60
CANCEL_S = 30.0  # for jobs to end that were told to


def serial(tasks: Sequence[PointTask], jobs: int, options: Options) -> Outcomes:
    """One after the other in this process: for debuggers. A crash here is the sweep's."""
    _takes_none("serial", options)
    yield from map(run_point, tasks)


def processes(tasks: Sequence[PointTask], jobs: int, options: Options) -> Outcomes:
    """Parallel processes on this machine."""
    _takes_none("processes", options)
    yield from in_processes(tasks, jobs)


def on_ray(tasks: Sequence[PointTask], jobs: int, options: Options) -> Outcomes:
    """A Ray task per point: on the cluster of RAY_ADDRESS, else with `jobs` workers here.

    Options are those of a Ray task: num_cpus, num_gpus, resources, ... All nodes need this
    installation and a common file system. Tasks are cancelled when the sweep ends before them.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unless asked for
    ray = _imported("ray", "ray")
    chosen = {"max_retries": ATTEMPTS - 1, **options}
    with _as_usage("ray"):
        remote = ray.remote(run_point).options(**chosen)
    started = not ray.is_initialized()
    if started:
        _start(ray, jobs)
    running: dict[Any, PointTask] = {}
    try:
        running |= {remote.remote(task): task for task in tasks}
        while running:
            [ready], _ = ray.wait(list(running), num_returns=1)
            task = running.pop(ready)
            try:
                yield ray.get(ready)
            except ray.exceptions.RayTaskError as error:  # what it raised: not tried again
                yield lost(task, f"Ray: {_first_line(error.cause)}")
            except ray.exceptions.RayError as error:
                times = 1 + int(chosen["max_retries"])
                yield lost(task, f"Ray: {_first_line(error)}, {times} times")
    finally:
        for ready in running:
            ray.cancel(ready, force=True)
        if started:
            ray.shutdown()


def on_slurm(tasks: Sequence[PointTask], jobs: int, options: Options) -> Outcomes:
    """Slurm jobs through submitit, `jobs` at a time; on this machine where there is no Slurm.

    A job takes seconds to start, so the points are dealt out in as many parts as there are jobs;
    those of lost jobs get one each. Options are those of submitit: slurm_partition, mem_gb, ...
    Jobs outlive the process that sent them, so they are cancelled when the sweep ends before them.
    """
    submitit = _imported("submitit", "slurm")
    executor = submitit.AutoExecutor(folder=tasks[0].folder.parent / "jobs")
    with _as_usage("submitit"):
        executor.update_parameters(**{"timeout_min": DAY_MINUTES, **options})
    left, running = list(tasks), []
    try:
        for attempt in range(1, ATTEMPTS + 1):
            parts = [left[i::jobs] for i in range(jobs)] if attempt == 1 else [[t] for t in left]
            left, found = [], iter([part for part in parts if part])
            while wave := list(islice(found, jobs)):
                running = _submitted(executor, wave)
                for job, part in zip(running, wave, strict=True):
                    outcomes = _outcomes(job, part, is_last=attempt == ATTEMPTS)
                    if outcomes is None:
                        left += part
                    else:
                        yield from outcomes
    finally:
        _cancel(running)


ENGINES: dict[str, Engine] = {
    "processes": processes,
    "serial": serial,
    "ray": on_ray,
    "submitit": on_slurm,
}


def _start(ray: Any, jobs: int) -> None:
    """Ray on the cluster of RAY_ADDRESS, else here with `jobs` workers; else RunFailed."""
    local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs}
    try:
        ray.init(log_to_driver=False, **local)
    except Exception as error:  # Ray waits half a minute for its own processes to start
        raise RunFailed(
            f"--engine ray: Ray did not start ({_first_line(error)}); try again on a quieter "
            "machine, or take the engine that needs no server: --engine processes"
        ) from error


def _submitted(executor: Any, parts: list[list[PointTask]]) -> list[Any]:
    """A job for each part. RunFailed where Slurm takes none."""
    try:
        return list(executor.map_array(run_points, parts))
    except Exception as error:
        raise RunFailed(f"--engine submitit: no job was taken ({_first_line(error)})") from error


def _outcomes(job: Any, part: list[PointTask], is_last: bool) -> list[PointOutcome] | None:
    """What became of a job's points; None where the job was lost and they may be tried again."""
    try:
        return list(job.result())
    except Exception as error:  # submitit has many names for what befell a job
        if not is_last:
            return None
        return [lost(task, f"submitit: {_first_line(error)}, {ATTEMPTS} times") for task in part]


def _cancel(jobs: Sequence[Any]) -> None:
    """Ends what still runs and waits for that: the next sweep clears the folders it writes to."""
    running = [job for job in jobs if not job.done()]
    for job in running:
        job.cancel(check=False)
    until = time.monotonic() + CANCEL_S
    while running and time.monotonic() < until:
        time.sleep(0.5)
        running = [job for job in running if not job.done(force_check=True)]
    if running:
        log.warning(
            "jobs %s have not ended yet; see that they have before you go on with --out",
            " ".join(str(job.job_id) for job in running),
        )


@contextmanager
def _as_usage(name: str) -> Generator[None, None, None]:
    """Whatever an engine's library raises about its options, in one line."""
    try:
        yield
    except (TypeError, ValueError, NameError, AssertionError) as error:
        raise Usage(f"--option: {name} does not take it ({_first_line(error)})") from error


def _imported(name: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        how = f"in the checkout, pip install -e '.[{extra}]'"
        raise Usage(f"--engine {name}: not installed; {how}") from error


def _takes_none(name: str, options: Options) -> None:
    if options:
        raise Usage(f"--option {next(iter(options))}: engine {name} has no options")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
