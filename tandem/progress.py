"""Progress bars on a terminal, nothing elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from engine.engine import Engine
from engine.recorder import Recorder
from traces.request import Request, TrainingJob

INTERVAL_S = 0.5


@contextmanager
def progress_bar(
    engine: Engine, work: Sequence[Request | TrainingJob], is_shown: bool
) -> Iterator[None]:
    """Shows how much of the work has left the engine, while the block runs: see `amount`."""
    if not is_shown:
        yield
        return
    from tqdm import tqdm

    over = threading.Event()
    total, unit = amount(work)

    def watch() -> None:
        with tqdm(total=total, unit=unit, file=sys.stderr, leave=False) as bar:
            while not over.wait(INTERVAL_S):
                bar.n = done(engine.recorder)
                bar.refresh()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def search_bar(what: str) -> Iterator[Callable[[], object]]:
    """Counts, while the block runs, the points that are tried in a search: to be called for each.
    What cost tables say of those is not told, since nobody asked for them."""
    from tqdm import tqdm

    tables, was_disabled = logging.getLogger("sim.table"), logging.getLogger("sim.table").disabled
    tables.disabled = True
    try:
        with tqdm(desc=what, unit=" tried", leave=False, disable=None) as bar:  # None: no terminal
            yield bar.update
    finally:
        tables.disabled = was_disabled


def amount(work: Sequence[Request | TrainingJob]) -> tuple[int, str]:
    """How much there is to do, and its unit: requests, steps of training, or both as items."""
    steps = [item.num_steps for item in work if isinstance(item, TrainingJob)]
    requests = len(work) - len(steps)
    return requests + sum(steps), "step" if not requests else "item" if steps else "req"


def done(recorder: Recorder) -> int:
    """How much of it is."""
    outcomes = list(recorder.outcomes.values())
    return recorder.trained_steps + sum(o.finish_ns is not None for o in outcomes)
