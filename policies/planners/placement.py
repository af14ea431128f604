"""What the planners share: modes of units, and where model states lie at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from engine.contract.layout import Chunk, Layout, Mode, TrainingLayout, eager, sending_inputs
from engine.contract.regions import Place, Pool, Tier, gradient, optimizer, weight
from engine.contract.rules import Remedy
from models.training.shape import TrainingShape
from policies.training.out_of_memory import OutOfMemory, remedies_of_states
from traces.serving.request import TrainingJob

Start = Literal["host", "host_first", "device"]
STARTS: Mapping[Start, frozenset[Tier]] = {  # with the tiers in which states may then lie
    "host": frozenset({Tier.HOST}),
    "host_first": frozenset({Tier.HOST, Tier.GPU}),
    "device": frozenset({Tier.GPU}),
}
States = Literal["given", "first_update"]
Updates = Literal["last", "eager"]
LayOut = Callable[[TrainingShape, Sequence[Mode], int], TrainingLayout]  # for so many ranks


def prepared(
    shapes: Mapping[int, TrainingShape],
    jobs: Sequence[TrainingJob],
    modes: Mode | tuple[Mode, ...],
    start: Start,
    capacity_bytes: Mapping[Pool, int],
    lay_out: LayOut,
    states: States = "given",
    offloads_inputs: bool = False,
    sums: bool = False,
    updates: Updates = "last",
) -> Layout:
    """The layout of all training jobs.

    Args:
        shapes: per job, the shape of its model.
        jobs: all training jobs.
        modes: of activations, see `modes_of`.
        start: all states on the host, or all on the device, or on the host as far as it has room
            (optimizer states before weights) and the rest on the device.
        capacity_bytes: per pool.
        lay_out: the layout of a shape with a mode per unit, for so many ranks.
        states: of the optimizer; those made at the `first_update` lie nowhere before it.
        offloads_inputs: inputs of units that recompute or offload wait on the host for the
            backward.
        sums: gradients of a step of several microbatches lie there from the start, too.
        updates: behind all backwards of a step, or each behind the last one that it waits for.

    Returns:
        The layout of each job, and the places that are held before the first step.

    Raises:
        ValueError: the modes do not match the layers of a job.
        OutOfMemory: the states do not fit.
    """
    ranks = {job.job_id: job.ranks for job in jobs}
    layouts = {
        job_id: lay_out(shape, modes_of(modes, len(shape.units), job_id), ranks[job_id])
        for job_id, shape in shapes.items()
    }
    if offloads_inputs:
        layouts = {job_id: sending_inputs(layout) for job_id, layout in layouts.items()}
    if updates == "eager":
        layouts = {job.job_id: eager(layouts[job.job_id], job) for job in jobs}
    kinds = (optimizer, weight) if states == "given" else (weight,)
    remedies = remedies_of_states(jobs)
    held = [*_states(layouts, kinds)]
    if sums:
        several = {job.job_id for job in jobs if job.microbatches > 1}
        held += _states({i: x for i, x in layouts.items() if i in several}, (gradient,))
    return Layout(places=_places(held, start, capacity_bytes, remedies), training=layouts)


def modes_of(modes: Mode | tuple[Mode, ...], num_units: int, job_id: int) -> tuple[Mode, ...]:
    """The mode of activations of each unit.

    Args:
        modes: one for all layers, or one for each layer, or one for each unit. Embedding and head
            keep their activations where no mode is given for them.
        num_units: layers, embedding and head.
        job_id: for the message.

    Returns:
        One mode per unit, in the order of the forward.

    Raises:
        ValueError: the number of modes is none of these.
    """
    if isinstance(modes, Mode):
        modes = (modes,) * (num_units - 2)
    if len(modes) == num_units - 2:
        return (Mode.KEEP, *modes, Mode.KEEP)
    if len(modes) != num_units:
        raise ValueError(
            f"modes: {len(modes)} given, but training job {job_id} has {num_units - 2} "
            f"layers between embedding and head; give one for all, or one for each"
        )
    return tuple(modes)


def _places(
    states: Sequence[tuple[Place, Place, int]],
    start: Start,
    capacity_bytes: Mapping[Pool, int],
    remedies: Sequence[Remedy],
) -> dict[Place, int]:
    room = dict(capacity_bytes)
    found: dict[Place, int] = {}
    for on_host, on_device, nbytes in states:
        place = on_device if start == "device" else on_host
        if start == "host_first" and nbytes > room.get(on_host.pool, 0):
            place = on_device
        room[place.pool] = left = room.get(place.pool, 0) - nbytes
        if left < 0:
            raise OutOfMemory(place.pool, -left, "the model states", remedies, start)
        found[place] = nbytes
    return found


_BYTES: Mapping[Callable[..., Place], Callable[[Chunk], int]] = {
    optimizer: lambda chunk: chunk.optimizer_bytes,
    weight: lambda chunk: chunk.weight_bytes,
    gradient: lambda chunk: chunk.gradient_bytes,
}


def _states(
    layouts: Mapping[int, TrainingLayout], kinds: Sequence[Callable[..., Place]]
) -> list[tuple[Place, Place, int]]:
    """Per kind and chunk with states: its place on the host, that on the device, and its bytes."""
    found = list[tuple[Place, Place, int]]()
    for kind in kinds:
        for job_id, layout in layouts.items():
            for c, chunk in enumerate(layout.chunks):
                nbytes = _BYTES[kind](chunk)
                if nbytes:
                    found.append((kind(job_id, c, Tier.HOST), kind(job_id, c), nbytes))
    return found


def apart(shape: TrainingShape, parameters: Sequence[int]) -> list[list[int]]:
    """Parts frozen parameters from trained ones.

    Args:
        shape: the shape of the model.
        parameters: parameters of the shape, by number.

    Returns:
        The frozen ones and the trained ones, each in their order; no empty list.
    """
    found = [[p for p in parameters if shape.parameters[p].trains is t] for t in (False, True)]
    return [part for part in found if part]
