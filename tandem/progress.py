"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.engine import Engine

INTERVAL_S = 0.5


@contextmanager
def progress_bar(engine: Engine, total: int, is_shown: bool) -> Iterator[None]:
    """Shows how many of the requests have left the engine, while the block runs."""
    if not is_shown:
        yield
        return
    from tqdm import tqdm

    done = threading.Event()

    def watch() -> None:
        with tqdm(total=total, unit="req", file=sys.stderr, leave=False) as bar:
            while not done.wait(INTERVAL_S):
                bar.n = sum(
                    o.finish_ns is not None for o in list(engine.recorder.outcomes.values())
                )
                bar.refresh()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
