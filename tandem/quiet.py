"""Keeps Python's full garbage collections out of a replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1_000_000  # collections of the middle generation before one of the oldest


@contextmanager
def no_full_collections(begins_with_one: bool = True) -> Iterator[None]:
    """Young garbage is still collected; what is old is looked at again after the block.

    A full collection walks all that transformers has loaded: 0.4 s inside one launch of 8 ms was
    seen (2026-11-21), and no cost model can know when it comes. One at the beginning gives back
    what an earlier run has left; where no memory is measured that may take longer than the run.
    """
    young, middle, old = gc.get_threshold()
    if begins_with_one:
        gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()
