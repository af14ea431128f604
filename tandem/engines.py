"""Where the points of a sweep run. All engines take tasks and yield outcomes as they are known."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from typing import Any

from tandem.errors import RunFailed, Usage
from tandem.point import Outcome, Task, lost, run_point, run_points
from tandem.workers import ATTEMPTS, in_processes

Options = Mapping[str, Any]
Outcomes = Generator[Outcome, None, None]
Engine = Callable[[Sequence[Task], int, Options], Outcomes]
DAY_MINUTES = 24 * 60


def serial(tasks: Sequence[Task], jobs: int, options: Options) -> Outcomes:
    """One after the other in this process: for debuggers. A crash here is the sweep's."""
    _takes_none("serial", options)
    yield from map(run_point, tasks)


def processes(tasks: Sequence[Task], jobs: int, options: Options) -> Outcomes:
    """Parallel processes on this machine."""
    _takes_none("processes", options)
    yield from in_processes(tasks, jobs)


def on_ray(tasks: Sequence[Task], jobs: int, options: Options) -> Outcomes:
    """A Ray task per point: on the cluster of RAY_ADDRESS, else with `jobs` workers here.

    Options are those of a Ray task: num_cpus, num_gpus, resources, ... All nodes need this
    installation and a common file system.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unless asked for
    ray = _imported("ray", "ray")
    started = not ray.is_initialized()
    if started:
        local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs}
        try:
            ray.init(log_to_driver=False, **local)
        except Exception as error:  # Ray waits half a minute for its own processes to start
            raise RunFailed(
                f"--engine ray: Ray did not start ({_first_line(error)}); try again on a quieter "
                "machine, or take the engine that needs no server: --engine processes"
            ) from error
    try:
        remote = ray.remote(run_point).options(max_retries=ATTEMPTS - 1, **options)
        running = {remote.remote(task): task for task in tasks}
        while running:
            [ready], _ = ray.wait(list(running), num_returns=1)
            task = running.pop(ready)
            try:
                yield ray.get(ready)
            except ray.exceptions.RayError as error:
                yield lost(task, f"Ray: {_first_line(error)}, {ATTEMPTS} times")
    finally:
        if started:
            ray.shutdown()


def on_slurm(tasks: Sequence[Task], jobs: int, options: Options) -> Outcomes:
    """Slurm jobs through submitit, `jobs` at a time; on this machine where there is no Slurm.

    A job takes seconds to start, so the points are dealt out in as many parts as there are jobs;
    those of lost jobs get one each. Options are those of submitit: slurm_partition, mem_gb, ...
    """
    submitit = _imported("submitit", "slurm")
    executor = submitit.AutoExecutor(folder=tasks[0].folder.parent / "jobs")
    executor.update_parameters(timeout_min=DAY_MINUTES, **options)
    left = list(tasks)
    for attempt in range(1, ATTEMPTS + 1):
        parts = [left[i::jobs] for i in range(jobs)] if attempt == 1 else [[t] for t in left]
        left, found = [], iter([part for part in parts if part])
        while wave := list(islice(found, jobs)):
            for job, part in zip(executor.map_array(run_points, wave), wave, strict=True):
                try:
                    yield from job.result()
                except Exception as error:  # submitit has many names for what befell a job
                    if attempt < ATTEMPTS:
                        left += part
                        continue
                    for task in part:
                        yield lost(task, f"submitit: {_first_line(error)}, {ATTEMPTS} times")


ENGINES: dict[str, Engine] = {
    "processes": processes,
    "serial": serial,
    "ray": on_ray,
    "submitit": on_slurm,
}


def _imported(name: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Usage(f"--engine {name}: not installed; pip install 'tandem[{extra}]'") from error


def _takes_none(name: str, options: Options) -> None:
    if options:
        raise Usage(f"--option {next(iter(options))}: engine {name} has no options")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
