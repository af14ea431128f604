"""A training job that cannot run in the memory there is: what lacks where, and what would help.

The errors carry facts and remedies. `tandem.wiring.budget.advised_line` names the keys of a
configuration for them: policies know none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TypeVar

from engine.contract.layout import Mode, TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder
from engine.contract.regions import SHARED_OWNER, Pool, Tier, Work
from engine.contract.rules import Advised, Remedy
from engine.contract.view import View
from traces.serving.request import TrainingJob

Half = TypeVar("Half")
Fit = Callable[[Half, tuple[Slice, ...], View, PlanBuilder], None]


class DoesNotFit(Advised, MemoryError):
    """A job that finds no room: an answer about the budget, and no fault of a program.

    Args:
        problem: one line with what is missing.
        remedies: what would help, most useful first.
    """

    def __init__(self, problem: str, remedies: Sequence[Remedy] = ()) -> None:
        super().__init__(problem)
        self.remedies = tuple(remedies)


class OutOfMemory(DoesNotFit):
    """A launch, or a place that is filled from the start, can never fit into a pool.

    Args:
        pool: the tier and the device that are short.
        deficit_bytes: how much the pool lacks at least.
        what: the launch or the states that do not fit.
        remedies: what would help beside more memory, most useful first.
        start: of model states, where the planner lets them begin (see `Start` of planners).
    """

    def __init__(
        self,
        pool: Pool,
        deficit_bytes: int,
        what: str,
        remedies: Sequence[Remedy] = (),
        start: str | None = None,
    ) -> None:
        self.lacking = f"{pool[0]}:{pool[1]} is at least {deficit_bytes:,} bytes short for {what}"
        super().__init__(self.lacking + (f" (start: {start})" if start else ""), remedies)
        self.pool, self.deficit_bytes, self.what, self.start = pool, deficit_bytes, what, start

    def with_first(self, *remedies: Remedy) -> OutOfMemory:
        """This error with more remedies, before those that it names.

        Args:
            remedies: what else a job may change, most useful first.

        Returns:
            A new error.
        """
        named = (*remedies, *self.remedies)
        return OutOfMemory(self.pool, self.deficit_bytes, self.what, named, self.start)


def remedies_of_launch(
    tier: Tier, work: Work, spec: TrainingJob, layout: TrainingLayout
) -> tuple[Remedy, ...]:
    """What a job may change so that a launch takes less of a tier.

    The device holds activations and, for the moment, chunks. The host holds states, and activations
    and inputs of layers only where they are offloaded. An update runs when activations are gone.

    Args:
        tier: the tier that is short.
        work: of the launch.
        spec: the training job.
        layout: its chunks and units.

    Returns:
        Remedies that the job has not taken yet, most useful first.
    """
    layers, updates = layout.units[1:-1], work is Work.UPDATE
    modes, sends = {unit.mode for unit in layers}, any(unit.sends_input for unit in layers)
    trains_all, spans = spec.recipe.lora_rank is None, _spans_units(layout)
    if updates:
        found = {
            Remedy.SMALLER_CHUNKS: tier is Tier.GPU and spans,
            Remedy.TRAIN_ADAPTERS: trains_all,
        }
    elif tier is Tier.HOST:
        found = {
            Remedy.RECOMPUTE: Mode.OFFLOAD in modes,
            Remedy.KEEP_INPUTS: sends,
            Remedy.TRAIN_ADAPTERS: trains_all,
        }
    else:
        found = {
            Remedy.SMALLER_MICROBATCHES: spec.sequences > 1,
            Remedy.SHORTER_SEQUENCES: spec.sequences == 1,
            Remedy.RECOMPUTE: Mode.KEEP in modes,
            Remedy.OFFLOAD_INPUTS: not sends and Mode.KEEP not in modes,
            Remedy.SMALLER_CHUNKS: spans,
        }
    return tuple([remedy for remedy, helps in found.items() if helps])


def _spans_units(layout: TrainingLayout) -> bool:
    """Whether a chunk holds more than a unit needs; a tied table by itself does not."""
    uses = Counter([chunk for unit in layout.units for chunk in unit.chunks])
    return any(n > 1 and len(layout.chunks[c].parameters) > 1 for c, n in uses.items())


def remedies_of_states(jobs: Iterable[TrainingJob]) -> tuple[Remedy, ...]:
    """What makes model states smaller.

    Where else they may lie depends on the memory policy, which a planner is not given.

    Args:
        jobs: all training jobs.

    Returns:
        Remedies, most useful first.
    """
    train_all = any([job.recipe.lora_rank is None for job in jobs])
    return (*[Remedy.TRAIN_ADAPTERS] * train_all, Remedy.SMALLER_MODEL)


def patient(fit: Fit[Half]) -> Fit[Half]:
    """Wraps a memory policy's `fit`: it plans nothing while memory of ended jobs is still held.

    The engine shows that memory when it is free, and asks again. So OutOfMemory is raised only
    where no memory is still to come back.

    Args:
        fit: the `fit` of a memory policy.

    Returns:
        The `fit` that waits; it raises what `fit` raises.
    """

    @wraps(fit)
    def waiting(half: Half, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        try:
            if batch:
                fit(half, batch, view, plan)
        except OutOfMemory:
            if not _is_left_behind(view):
                raise
            plan.discard()

    return waiting


def _is_left_behind(view: View) -> bool:
    jobs = (*view.serving, *view.training, *view.waiting)
    owners = {SHARED_OWNER, *(job.job_id for job in jobs), *(view.records or ())}
    return any(place.region.owner not in owners for place in view.held_bytes)
