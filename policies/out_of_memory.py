"""What says that a training job cannot run in the memory there is: one line, in every backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeVar

from engine.plan import SHARED_OWNER, Plan, Pool, Slice, Tier
from engine.training_layout import Mode, TrainingLayout
from engine.view import View
from traces.request import TrainingJob

Half = TypeVar("Half")
Fit = Callable[[Half, tuple[Slice, ...], View], Plan]


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


def knobs_of_launch(tier: Tier, spec: TrainingJob, layout: TrainingLayout) -> tuple[str, ...]:
    """What a job may change so that its launches take less of a tier, beside what it has set.

    The device holds activations and, for the moment, chunks; the host holds states, and activations
    and inputs of layers only where they are offloaded.
    """
    layers = layout.units[1:-1]
    modes, sends = {unit.mode for unit in layers}, any(unit.sends_input for unit in layers)
    if tier is Tier.HOST:
        found = {
            "recompute (planner.modes=recompute)": Mode.OFFLOAD in modes,
            "keep layers' inputs on the device (planner.offloads_inputs=false)": sends,
            "train adapters (training/recipe=lora)": spec.recipe.lora_rank is None,
        }
    else:
        found = {
            "take smaller microbatches (training.sequences)": spec.sequences > 1,
            "take shorter sequences (training.sequence_tokens)": spec.sequences == 1,
            "recompute (planner.modes=recompute)": Mode.KEEP in modes,
            "send layers' inputs to the host (planner.offloads_inputs=true)": (
                not sends and Mode.KEEP not in modes
            ),
            "take smaller chunks (planner.chunk_elements)": _spans_units(layout),
        }
    return tuple([knob for knob, helps in found.items() if helps])


def _spans_units(layout: TrainingLayout) -> bool:
    """Whether a chunk holds more than a unit needs; a tied table by itself does not."""
    uses = Counter([chunk for unit in layout.units for chunk in unit.chunks])
    return any(n > 1 and len(layout.chunks[c].parameters) > 1 for c, n in uses.items())


def knobs_of_states(start: str) -> tuple[str, ...]:
    """What else may be done with states that do not fit where planner.start puts them."""
    elsewhere = {"host": "host_first", "device": "host"}
    moved = (f"take planner.start={elsewhere[start]}",) if start in elsewhere else ()
    return (*moved, "take a smaller model")


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
