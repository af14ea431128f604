"""Points in parallel processes. Each worker holds one point, so a killed one is known by name."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tandem.cli.__main__ import warnings_are_ours
from tandem.config.build import Builder
from tandem.config.composed_config import ComposedConfig
from tandem.sweeps.point import PointOutcome, PointTask, lost, run_point
from tandem.wiring.workload import is_file, trace_file


def import_files(points: Iterable[ComposedConfig]) -> None:
    """Imports each trace and each text to train on once. What is wrong with one, the points that
    want it will say."""
    points = list(points)
    for point in {str(point.config["trace"]): point for point in points}.values():
        with suppress(ValueError):
            import_trace(point)
    for point in {str(_data(point)): point for point in points}.values():
        with suppress(ValueError):
            import_text(point)


def import_trace(point: ComposedConfig) -> None:
    """Imports a point's trace, unless that is kept already, or drawn."""
    if is_file(point.config["trace"]):
        trace_file(point.config["trace"], Path(point.config["cache"]))


def import_text(point: ComposedConfig) -> None:
    """Imports the text that a point trains on, unless that is kept already, or drawn."""
    node = _data(point)
    if node is None:
        return
    data = Builder(point.config["trusted"], point.folders).build(node, "training.data")
    if hasattr(data, "file"):
        data.file(Path(point.config["cache"]))


def _data(point: ComposedConfig) -> Any:
    """The config node of what a point trains on; None where it trains nothing."""
    training = point.config.get("training") or {}
    return training.get("data") if training.get("_target_") else None


ATTEMPTS = 3  # of a point whose worker is lost


class Worker:
    """A process that runs the points it is sent, one at a time. It ends when the pipe does."""

    def __init__(self) -> None:
        context = get_context("spawn")  # a fork would copy threads' locks, torch's among them
        self.here, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        with _ignoring_interrupts():  # inherited: these are for the sweep alone to answer
            self.process.start()
        there.close()
        self.task: PointTask | None = None
        self.attempt = 0

    def give(self, task: PointTask, attempt: int) -> None:
        """Sends a point to run. One that died idle shows as an end of file at the next look."""
        self.task, self.attempt = task, attempt
        with suppress(OSError):
            self.here.send(task)

    def take(self) -> PointOutcome | None:
        """What became of the point; None where the worker died over it."""
        try:
            outcome = self.here.recv()
        except (EOFError, OSError):
            return None
        self.task = None
        assert isinstance(outcome, PointOutcome)
        return outcome

    def end(self) -> int | None:
        """Ends the process, whatever it is doing; returns its exit code."""
        self.process.terminate()
        self.process.join()
        self.here.close()
        return self.process.exitcode


def in_processes(tasks: Sequence[PointTask], jobs: int) -> Generator[PointOutcome, None, None]:
    """Runs the points in `jobs` processes; yields what became of each as it is known."""
    waiting = deque((task, 1) for task in tasks)
    workers: list[Worker] = []
    try:
        while waiting or any(worker.task for worker in workers):
            _hand_out(waiting, workers, jobs)
            busy: dict[object, Worker] = {w.here: w for w in workers if w.task}
            for ready in wait([w.here for w in workers if w.task]):
                worker = busy[ready]
                outcome = worker.take()
                if outcome is None:
                    outcome = _bury(worker, waiting)
                    workers.remove(worker)
                if outcome is not None:
                    yield outcome
    finally:
        for worker in workers:
            worker.end()


def _hand_out(waiting: deque[tuple[PointTask, int]], workers: list[Worker], jobs: int) -> None:
    """Gives points to idle workers, and to new ones as long as there are fewer than `jobs`."""
    idle = [worker for worker in workers if worker.task is None]
    while waiting and (idle or len(workers) < jobs):
        if not idle:
            idle.append(Worker())
            workers.append(idle[-1])
        idle.pop().give(*waiting.popleft())


def _bury(worker: Worker, waiting: deque[tuple[PointTask, int]]) -> PointOutcome | None:
    """Puts the dead worker's point back in line, or records it as failed."""
    task, attempt = worker.task, worker.attempt
    assert task is not None
    worker.process.join(timeout=1)  # its own exit code rather than that of our signal
    how = _exit_reason(worker.end())
    if attempt < ATTEMPTS:
        waiting.append((task, attempt + 1))
        return None
    return lost(task, f"its worker {how}, {ATTEMPTS} times (out of memory?)")


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _serve(there: Connection) -> None:
    """The worker's loop. An error that is no failed run ends it: the point is tried again."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings_are_ours()
    while True:
        try:
            task = there.recv()
        except EOFError:  # the sweep is over, or was killed
            return
        there.send(run_point(task))


def _end_with_parent() -> None:
    """A sweep that is killed takes its workers along: else they would write where the next one,
    which goes on with it, writes too."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ctrl-C, and the end of the terminal, reach all processes in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    told = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in told}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
