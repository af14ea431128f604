"""What says that a training job cannot run in the memory there is: one line, in every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from engine.plan import SHARED_OWNER, Plan, Pool, Slice
from engine.view import View

Half = TypeVar("Half")
Fit = Callable[[Half, tuple[Slice, ...], View], Plan]


class DoesNotFit(MemoryError):
    """What is to be trained finds no room: an answer about the budget, and no fault of a program.
    The message is one line with what is missing and what would help."""


class OutOfMemory(DoesNotFit):
    """A launch, or what lies there from the start, can never fit; says where and by how much."""

    def __init__(self, pool: Pool, deficit_bytes: int, what: str) -> None:
        tier, device = pool
        super().__init__(
            f"{tier}:{device} is at least {deficit_bytes:,} bytes short for {what}; "
            "give it more memory, or take smaller microbatches or chunks, or recompute"
        )
        self.pool, self.deficit_bytes = pool, deficit_bytes


def patient(fit: Fit[Half]) -> Fit[Half]:
    """A memory policy's `fit` that wants nothing where memory of jobs that have ended is still to
    come back: the engine then shows it, and asks again."""

    @wraps(fit)
    def waiting(half: Half, batch: tuple[Slice, ...], view: View) -> Plan:
        try:
            return fit(half, batch, view) if batch else Plan()
        except OutOfMemory:
            if _is_left_behind(view):
                return Plan()
            raise

    return waiting


def _is_left_behind(view: View) -> bool:
    jobs = (*view.serving, *view.training, *view.waiting)
    owners = {SHARED_OWNER, *(job.job_id for job in jobs)}
    return any(place.region.owner not in owners for place in view.held_bytes)
