"""What says that a training job cannot run in the memory there is: one line, in every backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TypeVar

from engine.contract.layout import Mode, TrainingLayout
from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder
from engine.contract.regions import SHARED_OWNER, Pool, Tier, Work
from engine.contract.view import View
from traces.serving.request import TrainingJob

Half = TypeVar("Half")
Fit = Callable[[Half, tuple[Slice, ...], View, PlanBuilder], None]

ADAPTERS = "train adapters (training/recipe=lora)"
SMALLER_CHUNKS = "take smaller chunks (planner.chunk_elements)"


class DoesNotFit(MemoryError):
    """What is to be trained finds no room: an answer about the budget, and no fault of a program.
    The message is one line with what is missing and what would help."""


class OutOfMemory(DoesNotFit):
    """A launch, or what lies there from the start, can never fit; says where, by how much, and
    which knobs would help beside more memory."""

    def __init__(
        self, pool: Pool, deficit_bytes: int, what: str, knobs: Sequence[str] = ()
    ) -> None:
        tier, device = pool
        helps = ", or ".join(["give it more memory", *knobs])
        super().__init__(
            f"{tier}:{device} is at least {deficit_bytes:,} bytes short for {what}; {helps}"
        )
        self.pool, self.deficit_bytes = pool, deficit_bytes
        self._what, self._knobs = what, knobs

    def beside(self, *knobs: str) -> OutOfMemory:
        """The same, with knobs that would help before those that it names."""
        return OutOfMemory(self.pool, self.deficit_bytes, self._what, (*knobs, *self._knobs))


def knobs_of_launch(
    tier: Tier, work: Work, spec: TrainingJob, layout: TrainingLayout
) -> tuple[str, ...]:
    """What a job may change so that its launches take less of a tier, beside what it has set.

    The device holds activations and, for the moment, chunks; the host holds states, and activations
    and inputs of layers only where they are offloaded. An update finds no activations any more.
    """
    layers, updates = layout.units[1:-1], work is Work.UPDATE
    modes, sends = {unit.mode for unit in layers}, any(unit.sends_input for unit in layers)
    trains_all = spec.recipe.lora_rank is None
    if updates:
        found = {SMALLER_CHUNKS: tier is Tier.GPU and _spans_units(layout), ADAPTERS: trains_all}
    elif tier is Tier.HOST:
        found = {
            "recompute (planner.modes=recompute)": Mode.OFFLOAD in modes,
            "keep layers' inputs on the device (planner.offloads_inputs=false)": sends,
            ADAPTERS: trains_all,
        }
    else:
        found = {
            "take smaller microbatches (training.sequences)": spec.sequences > 1,
            "take shorter sequences (training.sequence_tokens)": spec.sequences == 1,
            "recompute (planner.modes=recompute)": Mode.KEEP in modes,
            "send layers' inputs to the host (planner.offloads_inputs=true)": (
                not sends and Mode.KEEP not in modes
            ),
            SMALLER_CHUNKS: _spans_units(layout),
        }
    return tuple([knob for knob, helps in found.items() if helps])


def _spans_units(layout: TrainingLayout) -> bool:
    """Whether a chunk holds more than a unit needs; a tied table by itself does not."""
    uses = Counter([chunk for unit in layout.units for chunk in unit.chunks])
    return any(n > 1 and len(layout.chunks[c].parameters) > 1 for c, n in uses.items())


def knobs_of_states(jobs: Iterable[TrainingJob]) -> tuple[str, ...]:
    """What makes states less that do not fit; who knows the memory policy knows where else they
    may lie."""
    train_all = any([job.recipe.lora_rank is None for job in jobs])
    return (*[ADAPTERS] * train_all, "take a smaller model")


def patient(fit: Fit[Half]) -> Fit[Half]:
    """A memory policy's `fit` that plans nothing while memory of ended jobs is still to come back:
    the engine then shows that memory, and asks again."""

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
    owners = {SHARED_OWNER, *(job.job_id for job in jobs)}
    return any(place.region.owner not in owners for place in view.held_bytes)
