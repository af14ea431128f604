"""What of a training job's memory is wanted yet: the last use of each region, by its progress."""

from __future__ import annotations

from engine.plan import Kind, Place
from engine.regions import ASIDE, FLOW, NORM, UNREDUCED
from engine.training import Training, layout_of


def last_use(place: Place, training: Training) -> str:
    """What wants the contents of a place of a job under way, in words; "" where nothing does.

    Weights and optimizer states are always wanted, and gathered weights can be gathered again:
    neither is told here.
    """
    _, kind, part, slot = place.region
    if kind is Kind.GRADIENT:
        return _of_gradient(part, training)
    if kind is Kind.ACTIVATION:
        return _of_activation(part, slot, training)
    if kind is not Kind.BUFFER:
        return ""
    if slot == FLOW:
        return _of_flow(part, training)
    if slot == ASIDE:
        return _of_aside(training)
    if slot == NORM:
        return _of_norm(training)
    if slot == UNREDUCED:
        return _of_unreduced(part, training)
    return ""


def _of_gradient(chunk: int, training: Training) -> str:
    """From the first backward that adds to it until its update, or the end of the step's last."""
    spec, step = training.spec, training.step
    if chunk not in training.trained_by or training.updated[chunk] > step:
        return ""
    done = [
        training.frontier(k)[1][u] for k in training.microbatches for u in _adders(chunk, training)
    ]
    if not any(done) or (not spec.has_update and min(done) >= spec.microbatch_tokens):
        return ""
    return f"before the update of chunk {chunk}" if spec.has_update else "before its last backward"


def _adders(chunk: int, training: Training) -> tuple[int, ...]:
    return tuple(training.trained_by[chunk])


def _of_activation(part: int, microbatch: int, training: Training) -> str:
    """A unit's input, or what its forward kept: until its backward, or its only forward."""
    units, total = training.spec.num_units, training.spec.microbatch_tokens
    unit = part - units if part >= units else part
    if microbatch not in training.microbatches or unit >= units:
        return ""
    forward, backward = training.frontier(microbatch)
    has_backward = unit >= training.first
    if (backward if has_backward else forward)[unit] >= total:
        return ""
    work = "backward" if has_backward else "forward"
    return f"before the {work} of unit {unit}"


def _of_flow(unit: int, training: Training) -> str:
    below = unit - 1
    for microbatch in training.microbatches:
        done = training.frontier(microbatch)[1]
        if below >= training.first and done[unit] > done[below]:
            return f"before the backward of unit {below}"
    return ""


def _of_aside(training: Training) -> str:
    """Between the backward of the upper unit of a tied table and that of the lowest unit."""
    first = training.first
    uppers = [
        u for u, unit in enumerate(layout_of(training).units) if unit.aside_bytes and u > first
    ]
    for microbatch in training.microbatches:
        done = training.frontier(microbatch)[1]
        if any([done[u] > done[first] for u in uppers]):
            return f"before the backward of unit {first}"
    return ""


def _of_norm(training: Training) -> str:
    """Between a step's last backward and its last update."""
    clips = training.spec.has_update and training.spec.recipe.clip_norm is not None
    if not clips or training.is_complete or not training.is_trained(training.microbatches[-1]):
        return ""
    return "before the last update of the step"


def _of_unreduced(chunk: int, training: Training) -> str:
    """Between the first and the last backward of a microbatch that adds to it."""
    total = training.spec.microbatch_tokens
    for microbatch in training.microbatches:
        backward = training.frontier(microbatch)[1]
        done = [backward[u] for u in training.trained_by.get(chunk, ())]
        if any(done) and min(done) < total:
            return f"before gradients of chunk {chunk} are complete"
    return ""
